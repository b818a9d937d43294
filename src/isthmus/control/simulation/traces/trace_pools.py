"""Pools for traces: `make_trace_pool` makes a pool, `assign_owners` assigns a trace's jobs to the owners of a pool."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from isthmus.control.simulation.traces.job_trace import Trace, TraceJob
from isthmus.core.pool import Cluster, Link, NodeGroup, Pool
from isthmus.core.priority import PriorityMap

CHIP, CHIPS_PER_NODE = "H20", 8
BANDWIDTH_GBPS, DELAY_MS = 100.0, 10.0
OWNER_LEVELS = ("repair", "own")
"""Priority levels of a simulated site above the pool's: node repairs and its owner's jobs."""


def make_trace_pool(trace: Trace, load: float, owners: int) -> Pool:
    """Return a fully connected pool for the `owners` with the highest demand, sized for offered load `load`.

    Each owner has one cluster of equal nodes.
    """
    asked = _chip_seconds(trace.jobs)
    names = sorted(asked, key=lambda owner: (-asked[owner], owner))[:owners]
    span_s = max((job.submit_s for job in trace.jobs), default=0.0) or 1.0
    clusters = tuple(
        Cluster(
            name=_pool_name(owner),
            owner=_pool_name(owner),
            node_groups=(
                NodeGroup(
                    name="nodes",
                    chip=CHIP,
                    nodes=max(1, math.ceil(asked[owner] / span_s / load / CHIPS_PER_NODE)),
                    chips_per_node=CHIPS_PER_NODE,
                ),
            ),
        )
        for owner in names
    )
    links = tuple(
        Link(source=a.name, target=b.name, bandwidth_gbps=BANDWIDTH_GBPS, delay_ms=DELAY_MS)
        for a, b in itertools.permutations(clusters, 2)
    )
    return Pool(clusters=clusters, links=links)


def assign_owners(trace: Trace, pool: Pool) -> tuple[tuple[TraceJob, ...], Pool]:
    """Return the jobs reassigned to the pool's owners, and the pool with `OWNER_LEVELS` added.

    Unknown owners of the trace, in order of decreasing demand, map to the pool owner with the least demand
    per chip. Chip models that the pool lacks become any model.
    """
    chips: dict[str, int] = {}
    for one in pool.clusters:
        chips[one.owner] = chips.get(one.owner, 0) + sum(group.num_chips for group in one.node_groups)
    known = {group.chip for one in pool.clusters for group in one.node_groups}
    asked = _chip_seconds(trace.jobs)
    given = {owner: _pool_name(owner) for owner in asked if _pool_name(owner) in chips}
    load = dict.fromkeys(chips, 0.0)
    for owner in sorted(asked, key=lambda one: (one not in given, -asked[one], one)):
        to = given.setdefault(owner, min(chips, key=lambda one: ((load[one] + 1) / chips[one], one)))
        load[to] += asked[owner]
    jobs = tuple(replace(job, owner=given[job.owner], chip=job.chip if job.chip in known else "") for job in trace.jobs)
    clusters = tuple(one.model_copy(update={"priorities": _add_owner_levels(one)}) for one in pool.clusters)
    return jobs, pool.model_copy(update={"clusters": clusters})


def _chip_seconds(jobs: Sequence[TraceJob]) -> dict[str, float]:
    """Return each owner's demand in chip seconds."""
    asked: dict[str, float] = {}
    for job in jobs:
        asked[job.owner] = asked.get(job.owner, 0.0) + job.chips * job.run_s
    return asked


def _add_owner_levels(cluster: Cluster) -> PriorityMap:
    there = cluster.priorities
    levels = (*OWNER_LEVELS, *(level for level in there.levels if level not in OWNER_LEVELS))
    return there.model_copy(update={"levels": levels})


def _pool_name(owner: str) -> str:
    """Return an owner of a trace as a valid name in the pool."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in owner)[:48]
    return kept if kept[:1].isalnum() else f"owner-{kept}"
