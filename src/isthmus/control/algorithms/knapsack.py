"""`pack_jobs`: the set of jobs of greatest total value that fits the free chips of several queues.

A job takes all its chips at every queue or none: a multidimensional 0/1 knapsack. Solved by branch and bound
with the smaller of two relaxations as the bound: the fractional knapsack over the sum of all constraints
(each weighted by 1 / free chips of its queue), and every queue filled at the best value per chip. If the
search hits its node limit, a local search follows: it puts a left-out job first, refills greedily, and keeps
the result while the value grows.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from isthmus.core.pool_resource import PoolResource

ChipsByQueue = Mapping[PoolResource, int]
"""Chips by queue (the chips of a node group), each at least 1."""

NODE_LIMIT = 2_000
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Packing:
    """Indices of the jobs that start, ascending, and their total value; `exact` if proven optimal."""

    chosen: tuple[int, ...]
    value: float
    exact: bool


def pack_jobs(
    values: Sequence[float],
    needs: Sequence[ChipsByQueue],
    free: Mapping[PoolResource, int],
    node_limit: int = NODE_LIMIT,
) -> Packing:
    """Return the jobs of greatest total value that fit `free` (chips by queue) together.

    `values` must be positive. Ties go to the packing found first: jobs are tried by value per weighted chip,
    then as given. After `node_limit` nodes the best packing so far is improved by local search and returned;
    with at least as many nodes as jobs it is never worse than greedy.
    """
    fitting = [index for index, need in enumerate(needs) if all(free.get(queue, 0) >= n for queue, n in need.items())]
    weights = {index: sum(n / free[queue] for queue, n in needs[index].items()) for index in fitting}
    ranked = sorted(fitting, key=lambda index: (-values[index] / max(weights[index], _TOLERANCE), index))
    search = _Search(
        [values[index] for index in ranked],
        [needs[index] for index in ranked],
        [weights[index] for index in ranked],
        free,
    )
    exact = search.run(node_limit)
    return Packing(tuple(sorted(ranked[place] for place in search.best)), search.best_value, exact)


class _Search:
    """Depth-first branch and bound over the jobs in order; the branch that takes a job comes first."""

    def __init__(
        self, values: list[float], needs: list[ChipsByQueue], weights: list[float], free: Mapping[PoolResource, int]
    ) -> None:
        self.best: tuple[int, ...] = ()
        self.best_value = 0.0
        self._values, self._needs = values, needs
        self._value_sums = [0.0, *accumulate(values)]
        self._weight_sums = [0.0, *accumulate(weights)]
        self._free = {queue: free.get(queue, 0) for queue in sorted({q for need in needs for q in need})}
        self._remaining_needs = _suffix_sums(needs, self._free)
        per_chip = (v / sum(need.values()) for v, need in zip(values, needs, strict=True))
        self._best_value_per_chip = max(per_chip, default=0.0)

    def run(self, node_limit: int) -> bool:
        """Search; return whether the search finished within `node_limit` nodes."""
        stack: list[tuple[int, float, dict[PoolResource, int], tuple[int, ...]]] = [(0, 0.0, self._free, ())]
        for _ in range(node_limit):
            if not stack:
                return True
            place, value, left, chosen = stack.pop()
            if value > self.best_value + _TOLERANCE:
                self.best, self.best_value = chosen, value
            if place == len(self._values) or value + self._upper_bound(place, left) <= self.best_value + _TOLERANCE:
                continue
            stack.append((place + 1, value, left, chosen))
            need = self._needs[place]
            if all(left[queue] >= n for queue, n in need.items()):
                rest = {**left, **{queue: left[queue] - n for queue, n in need.items()}}
                stack.append((place + 1, value + self._values[place], rest, (*chosen, place)))
        if stack:
            self._improve_locally()
        return not stack

    def _improve_locally(self) -> None:
        """Improve the best packing: put a left-out job first and refill, until no job helps."""
        every = range(len(self._values))
        by_value = sorted(every, key=lambda place: -self._values[place])
        for order in (every, by_value):
            self._accept_if_better(self._pack_greedily(order))
        left_out = [place for place in by_value if place not in self.best]
        while left_out:
            first = left_out.pop(0)
            kept = sorted(self.best, key=lambda place: -self._values[place])
            if self._accept_if_better(self._pack_greedily((first, *kept, *by_value))):
                left_out = [place for place in by_value if place not in self.best]

    def _pack_greedily(self, order: Iterable[int]) -> tuple[int, ...]:
        """Return the jobs that fit, taken greedily in `order`, which may name a job twice."""
        left, chosen = dict(self._free), dict[int, None]()
        for place in order:
            need = self._needs[place]
            if place not in chosen and all(left[queue] >= n for queue, n in need.items()):
                chosen[place] = None
                for queue, n in need.items():
                    left[queue] -= n
        return tuple(chosen)

    def _accept_if_better(self, chosen: tuple[int, ...]) -> bool:
        """Make `chosen` the best packing if its value is greater; return whether it was."""
        value = sum(self._values[place] for place in chosen)
        if value <= self.best_value + _TOLERANCE:
            return False
        self.best, self.best_value = chosen, value
        return True

    def _upper_bound(self, index: int, left: Mapping[PoolResource, int]) -> float:
        """Return an upper bound on the value that the jobs from `index` on can add."""
        later = self._remaining_needs[index]
        filled = self._best_value_per_chip * sum(min(n, later[queue]) for queue, n in left.items())
        room = sum(n / self._free[queue] for queue, n in left.items() if self._free[queue])
        goal = self._weight_sums[index] + room * (1 + _TOLERANCE) + _TOLERANCE
        whole = bisect_right(self._weight_sums, goal) - 1
        fractional = self._value_sums[whole] - self._value_sums[index]
        if whole < len(self._values):
            weight = self._weight_sums[whole + 1] - self._weight_sums[whole]
            fractional += self._values[whole] * min(1.0, (goal - self._weight_sums[whole]) / weight)
        return min(filled, fractional if math.isfinite(fractional) else filled)


def _suffix_sums(needs: list[ChipsByQueue], free: Mapping[PoolResource, int]) -> list[dict[PoolResource, int]]:
    """Return, for each position, the total need of the jobs from there on, by queue."""
    sums = [dict.fromkeys(free, 0)]
    for need in reversed(needs):
        sums.append({queue: total + need.get(queue, 0) for queue, total in sums[-1].items()})
    return sums[::-1]
