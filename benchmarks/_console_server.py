"""A server with a long queue, for `benchmarks.console`: `python -m benchmarks._console_server FOLDER JOBS`.

The jobs are events of its log, which it folds at its start as after any other one. It prints its URL, the CPU
seconds and the size of the process.
"""

from __future__ import annotations

import itertools
import json
import random
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.control_core import gang, submission
from isthmus.control.algorithms.compaction_policy import CompactionPolicy
from isthmus.control.placement import PlanRequest
from isthmus.control.server.run_server import ServerConfig, ServerInfo, run_server
from isthmus.control.server.server_config import DATABASE_FILE
from isthmus.control.state.coordinator_config import CoordinatorConfig
from isthmus.control.state.events import AgentReported, Event, JobSubmitted
from isthmus.control.store.sqlite_store import SqliteStore
from isthmus.core.plan import PlanSet
from isthmus.core.pool import Cluster, NodeGroup

SITES, NODES, CHIPS_PER_NODE = 50, 10_000, 8
USERS = 1000
BATCH = 10_000


def site(number: int) -> Cluster:
    """Return one of the pool's sites."""
    group = NodeGroup(name="g", chip="H20", nodes=NODES // SITES, chips_per_node=CHIPS_PER_NODE)
    return Cluster(name=f"site-{number}", owner=f"owner-{number % 20}", node_groups=(group,))


def log(num_jobs: int, now_s: float) -> Iterator[Event]:
    """Yield the events of a pool whose chips are in use and whose users have submitted `num_jobs` jobs."""
    chance = random.Random(1)
    for number in range(SITES):
        yield AgentReported(now_s=now_s, cluster=site(number), incarnation="1", free_chips={"g": 0})
    for number in range(num_jobs):
        user, sent = f"user-{number % USERS}", submission(number, chance)
        yield JobSubmitted(now_s=now_s, job_id=f"job-{number}", user=user, submission=sent)


def plan_anywhere(_: PlanRequest) -> PlanSet:
    """Return a plan that the pool could hold: the jobs at the head of the queue wait for its chips."""
    return PlanSet(plans=(gang(next(_numbers), random.Random(2)),))


_numbers = itertools.count()


def main() -> None:
    """Serve until the process is ended."""
    folder, num_jobs = Path(sys.argv[1]), int(sys.argv[2])
    store, batch = SqliteStore(folder / DATABASE_FILE), list[Event]()
    for event in log(num_jobs, time.time() - 3600):
        batch.append(event)
        if len(batch) >= BATCH:
            store.append(batch)
            batch = []
    store.append(batch)

    def announce(listening: ServerInfo) -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        found = {"url": listening.url, "cpu_s": used.ru_utime + used.ru_stime, "rss_bytes": used.ru_maxrss * 1024}
        print(json.dumps(found), flush=True)

    run_server(
        # No agent reports again: the sites stay connected. The log is not compacted while it is measured.
        ServerConfig(
            state=folder, port=0, rules=CoordinatorConfig(agent_timeout_s=1e9),
            compaction=CompactionPolicy(keep_bytes=1 << 40),
        ),
        announce,
        make_store=lambda _: store,
        planner=plan_anywhere,
    )  # fmt: skip


if __name__ == "__main__":
    main()
