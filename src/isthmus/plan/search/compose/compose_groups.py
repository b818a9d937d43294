"""`compose_groups`: the pipelines, one per replica group, that together finish a batch first; lazily exact.

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

from isthmus.plan.search.costs.slots import ChipSlot
from isthmus.plan.search.pipelines.pipeline_shape import PipelineCost, PipelineShape, PipelineSplit

PRECISION = 1e-5
"""Relative precision of the bisected time."""


class GroupOption(Protocol):
    """An option of a replica group: its work within a time, and whether its cost is exact."""

    @property
    def exact(self) -> bool:
        """Whether its cost is exact."""

    def work_within(self, time_s: float) -> int:
        """Return what its replicas can end within `time_s`."""


GroupOptionT = TypeVar("GroupOptionT", bound=GroupOption)


@dataclass(eq=False, slots=True)
class PipelineOption:
    """A pipeline of a replica group with its cost so far."""

    shape: PipelineShape
    # A lower bound, tighter once `bound_tightened`, exact once `exact`.
    cost: PipelineCost
    # The slots that it was made for; it also serves equal replica groups.
    replica_group: tuple[ChipSlot, ...] = ()
    split: PipelineSplit | None = None
    exact: bool = False
    bound_tightened: bool = False

    def work_within(self, time_s: float) -> int:
        """Return the micro-batches that its replicas finish within `time_s`."""
        if time_s < self.cost.first_s:
            return 0
        return self.shape.dp * (1 + math.floor((time_s - self.cost.first_s) / self.cost.interval_s + 1e-9))


class PipelineOptions(list[PipelineOption]):
    """The options of a replica group, of which the `open_at_once` best ones are open.

    `ranked` yields all options, best first; further ones open once all open ones turn out infeasible.
    """

    def __init__(self, ranked: Iterable[PipelineOption], open_at_once: int = 64) -> None:
        super().__init__()
        self._ranked, self._pending = iter(ranked), list[PipelineOption]()
        self._open(open_at_once)

    @property
    def has_more(self) -> bool:
        """Whether some options are not open."""
        return bool(self._pending)

    def narrowed(self, keep: Callable[[PipelineOption], bool]) -> PipelineOptions:
        """Return the open options that `keep` accepts."""
        return PipelineOptions((one for one in self if keep(one)), len(self))

    def remove_infeasible(self, option: PipelineOption) -> None:
        """Remove an infeasible option."""
        self.remove(option)
        if not self:
            self._open(64)

    def _open(self, count: int) -> None:
        some = [*self._pending, *islice(self._ranked, count + 1 - len(self._pending))]
        self.extend(some[:count])
        self._pending = some[count:]


OptionEvaluator = Callable[[PipelineOption, int], bool]
"""(option, micro-batches per replica) -> False if infeasible; makes the option's cost exact."""


def compose_groups(
    replica_groups: Sequence[PipelineOptions],
    total: int,
    evaluate: OptionEvaluator,
    cutoff_s: float = math.inf,
) -> tuple[float, tuple[PipelineOption, ...]] | float:
    """Return the seconds and the option per replica group with which `total` micro-batches finish first.

    Every group takes part. If no combination is feasible, or none finishes before `cutoff_s`, only the
    proven lower bound is returned (infinite: infeasible). Infeasible options are removed from `replica_groups`,
    which may share lists.
    """

    def cut_one(one: PipelineOption, time_s: float) -> bool:
        return evaluate(one, max(1, one.work_within(time_s) // one.shape.dp))

    return compose_lazily(
        replica_groups,
        lambda from_s: earliest_options_s(replica_groups, total, from_s, cutoff_s),
        cut_one,
        PipelineOptions.remove_infeasible,
        cutoff_s,
    )


def compose_lazily(
    replica_groups: Sequence[list[GroupOptionT]],
    least_s: Callable[[float], float],
    evaluate: Callable[[GroupOptionT, float], bool],
    remove: Callable[[Any, GroupOptionT], None],
    cutoff_s: float,
) -> tuple[float, tuple[GroupOptionT, ...]] | float:
    """Return the least time and its exact option per replica group; else only a proven lower bound.

    `least_s(from_s)` returns the least time, from `from_s` on, in which the best options finish the batch.
    `evaluate(option, time_s)` evaluates an option exactly; if it returns False, `remove` removes the infeasible
    option.
    """
    time_s = 0.0
    while all(replica_groups):
        time_s = least_s(time_s)
        if time_s >= cutoff_s:
            return time_s
        chosen = [max(options, key=lambda one: one.work_within(time_s)) for options in replica_groups]
        inexact = {
            id(one): (one, options) for one, options in zip(chosen, replica_groups, strict=True) if not one.exact
        }
        if not inexact:
            return time_s, tuple(chosen)
        for one, options in inexact.values():
            if not evaluate(one, time_s):
                remove(options, one)
    return math.inf


def earliest_options_s(replica_groups: Sequence[PipelineOptions], total: int, from_s: float, cutoff_s: float) -> float:
    """Return the least time, from `from_s` on, within which the best options finish `total` micro-batches.

    Every group finishes at least one. `from_s` must be at most the answer; a result of `cutoff_s` means at
    least that.
    """
    kinds = {id(options): options for options in replica_groups}
    weights = Counter(id(options) for options in replica_groups)
    rows = [
        (weights[key], [(one.shape.dp, one.cost.first_s, one.cost.interval_s) for one in options])
        for key, options in kinds.items()
    ]
    return earliest_end_s(rows, total, from_s, cutoff_s)


def earliest_end_s(
    replica_groups: Sequence[tuple[int, Sequence[tuple[int, float, float]]]],
    total: int,
    from_s: float,
    cutoff_s: float,
) -> float:
    """Return the least time, to `PRECISION`, in which the best options of all groups finish `total`.

    `replica_groups` has, per kind, the number of equal groups and their options as (work at once, seconds of the
    first time, seconds of each further one). The result lies in [from_s, give_up_s]; `cutoff_s` may be
    infinite.
    """

    def done(time_s: float) -> bool:
        left = total
        for weight, rows in replica_groups:
            most = 0
            for each, first_s, interval_s in rows:
                if time_s >= first_s:  # as `PipelineOption.work_within`
                    most = max(most, each * (1 + int((time_s - first_s) / interval_s + 1e-9)))
            left -= weight * most
        return left <= 0

    low_s = max(from_s, *(min(first_s for _, first_s, _ in rows) for _, rows in replica_groups))
    if low_s >= cutoff_s or (cutoff_s < math.inf and not done(cutoff_s)):
        return cutoff_s
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
