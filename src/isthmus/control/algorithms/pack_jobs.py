"""`pack_jobs`: which of many jobs start together on what several queues have free, for the greatest value.

A job takes what it needs at every queue or nothing: a knapsack with one constraint for each queue. Solved by
branch and bound; the bound is the smaller of two relaxations (the constraints added up, each weighted by one
over what its queue has free, and a job cut where the sum is used up; every queue filled to the brim at the
best value per chip). A search that is cut short is followed by exchanges: a job that was left out is put
first, and the rest filled up behind it, as long as that is worth more.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

Needs = Mapping[str, int]
"""Chips that a job needs by queue, each at least 1."""

NODE_LIMIT = 2_000
_CLOSE = 1e-9


@dataclass(frozen=True)
class Packing:
    """Indices of the jobs that start, ascending, and their value. `exact`: nothing is worth more."""

    chosen: tuple[int, ...]
    value: float
    exact: bool


def pack_jobs(
    values: Sequence[float], needs: Sequence[Needs], free: Mapping[str, int], node_limit: int = NODE_LIMIT
) -> Packing:
    """Return the jobs of greatest total value that fit `free` (chips by queue) together.

    `values` are positive. Of equal packings the one found first wins: by value for the chips it takes, then
    as given. After `node_limit` nodes of the search the best so far is returned, bettered by exchanges; from
    as many nodes as jobs on it is never worse than greedy.
    """
    fitting = [
        index for index, need in enumerate(needs) if all(free.get(queue, 0) >= n for queue, n in need.items())
    ]
    weights = {index: sum(n / free[queue] for queue, n in needs[index].items()) for index in fitting}
    ranked = sorted(fitting, key=lambda index: (-values[index] / max(weights[index], _CLOSE), index))
    search = _Search(
        [values[index] for index in ranked],
        [needs[index] for index in ranked],
        [weights[index] for index in ranked],
        free,
    )
    exact = search.run(node_limit)
    return Packing(tuple(sorted(ranked[place] for place in search.best)), search.best_value, exact)


class _Search:
    """Depth first over the jobs in their order, with a job before without it."""

    def __init__(
        self, values: list[float], needs: list[Needs], weights: list[float], free: Mapping[str, int]
    ) -> None:
        self.best: tuple[int, ...] = ()
        self.best_value = 0.0
        self._values, self._needs = values, needs
        self._value_sums = [0.0, *accumulate(values)]
        self._weight_sums = [0.0, *accumulate(weights)]
        self._free = {queue: free.get(queue, 0) for queue in sorted({q for need in needs for q in need})}
        self._later = _suffix_sums(needs, self._free)
        per_chip = (v / sum(need.values()) for v, need in zip(values, needs, strict=True))
        self._per_chip = max(per_chip, default=0.0)

    def run(self, node_limit: int) -> bool:
        """Search; return whether the limit was not reached."""
        stack: list[tuple[int, float, dict[str, int], tuple[int, ...]]] = [(0, 0.0, self._free, ())]
        for _ in range(node_limit):
            if not stack:
                return True
            place, value, left, chosen = stack.pop()
            if value > self.best_value + _CLOSE:
                self.best, self.best_value = chosen, value
            if place == len(self._values) or value + self._most(place, left) <= self.best_value + _CLOSE:
                continue
            stack.append((place + 1, value, left, chosen))
            need = self._needs[place]
            if all(left[queue] >= n for queue, n in need.items()):
                rest = {**left, **{queue: left[queue] - n for queue, n in need.items()}}
                stack.append((place + 1, value + self._values[place], rest, (*chosen, place)))
        if stack:
            self._exchange()
        return not stack

    def _exchange(self) -> None:
        """Better the best by putting jobs first that it leaves out, until none of them helps."""
        every = range(len(self._values))
        by_value = sorted(every, key=lambda place: -self._values[place])
        for order in (every, by_value):
            self._keep(self._filled(order))
        left_out = [place for place in by_value if place not in self.best]
        while left_out:
            first = left_out.pop(0)
            kept = sorted(self.best, key=lambda place: -self._values[place])
            if self._keep(self._filled((first, *kept, *by_value))):
                left_out = [place for place in by_value if place not in self.best]

    def _filled(self, order: Iterable[int]) -> tuple[int, ...]:
        """Return the jobs that fit, taken greedily in an order that may name a job twice."""
        left, chosen = dict(self._free), dict[int, None]()
        for place in order:
            need = self._needs[place]
            if place not in chosen and all(left[queue] >= n for queue, n in need.items()):
                chosen[place] = None
                for queue, n in need.items():
                    left[queue] -= n
        return tuple(chosen)

    def _keep(self, chosen: tuple[int, ...]) -> bool:
        """Take `chosen` for the best if it is worth more."""
        value = sum(self._values[place] for place in chosen)
        if value <= self.best_value + _CLOSE:
            return False
        self.best, self.best_value = chosen, value
        return True

    def _most(self, place: int, left: Mapping[str, int]) -> float:
        """Return a bound on what the jobs from `place` on can add."""
        later = self._later[place]
        filled = self._per_chip * sum(min(n, later[queue]) for queue, n in left.items())
        room = sum(n / self._free[queue] for queue, n in left.items() if self._free[queue])
        goal = self._weight_sums[place] + room * (1 + _CLOSE) + _CLOSE
        whole = bisect_right(self._weight_sums, goal) - 1
        fractional = self._value_sums[whole] - self._value_sums[place]
        if whole < len(self._values):
            weight = self._weight_sums[whole + 1] - self._weight_sums[whole]
            fractional += self._values[whole] * min(1.0, (goal - self._weight_sums[whole]) / weight)
        return min(filled, fractional if math.isfinite(fractional) else filled)


def _suffix_sums(needs: list[Needs], free: Mapping[str, int]) -> list[dict[str, int]]:
    """Return, for each place, what the jobs from there on need of each queue together."""
    sums = [dict.fromkeys(free, 0)]
    for need in reversed(needs):
        sums.append({queue: total + need.get(queue, 0) for queue, total in sums[-1].items()})
    return sums[::-1]
