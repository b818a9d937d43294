"""A week at one site on a virtual clock: parts arrive, wait in order with backfilling, and are placed by a policy.

The queue is the same for all policies: in arrival order; while the head waits, later parts start if they end before
the head could start by the ends of what runs (EASY backfilling, with known run times). `first fit` takes the first
nodes, and the first super-node that holds a unit; `best fit` the nodes and super-nodes with the fewest free cards that
do. With `moves` the head's wait may be ended by moving parts: each is saved first, pauses for `PAUSE_S`, and moves at
most once in `REST_S`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from isthmus.site.topology.free_cards import FreeCards
from isthmus.site.topology.gang_placement import GangPlacement
from isthmus.site.topology.gang_request import GangRequest, GangUnit
from isthmus.site.topology.place_gang import place_gang
from isthmus.site.topology.plan_moves import RunningGang, plan_moves
from isthmus.site.topology.site_tree import SiteTree
from isthmus.site.topology.unit_kinds import unit_kinds

WEEK_S, PAUSE_S, SAVE_S, REST_S = 7 * 86_400.0, 180.0, 60.0, 7_200.0
RETRY_S, MAX_MOVES = 300.0, 6
Taken = Mapping[int, int]
Policy = Callable[[FreeCards, GangRequest], Taken | None]


@dataclass
class WeekJob:
    """A part of the trace. `is_large`: whole ToRs."""

    number: int
    submit_s: float
    run_s: float
    request: GangRequest
    is_large: bool
    start_s: float = math.nan
    end_s: float = math.nan
    taken: Taken = field(default_factory=dict)
    moved_s: float = -math.inf
    num_moves: int = 0


def week(tree: SiteTree, tor_nodes: int, load: float, seed: int, span_s: float = WEEK_S) -> list[WeekJob]:
    """Return the jobs of a week: small parts, parts of a few nodes, and gangs of one or two whole ToRs."""
    chance = random.Random(seed)
    kinds: Sequence[tuple[float, Callable[[], GangRequest], float, bool]] = (
        (0.50, lambda: gang(1, chance.choice((1, 2, 4))), 3.0, False),
        (0.25, lambda: gang(1, 8), 4.0, False),
        (0.17, lambda: gang(chance.choice((2, 3, 4)), 8), 4.0, False),
        (0.08, lambda: gang(chance.choice((1, 1, 2)), 8 * tor_nodes), 4.0, True),
    )
    jobs: list[WeekJob] = []
    work_card_s, at_s = 0.0, 0.0
    drawn = []
    while work_card_s < load * sum(tree.cards) * span_s:
        _, make, mean_h, is_large = chance.choices(kinds, weights=[one[0] for one in kinds])[0]
        request, run_s = make(), min(86_400.0, max(300.0, 3600 * mean_h * chance.lognormvariate(-0.5, 1.0)))
        work_card_s += request.num_cards * run_s
        drawn.append((request, run_s, is_large))
    for number, (request, run_s, is_large) in enumerate(drawn):
        at_s += chance.expovariate(len(drawn) / span_s)
        jobs.append(WeekJob(number, at_s, run_s, request, is_large))
    return jobs


def gang(num_units: int, ranks: int) -> GangRequest:
    """Return a request of equal units of ranks with one card each."""
    return GangRequest(
        units=tuple(GangUnit(ranks={unit * ranks + one: 1 for one in range(ranks)}) for unit in range(num_units))
    )


def ours(free: FreeCards, request: GangRequest) -> Taken | None:
    """Place by `place_gang`."""
    found = place_gang(free, request)
    return found.taken if isinstance(found, GangPlacement) else None


def first_fit(free: FreeCards, request: GangRequest) -> Taken | None:
    """Place on the first nodes and super-nodes that hold a unit."""
    return _fit(free, request, lambda _: 0)


def best_fit(free: FreeCards, request: GangRequest) -> Taken | None:
    """Place on the nodes and super-nodes with the fewest free cards that hold a unit."""
    return _fit(free, request, lambda num_free: num_free)


def _fit(free: FreeCards, request: GangRequest, key: Callable[[int], int]) -> Taken | None:
    left, taken, tree = list(free.masks), dict[int, int](), free.tree
    for kind in unit_kinds(tree, request)[0]:
        size, num = kind.piece_cards, kind.num_pieces
        groups = tree.members[tree.unit_level] if num > 1 and tree.unit_level is not None else None
        for _ in kind.units:
            pools = [tuple(range(len(left)))] if groups is None else groups
            fits = [nodes for nodes in pools if sum(left[n].bit_count() // size for n in nodes) >= num]
            if not fits:
                return None
            chosen = min(fits, key=lambda nodes: key(sum(left[n].bit_count() for n in nodes)))
            for _ in range(num):
                holding = [n for n in chosen if left[n].bit_count() >= size]
                if not holding:
                    return None
                node = min(holding, key=lambda n: key(left[n].bit_count()))
                for _ in range(size):
                    low = left[node] & -left[node]
                    left[node] ^= low
                    taken[node] = taken.get(node, 0) | low
    return taken


@dataclass
class WeekResult:
    """Mean waits in seconds, the number of moves, and the card-seconds that pauses cost."""

    large_wait_s: float
    wait_s: float
    num_moves: int
    pause_card_s: float
    num_jobs: int


def run_week(tree: SiteTree, jobs: Sequence[WeekJob], policy: Policy, *, moves: bool) -> WeekResult:
    """Run the trace; every job starts, since the queue is drained after the last arrival."""
    site = _Site(tree, policy, moves)
    arrivals = list(jobs)[::-1]
    while arrivals or site.queue or site.running:
        next_end_s = min((job.end_s for job in site.running.values()), default=math.inf)
        next_arrival_s = arrivals[-1].submit_s if arrivals else math.inf
        site.now_s = min(next_end_s, next_arrival_s)
        if next_arrival_s <= next_end_s:
            site.queue.append(arrivals.pop())
        for job in [one for one in site.running.values() if one.end_s <= site.now_s]:
            site.end(job)
        site.start_queued()
    large = [job.start_s - job.submit_s for job in jobs if job.is_large]
    every = [job.start_s - job.submit_s for job in jobs]
    return WeekResult(sum(large) / len(large), sum(every) / len(every), site.num_moves, site.pause_card_s, len(jobs))


class _Site:
    def __init__(self, tree: SiteTree, policy: Policy, moves: bool) -> None:
        self.free, self._policy, self._moves = FreeCards(tree), policy, moves
        self.queue: list[WeekJob] = []
        self.running: dict[int, WeekJob] = {}
        self.now_s, self.num_moves, self.pause_card_s, self._retry_s = 0.0, 0, 0.0, 0.0

    def end(self, job: WeekJob) -> None:
        del self.running[job.number]
        for node, mask in job.taken.items():
            self.free.give(node, mask)

    def start_queued(self) -> None:
        """Start the head while it fits; then backfill what ends before the head could start."""
        while self.queue:
            head = self.queue[0]
            taken = self._policy(self.free, head.request)
            if taken is None:
                if not (self._moves and self._move_for(head)):
                    break
                continue
            self._start(self.queue.pop(0), taken)
        if not self.queue:
            return
        shadow_s = self._shadow_s(self.queue[0])
        for job in self.queue[1:]:
            if self.now_s + job.run_s <= shadow_s:
                taken = self._policy(self.free, job.request)
                if taken is not None:
                    self.queue.remove(job)
                    self._start(job, taken)

    def _start(self, job: WeekJob, taken: Taken, delay_s: float = 0.0) -> None:
        for node, mask in taken.items():
            self.free.take(node, mask)
        job.start_s, job.end_s, job.taken = self.now_s + delay_s, self.now_s + delay_s + job.run_s, taken
        self.running[job.number] = job

    def _shadow_s(self, head: WeekJob) -> float:
        """Return when the head could start if nothing else began: the first end by which it has a place."""
        ends = sorted((job.end_s, job.number) for job in self.running.values())
        low, high = 0, len(ends) - 1
        while low < high:
            middle = (low + high) // 2
            left = self.free.copy()
            for _, number in ends[: middle + 1]:
                for node, mask in self.running[number].taken.items():
                    left.give(node, mask)
            low, high = (low, middle) if self._policy(left, head.request) is not None else (middle + 1, high)
        return ends[low][0]

    def _move_for(self, head: WeekJob) -> bool:
        """Move parts so that the head can start; return whether it has started."""
        if self.now_s < self._retry_s or self.free.total < head.request.num_cards:
            return False
        self._retry_s = self.now_s + RETRY_S
        running = [
            RunningGang(
                key=job.number, request=job.request, taken=job.taken, cost_card_s=PAUSE_S * job.request.num_cards,
                movable=self.now_s - job.moved_s >= REST_S and self.now_s >= job.start_s,
            )
            for job in self.running.values()
        ]  # fmt: skip
        gain_card_s = head.request.num_cards * (self._shadow_s(head) - self.now_s)
        found = plan_moves(self.free, head.request, running, gain_card_s=gain_card_s, max_moves=MAX_MOVES)
        if found is None:
            return False
        for number in found.moved:
            for node, mask in self.running[number].taken.items():
                self.free.give(node, mask)
        for number in found.moved:
            job = self.running[number]
            job.taken = found.moved_to[number].taken
            for node, mask in job.taken.items():
                self.free.take(node, mask)
            job.end_s, job.moved_s, job.num_moves = job.end_s + PAUSE_S, self.now_s, job.num_moves + 1
            self.num_moves += 1
            self.pause_card_s += PAUSE_S * job.request.num_cards
        self._start(self.queue.pop(0), found.placement.taken, delay_s=SAVE_S)
        self._retry_s = self.now_s
        return True
