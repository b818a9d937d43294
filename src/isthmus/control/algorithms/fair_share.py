"""`FairShare`: within a priority, the jobs of users who have used less of their share go first.

A user's usage is its chip-seconds, halved every `half_life_s`, with an hour of the chips that it holds now, divided by
its weight (the fair share of Slurm's multifactor priority, SchedMD 2010 on, with usage by user and computed exactly
rather than every few minutes). The queue is filled progressively: each job of a user that comes before counts as one
more chip-hour, so that users with equal usage take turns. A job thus waits for the users with less usage only; those
gain usage while their jobs run, so no user starves, and the usage of users with jobs in the queue approaches their
weights.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import log
from typing import Annotated

from sortedcontainers import SortedList

Key = tuple[int, float, int]
"""(priority rank, submission time in s, job number): the order of one user's jobs; numbers are unique."""

HELD_CHIP_S = 3600.0
"""Seconds that a held chip counts in advance, and chip-seconds that a job ahead of another one of its user counts."""

Queues = Mapping[str, Annotated[SortedList, Key]]
"""The waiting jobs by user."""


@dataclass(slots=True)
class Usage:
    """Chip-seconds of a user up to `at_s`, decayed, and the chips that it holds since."""

    used_chip_s: float = 0.0
    num_chips: int = 0
    at_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class FairShare:
    """The usage of every user. Without a half-life (0) nothing is in order but chips are counted."""

    half_life_s: float = 0.0
    # Weights that differ from 1, by user. Where users have projects these take their place, as `project:NAME`.
    weights: dict[str, float] = field(default_factory=dict)
    # The same of projects, by account.
    project_weights: dict[str, float] = field(default_factory=dict)
    usage: dict[str, Usage] = field(default_factory=dict)
    # The time as of which jobs are ordered.
    now_s: float = 0.0

    def configure(self, half_life_s: float, weights: Mapping[str, float], now_s: float) -> None:
        """Set half-life and weights; the usage so far stays as it is."""
        for one in self.usage.values():
            self._settle(one, now_s)
        self.half_life_s, self.weights = half_life_s, dict(weights)

    def charge(self, user: str, num_chips: int, now_s: float) -> None:
        """Count that a user holds `num_chips` more chips from now on (less, if negative)."""
        one = self.usage.setdefault(user, Usage(at_s=now_s))
        self._settle(one, now_s)
        one.num_chips += num_chips

    def used_chip_s(self, user: str) -> float:
        """Return the decayed chip-seconds of a user at `now_s`."""
        one = self.usage.get(user)
        return 0.0 if one is None else self._used(one, self.now_s)

    def weight(self, user: str) -> float:
        """Return the weight of a user or a project."""
        return self.weights.get(user) or self.project_weights.get(user, 1.0)

    def tag(self, user: str, num_ahead: int) -> float:
        """Return the tag of a user's job with `num_ahead` of its own jobs before it: the lowest goes first."""
        one = self.usage.get(user)
        held = 0 if one is None else one.num_chips
        return (self.used_chip_s(user) + HELD_CHIP_S * (held + num_ahead)) / self.weight(user)

    def order(self, queues: Queues, ranks: range) -> Iterator[Key]:
        """Yield the keys of all jobs, first to start first; a lower rank precedes."""
        for rank in ranks:
            waiting = {user: queue.irange((rank,), (rank + 1,)) for user, queue in queues.items()}
            heap = [(self.tag(user, 0), key, 0, user) for user, keys in waiting.items() if (key := next(keys, None))]
            heapq.heapify(heap)
            while heap:
                _, key, num_ahead, user = heap[0]
                yield key
                following = next(waiting[user], None)
                if following is None:
                    heapq.heappop(heap)
                else:
                    heapq.heapreplace(heap, (self.tag(user, num_ahead + 1), following, num_ahead + 1, user))

    def place(self, queues: Queues, user: str, key: Key) -> int:
        """Return the place in `order` from 1 of a user's job, also of one that is not in the queues."""
        rank = key[0]
        own = queues.get(user)
        num_ahead = 0 if own is None else own.bisect_left(key) - own.bisect_left((rank,))
        mine = self.tag(user, num_ahead), key
        place = num_ahead + 1
        for other, queue in queues.items():
            first, last = queue.bisect_left((rank,)), queue.bisect_left((rank + 1,))
            place += first
            low, high = 0, last - first if other != user else 0
            while low < high:
                middle = (low + high) // 2
                if (self.tag(other, middle), queue[first + middle]) < mine:
                    low = middle + 1
                else:
                    high = middle
            place += low
        return place

    def _settle(self, one: Usage, now_s: float) -> None:
        one.used_chip_s, one.at_s = self._used(one, now_s), max(one.at_s, now_s)

    def _used(self, one: Usage, now_s: float) -> float:
        """Return the usage at `now_s`: chips that are held add to it while it decays."""
        if not self.half_life_s:
            return one.used_chip_s
        left = 0.5 ** (max(0.0, now_s - one.at_s) / self.half_life_s)
        return float(one.used_chip_s * left + one.num_chips * (1 - left) * self.half_life_s / log(2))
