"""`compose`: the pipelines, one per replica group, that together finish a batch first; lazily exact.

In a time T a pipeline of `dp` replicas finishes dp x (1 + (T - first) / pace) micro-batches. First find the
least T in which the best options of all groups finish the batch, using lower bounds for options that are not
evaluated exactly yet. Then evaluate the options that this T rests on, which can only raise T, and repeat
until T rests on exact options only. The result is optimal over all options.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, TypeVar

from isthmus.plan.search.chains.chain_shape import Chain, Cost, Shape
from isthmus.plan.search.costs.slots import Spot

PRECISION = 1e-5
"""Relative precision of the bisected time."""


class Choice(Protocol):
    """An option of a replica group: its work within a time, and whether its cost is exact."""

    @property
    def cut(self) -> bool:
        """Whether its cost is exact."""

    def taken(self, time_s: float) -> int:
        """Return what its replicas can end within `time_s`."""


ChoiceT = TypeVar("ChoiceT", bound=Choice)


@dataclass(eq=False, slots=True)
class Option:
    """A pipeline of a replica group with its cost so far."""

    shape: Shape
    # A lower bound, tighter once `weighed`, exact once `cut`.
    cost: Cost
    # The slots that it was made for; it also serves equal replica groups.
    island: tuple[Spot, ...] = ()
    chain: Chain | None = None
    cut: bool = False
    weighed: bool = False

    def taken(self, time_s: float) -> int:
        """Return the micro-batches that its replicas finish within `time_s`."""
        if time_s < self.cost.first_s:
            return 0
        return self.shape.dp * (1 + math.floor((time_s - self.cost.first_s) / self.cost.pace_s + 1e-9))


class Options(list[Option]):
    """The options of a replica group, of which the `open_at_once` best ones are open.

    `ranked` yields all options, best first; further ones open once all open ones turn out infeasible.
    """

    def __init__(self, ranked: Iterable[Option], open_at_once: int = 64) -> None:
        super().__init__()
        self._ranked, self._next = iter(ranked), list[Option]()
        self._open(open_at_once)

    @property
    def more(self) -> bool:
        """Whether some options are not open."""
        return bool(self._next)

    def lose(self, option: Option) -> None:
        """Remove an infeasible option."""
        self.remove(option)
        if not self:
            self._open(64)

    def _open(self, count: int) -> None:
        some = [*self._next, *islice(self._ranked, count + 1 - len(self._next))]
        self.extend(some[:count])
        self._next = some[count:]


Cutter = Callable[[Option, int], bool]
"""(option, micro-batches per replica) -> False if infeasible; makes the option's cost exact."""


def compose(
    islands: Sequence[Options], total: int, cut: Cutter, give_up_s: float = math.inf
) -> tuple[float, tuple[Option, ...]] | float:
    """Return the seconds and the option per replica group with which `total` micro-batches finish first.

    Every group takes part. If no combination is feasible, or none finishes before `give_up_s`, only the
    proven lower bound is returned (infinite: infeasible). Infeasible options are removed from `islands`,
    which may share lists.
    """

    def cut_one(one: Option, time_s: float) -> bool:
        return cut(one, max(1, one.taken(time_s) // one.shape.dp))

    return settle(
        islands, lambda from_s: soonest_s(islands, total, from_s, give_up_s), cut_one, Options.lose, give_up_s
    )


def settle(
    islands: Sequence[list[ChoiceT]],
    least_s: Callable[[float], float],
    cut: Callable[[ChoiceT, float], bool],
    lose: Callable[[Any, ChoiceT], None],
    give_up_s: float,
) -> tuple[float, tuple[ChoiceT, ...]] | float:
    """Return the least time and its exact option per replica group; else only a proven lower bound.

    `least_s(from_s)` returns the least time, from `from_s` on, in which the best options finish the batch.
    `cut(option, time_s)` evaluates an option exactly; if it returns False, `lose` removes the infeasible
    option.
    """
    time_s = 0.0
    while all(islands):
        time_s = least_s(time_s)
        if time_s >= give_up_s:
            return time_s
        chosen = [max(options, key=lambda one: one.taken(time_s)) for options in islands]
        inexact = {
            id(one): (one, options) for one, options in zip(chosen, islands, strict=True) if not one.cut
        }
        if not inexact:
            return time_s, tuple(chosen)
        for one, options in inexact.values():
            if not cut(one, time_s):
                lose(options, one)
    return math.inf


def soonest_s(islands: Sequence[Options], total: int, from_s: float, give_up_s: float) -> float:
    """Return the least time, from `from_s` on, within which the best options finish `total` micro-batches.

    Every group finishes at least one. `from_s` must be at most the answer; a result of `give_up_s` means at
    least that.
    """
    kinds = {id(options): options for options in islands}
    weights = Counter(id(options) for options in islands)
    rows = [
        (weights[key], [(one.shape.dp, one.cost.first_s, one.cost.pace_s) for one in options])
        for key, options in kinds.items()
    ]
    return earliest_s(rows, total, from_s, give_up_s)


def earliest_s(
    islands: Sequence[tuple[int, Sequence[tuple[int, float, float]]]],
    total: int,
    from_s: float,
    give_up_s: float,
) -> float:
    """Return the least time, to `PRECISION`, in which the best options of all groups finish `total`.

    `islands` has, per kind, the number of equal groups and their options as (work at once, seconds of the
    first time, seconds of each further one). The result lies in [from_s, give_up_s]; `give_up_s` may be
    infinite.
    """

    def done(time_s: float) -> bool:
        left = total
        for weight, rows in islands:
            most = 0
            for each, first_s, interval_s in rows:
                if time_s >= first_s:  # as `Option.taken`
                    most = max(most, each * (1 + int((time_s - first_s) / interval_s + 1e-9)))
            left -= weight * most
        return left <= 0

    low_s = max(from_s, *(min(first_s for _, first_s, _ in rows) for _, rows in islands))
    if low_s >= give_up_s or (give_up_s < math.inf and not done(give_up_s)):
        return give_up_s
    if done(low_s):
        return low_s
    step_s = max(low_s * 1e-3, 1e-9)
    high_s = low_s + step_s
    while not done(high_s):
        low_s, step_s = high_s, 2 * step_s
        high_s = low_s + step_s
    while high_s - low_s > PRECISION * high_s:
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (low_s, middle_s) if done(middle_s) else (middle_s, high_s)
    return high_s
