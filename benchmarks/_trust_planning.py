"""Planning beside one hostile owner or user: CPU seconds of plans, and what others wait for theirs.

Requests go through the code of the server and of the planner's process: the clusters to plan on, a request in JSON,
`propose_plans`, its answer. Waits are in virtual time: the real order of the planner's queue, with the CPU seconds of
real searches as their durations.
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence

from benchmarks._planning import LLAMA2_7B, job
from benchmarks.search_scale import CASES, ask, llama
from benchmarks.table import Row, compared
from isthmus.control.algorithms.fair_order import FairOrder
from isthmus.control.service.planner_process import NUM_PLANNERS, answer_request
from isthmus.control.service.planner_queue import make_plan_request
from isthmus.control.state.events import MakePlans
from isthmus.core.job import PlacementConstraints
from isthmus.core.model import Model
from isthmus.core.plan import PlanSet
from isthmus.core.pool import Pool
from isthmus.core.views.api_views import Submission

KINDS = ("H100", "A100", "910B", "A800", "V100", "BI-V150", "H20", "GH200")
NUM_HONEST = 20
"""Clusters of five owners, linked each to each; all others belong to one owner and are linked to these."""


def measure(quick: bool) -> list[Row]:
    """Return the CPU seconds of plans over small and crowded pools, and what users wait beside hostile ones."""
    rows = [_plan_row(f"plan over {what}", seconds, 0.5) for what, seconds in _small_pools()]
    for clusters, aim_s in ((20, 1.0), (200, 1.0), (1000, 5.0)):
        for spread in ("equal links", "links of 1 to 100 Gbit/s"):
            seconds, found = _planned(make_pool(clusters, spread != "equal links"))
            hostile = f", {clusters - NUM_HONEST} of one owner" if clusters > NUM_HONEST else " of 8 kinds"
            best = min(plan.predicted.iteration_s for plan in found.plans if plan.predicted)
            what = f"plan over {clusters:,} clusters{hostile}, {spread}, best step {best:.3f} s"
            rows.append(_plan_row(what, seconds, aim_s))
    return rows + _wait_rows(10 if quick else 40)


def _plan_row(what: str, seconds: float, aim_s: float) -> Row:
    return Row(what=what, ours=seconds, unit="CPU s", target=f"at most {aim_s:g}", met=seconds <= aim_s)


def make_pool(clusters: int, random_links: bool) -> Pool:
    """Return a pool of sites of 8 chips, of which `NUM_HONEST` belong to five owners and the others to one.

    The links between honest sites are the same in every pool.
    """
    names = [f"site{i:04}" for i in range(clusters)]
    honest, others = names[:NUM_HONEST], names[NUM_HONEST:]
    pairs = [*itertools.combinations(honest, 2), *itertools.product(honest, others)]
    chance = random.Random(NUM_HONEST)
    return Pool.model_validate(
        {
            "clusters": [
                {
                    "name": name,
                    "owner": f"owner{i % 5}" if i < NUM_HONEST else "hostile",
                    "node_groups": [{"name": "g", "chip": KINDS[i % 8], "nodes": 1, "chips_per_node": 8}],
                }
                for i, name in enumerate(names)
            ],
            "links": [
                {
                    "between": ends,
                    "bandwidth_gbps": chance.uniform(1, 100) if random_links else 10,
                    "round_trip_ms": 10,
                }
                for ends in pairs
            ],
        }
    )


def _small_pools() -> list[tuple[str, float]]:
    """Return the seconds at three and four sites of unlike chips."""
    found = []
    for what, where, dimensions, samples, *_ in CASES[1:3]:
        ask(llama(*dimensions), where, samples)
        found.append((what.partition(",")[0], ask(llama(*dimensions), where, samples)[1]))
    return found


def _request(pool: Pool) -> MakePlans:
    layers, hidden, inner, heads, kv_heads = LLAMA2_7B
    config = {
        "intermediate_size": inner, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers, "hidden_size": hidden, "vocab_size": 32000,
    }  # fmt: skip
    model = Model(
        path="llama", architecture="LlamaForCausalLM", num_layers=layers, hidden_size=hidden, vocab_size=32000,
        config=config,
    )  # fmt: skip
    free = {one.name: {group.name: group.num_chips for group in one.node_groups} for one in pool.clusters}
    wanted = job(64, placement=PlacementConstraints(several_owners=True, network=True))
    submission = Submission(job=wanted, model=model)
    return MakePlans(job_id="job", round=1, submission=submission, clusters=pool.clusters, free_chips=free)


def _planned(pool: Pool) -> tuple[float, PlanSet]:
    """Return the CPU seconds of one request, as the server makes it and the planner's process answers it."""
    wanted = _request(pool)
    begun_s = time.process_time()
    request = make_plan_request(wanted, pool)
    assert request is not None
    plans = answer_request(request.model_dump_json(by_alias=True)).plans
    seconds = time.process_time() - begun_s
    assert plans is not None
    return seconds, plans


def _wait_rows(num_jobs: int) -> list[Row]:
    """Return how long ten users wait for plans alone, beside a hostile owner, and beside a hostile user as well."""
    clean_s = [_planned(make_pool(NUM_HONEST, True))[0] for _ in range(3)]
    crowded_s = [_planned(make_pool(200, True))[0] for _ in range(3)]
    mean_s = statistics.mean(clean_s)
    chance = random.Random(1)
    arrivals = [(chance.uniform(0, num_jobs * 10 * mean_s / 0.5), f"user{i % 10}") for i in range(num_jobs * 10)]
    hostile = [(0.0, "hostile")] * 300
    alone_s = _mean_wait_s(arrivals, clean_s, _Turns())
    rows = []
    for what, durations_s, jobs, order in (
        ("beside 300 jobs of another user", clean_s, [*arrivals, *hostile], _Turns),
        ("beside 300 jobs, first come first served, as before", clean_s, [*arrivals, *hostile], _Arrival),
        ("beside 300 jobs and 180 clusters of an owner", crowded_s, [*arrivals, *hostile], _Turns),
    ):
        waited_s = _mean_wait_s(jobs, durations_s, order())
        goal = {"target": "ratio at most 1.1", "met": waited_s <= 1.1 * alone_s} if order is _Turns else {}
        rows.append(compared(f"ten users' mean wait for a plan, {what}", waited_s, "s", "alone", alone_s, **goal))
    return rows


class _Turns:
    """Requests in the order of the planner's queue; a user has at most one search fewer than there are planners."""

    num_planners = NUM_PLANNERS

    def __init__(self) -> None:
        self._order, self._searches = FairOrder(), Counter[str]()

    def add(self, user: str, number: int) -> None:
        self._order.add(user, (1, 0.0, number))

    def begin(self, user_of: Sequence[str]) -> int | None:
        place = self._order.pop(lambda user: self._searches[user] < NUM_PLANNERS - 1)
        if place is None:
            return None
        self._searches[user_of[place[2]]] += 1
        return place[2]

    def end(self, user: str) -> None:
        self._searches[user] -= 1


class _Arrival:
    """Requests first come, first served, by one planner."""

    num_planners = 1

    def __init__(self) -> None:
        self._waiting: list[int] = []

    def add(self, _user: str, number: int) -> None:
        self._waiting.append(number)

    def begin(self, _user_of: Sequence[str]) -> int | None:
        return self._waiting.pop(0) if self._waiting else None

    def end(self, _user: str) -> None:
        """Nothing changes."""


def _mean_wait_s(jobs: Sequence[tuple[float, str]], durations_s: Sequence[float], order: _Turns | _Arrival) -> float:
    """Return the mean seconds from a request of a user to its answer, hostile ones apart."""
    jobs = sorted(jobs)
    user_of = [user for _, user in jobs]
    lasts_s: Callable[[int], float] = lambda number: durations_s[number % len(durations_s)]  # noqa: E731
    waits_s, running, now_s = list[float](), list[tuple[float, int]](), 0.0
    arriving = iter(enumerate(jobs))
    upcoming = next(arriving, None)
    while upcoming is not None or running:
        if upcoming is not None and (not running or upcoming[1][0] <= running[0][0]):
            now_s = upcoming[1][0]
            order.add(upcoming[1][1], upcoming[0])
            upcoming = next(arriving, None)
        else:
            now_s, done = heapq.heappop(running)
            order.end(user_of[done])
            if user_of[done] != "hostile":
                waits_s.append(now_s - jobs[done][0])
        while len(running) < order.num_planners and (number := order.begin(user_of)) is not None:
            heapq.heappush(running, (now_s + lasts_s(number), number))
    return statistics.mean(waits_s)


if __name__ == "__main__":
    for row in itertools.chain(measure(quick=True)):
        print(" | ".join(row))
