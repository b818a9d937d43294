"""Loads in the shapes of public scheduler tests, and the pools that they run on."""

from __future__ import annotations

import itertools

from isthmus.control.simulation.traces.job_trace import TraceJob
from isthmus.core.pool import Cluster, Link, NodeGroup, Pool
from isthmus.core.priority import Priority

COHORTS, QUEUES, QUOTA = 5, 6, 20
CLASSES: tuple[tuple[str, int, float, float, int, Priority], ...] = (
    ("small", 350, 0.1, 0.2, 1, "low"),
    ("medium", 100, 0.5, 0.5, 5, "middle"),
    ("large", 50, 1.2, 1.0, 20, "high"),
)
"""Of every queue of Kueue's baseline: name, number, seconds between two, seconds of a run, what it needs."""


def kueue_baseline(part: float = 1.0) -> tuple[Pool, list[TraceJob]]:
    """Return Kueue's baseline: 15,000 gangs (`part` of them) in 30 queues of 20, which 5 cohorts share.

    A cohort is an owner, a queue one of its clusters: its jobs may run on all of them together.
    """
    clusters = tuple(
        Cluster(
            name=f"cohort-{cohort}-{queue}",
            owner=f"cohort-{cohort}",
            node_groups=(NodeGroup(name="g", chip="H20", nodes=QUOTA, chips_per_node=1),),
        )
        for cohort in range(COHORTS)
        for queue in range(QUEUES)
    )
    links = tuple(
        Link(source=a.name, target=b.name, bandwidth_gbps=1000, delay_ms=1)
        for a, b in itertools.permutations(clusters, 2)
        if a.owner == b.owner
    )
    jobs = [
        TraceJob(
            name=f"{name}-{cohort}-{queue}-{number}",
            owner=f"cohort-{cohort}",
            submit_s=number * every_s,
            run_s=run_s,
            workers=chips,
            priority=priority,
        )
        for name, count, every_s, run_s, chips, priority in CLASSES
        for cohort in range(COHORTS)
        for queue in range(QUEUES)
        for number in range(int(count * part))
    ]
    return Pool(clusters=clusters, links=links), sorted(jobs, key=lambda job: (job.submit_s, job.name))


def kai_scale(part: float = 1.0) -> tuple[Pool, list[TraceJob]]:
    """Return KAI's scale test: 4,000 jobs of one chip (`part` of them), all at once, on 500 nodes of 8."""
    nodes = int(500 * part)
    group = NodeGroup(name="g", chip="H20", nodes=nodes, chips_per_node=8)
    jobs = [TraceJob(name=f"job-{number}", owner="a", submit_s=0.0, run_s=600.0) for number in range(nodes * 8)]
    return Pool(clusters=(Cluster(name="a", owner="a", node_groups=(group,)),)), jobs
