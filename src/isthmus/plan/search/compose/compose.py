"""`compose`: the best chain for every island, so that together they end a batch earliest; lazily exact.

In a time T a chain of `dp` replicas ends dp x (1 + (T - first) / pace) micro-batches. The least T by which
the best chains of all islands end the whole batch is found on the bounds of those that were not cut yet; the
chains that this T rests on are then cut, which can only raise T, until it rests on chains that were cut
alone. Nothing else needs to be cut, and the answer is the best of all.
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
"""Relative precision of the time that is bisected for."""


class Choice(Protocol):
    """What an island may be: what it ends within a time, and whether its cost is exact."""

    @property
    def cut(self) -> bool:
        """Whether its cost is exact."""

    def taken(self, time_s: float) -> int:
        """Return what its replicas can end within `time_s`."""


ChoiceT = TypeVar("ChoiceT", bound=Choice)


@dataclass(eq=False, slots=True)
class Option:
    """A shape of an island, with its cost so far: a bound, a closer one once `weighed`, exact once `cut`.

    `island` has the spots that it was made for; it stands for those of islands alike, too.
    """

    shape: Shape
    cost: Cost
    island: tuple[Spot, ...] = ()
    chain: Chain | None = None
    cut: bool = False
    weighed: bool = False

    def taken(self, time_s: float) -> int:
        """Return the micro-batches that its replicas can end within `time_s`."""
        if time_s < self.cost.first_s:
            return 0
        return self.shape.dp * (1 + math.floor((time_s - self.cost.first_s) / self.cost.pace_s + 1e-9))


class Options(list[Option]):
    """The options of an island, the most promising `open_at_once` of them; the others take lost places.

    `ranked` has all, the most promising first. `more`: there are others.
    """

    def __init__(self, ranked: Iterable[Option], open_at_once: int = 64) -> None:
        super().__init__()
        self._ranked, self._next = iter(ranked), list[Option]()
        self._open(open_at_once)

    @property
    def more(self) -> bool:
        """Whether some are not open."""
        return bool(self._next)

    def lose(self, option: Option) -> None:
        """Take out an option that is infeasible."""
        self.remove(option)
        if not self:
            self._open(64)

    def _open(self, count: int) -> None:
        some = [*self._next, *islice(self._ranked, count + 1 - len(self._next))]
        self.extend(some[:count])
        self._next = some[count:]


Cutter = Callable[[Option, int], bool]
"""Cut an option for replicas of so many micro-batches; False where it turns out to be infeasible."""


def compose(
    islands: Sequence[Options], total: int, cut: Cutter, give_up_s: float = math.inf
) -> tuple[float, tuple[Option, ...]] | float:
    """Return the seconds and the option per island with which `total` micro-batches end earliest.

    Every island takes part. Where no choice is feasible, or none ends before `give_up_s`, the bound that was
    proven is returned alone (infinite: infeasible). Options that turn out infeasible lose their place for
    good. `islands` may share lists.
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
    """Return the least time and the option per island that it rests on, all of them cut; else a proven time.

    `least_s(from_s)` is the least time, from `from_s` on, in which the best options together end the batch.
    `cut(option, time_s)` makes an option's cost exact, False where it is infeasible: its list loses it.
    """
    time_s = 0.0
    while all(islands):
        time_s = least_s(time_s)
        if time_s >= give_up_s:
            return time_s
        chosen = [max(options, key=lambda one: one.taken(time_s)) for options in islands]
        loose = {id(one): (one, options) for one, options in zip(chosen, islands, strict=True) if not one.cut}
        if not loose:
            return time_s, tuple(chosen)
        for one, options in loose.values():
            if not cut(one, time_s):
                lose(options, one)
    return math.inf


def soonest_s(islands: Sequence[Options], total: int, from_s: float, give_up_s: float) -> float:
    """Return the least time, from `from_s` on, within which the best options end `total` micro-batches.

    Every island ends at least one. `from_s` is a time that is known to be too short, or just enough. A time
    of `give_up_s` and more is that.
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
    """Return the least time, to `PRECISION`, by which the best of each island together end `total`.

    `islands` are how many there are of a kind, and what each may be: what it ends at once, and the seconds of
    the first time and of each further one. From `from_s` on; at most `give_up_s`, which may be infinite.
    """

    def done(time_s: float) -> bool:
        left = total
        for weight, rows in islands:
            most = 0
            for each, first_s, pace_s in rows:
                if time_s >= first_s:  # as `Option.taken`
                    most = max(most, each * (1 + int((time_s - first_s) / pace_s + 1e-9)))
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
