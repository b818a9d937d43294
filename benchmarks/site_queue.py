"""10,000 pending jobs of one site brought into another order: half the owner's own, half parts of the pool.

It runs the real service of an agent with the built-in adapter, whose queue is a file. The server's new order
arrives, the agent compares it with the present queue and requests the fewest moves, the adapter carries them
out, and the agent reads the queue again. Inversions are the pairs of jobs in the wrong order, as a share of all
pairs. The peer is the number of moves that place every job behind its neighbour. No cluster is attached: the
commands of a real scheduler (one `scontrol` or one patch per move) take additional time.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from bisect import bisect_left, insort
from collections.abc import Sequence
from pathlib import Path

from benchmarks.table import Row, compared, print_rows
from isthmus.agent.adapters.local_adapter import LocalAdapter
from isthmus.agent.adapters.scheduler_adapter import QueueMove
from isthmus.agent.service.agent_service import AgentService
from isthmus.agent.service.agent_state_folder import LocalJobFile, submit_local_job
from isthmus.core.messages.agent_messages import AgentOrders, PartOrder, QueueEntry
from isthmus.core.plan import Plan, Stage
from isthmus.core.pool import Cluster, NodeGroup
from isthmus.site.site_queue import queue_order

CARDS = 8
SITE = Cluster(
    name="site", owner="owner", node_groups=(NodeGroup(name="g", chip="H20", nodes=1, chips_per_node=CARDS),)
)
PLAN = Plan(
    id="p",
    stages=(Stage(cluster="site", node_group="g", layers=(0, 1)),),
    micro_batches=1,
    micro_batch_size=1,
    sequence_length=1,
)


class Counting(LocalAdapter):
    """The built-in adapter, counting the moves that it is asked for."""

    num_moves = 0

    def order(self, moves: Sequence[QueueMove], removed: Sequence[QueueEntry] = ()) -> None:
        """Carry them out as ever."""
        self.num_moves += len(moves)
        super().order(moves, removed)


def inversions(present: Sequence[QueueEntry], wanted: Sequence[QueueEntry]) -> float:
    """Return the share of pairs that stand in another order than they should; those missing stand last."""
    place = {entry: index for index, entry in enumerate(wanted)}
    seen: list[int] = []
    wrong = 0
    for at, entry in enumerate(dict.fromkeys([*present, *wanted])):
        wrong += at - bisect_left(seen, place[entry])
        insort(seen, place[entry])
    return wrong / (len(wanted) * (len(wanted) - 1) / 2)


def measure(num: int, shuffled: float, seed: int) -> list[Row]:
    """Have a site with `num` pending jobs, then move the share `shuffled` of the pool's to other places."""
    rng = random.Random(seed)
    jobs = [f"p{number}" for number in range(num // 2)]
    parts = tuple(PartOrder(job=job, attempt=1, desired="queued", plan=PLAN) for job in jobs)
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder)
        for number in range(num - len(jobs)):
            level = ("high", "middle", "low")[number % 3]
            file = LocalJobFile(command=("sleep", "1000"), node_group="g", chips=CARDS, level=level)
            submit_local_job(state, f"l{number}", file)
        adapter = Counting(SITE, state / "queue")
        shell = AgentService(cluster=SITE, adapter=adapter, state=state, clock=time.monotonic)
        shell.machine.site.policy = shell.machine.site.policy.model_copy(update={"hold_back_s": 1e9})
        shell.apply_orders(AgentOrders(parts=parts, queue=tuple(jobs)))
        shell.tick()
        shell.tick()
        chosen = rng.sample(range(len(jobs)), round(shuffled * len(jobs)))
        for one, other in zip(chosen, rng.sample(chosen, len(chosen)), strict=True):
            jobs[one], jobs[other] = jobs[other], jobs[one]
        adapter.num_moves = 0
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        shell.apply_orders(AgentOrders(parts=parts, queue=tuple(jobs)))
        shell.tick()
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        wanted = [QueueEntry(job=part.job, attempt=part.attempt) for part in queue_order(shell.machine.site)]
        left = 100 * inversions(adapter.observe().queue, wanted)
        shell.shut_down()
        while not shell.stopped:
            time.sleep(0.05)
            shell.tick()
    what = f"{num:,} pending, {shuffled:.0%} of the pool's jobs moved"
    return [
        Row(what=f"{what}: reordered", ours=wall_s, unit="s", target="at most 10", met=wall_s <= 10),
        Row(what=f"{what}: reordered", ours=cpu_s, unit="CPU s"),
        Row(what=f"{what}: inversions after", ours=left, unit="%", target="at most 1", met=left <= 1),
        compared(f"{what}: moves", adapter.num_moves, "moves", "one a job", len(wanted)),
    ]


def main() -> int:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="1,000 jobs")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    num = 1000 if options.quick else 10_000
    rows = [row for shuffled in (0.02, 1.0) for row in measure(num, shuffled, seed=1)]
    print_rows(rows, options.json)
    return 0 if all(row.met is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
