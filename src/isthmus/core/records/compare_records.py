"""`compare_records`: the intervals of the ledger beside those of an owner's own record, each difference with its cause.

| cause | when |
|---|---|
| whole seconds | an edge differs by less than the record's resolution |
| clock skew | both edges are off in one direction by the same time, longer than a report takes |
| queue end | the site granted the cards before the server heard of it |
| late release | one side counts the release later than the other |
| killed daemon | the agent or the scheduler started again within the difference, or just after it |
| unknown | none of these |
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple

from isthmus.core.records.held_interval import HeldInterval, RecordedPart, Restart

DifferenceCause = Literal["whole seconds", "clock skew", "queue end", "late release", "killed daemon", "unknown"]

MAX_LAG_MS = 10_000
"""A report of an agent and a look at its scheduler take less than this, unless one of them is away."""
MAX_RELEASE_MS = 600_000
"""A scheduler that is asked to release cards has done so within this time: grace, epilogue, a full queue."""


class RecordDifference(NamedTuple):
    """In [begin_ms, end_ms) the ledger has `ours` chips of the part, the record `theirs`."""

    begin_ms: int
    end_ms: int
    ours: int
    theirs: int
    cause: DifferenceCause

    @property
    def chip_ms(self) -> int:
        """What the ledger counts more than the record."""
        return (self.ours - self.theirs) * (self.end_ms - self.begin_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPart:
    """Both accounts of a part; `sources` are places in the record. Its differences are in the order of time."""

    part: RecordedPart
    ours: tuple[HeldInterval, ...]
    theirs: tuple[HeldInterval, ...]
    differences: tuple[RecordDifference, ...]

    @property
    def ours_chip_ms(self) -> int:
        """Chip-milliseconds by the ledger."""
        return sum(one.chips * ((one.end_ms or one.begin_ms) - one.begin_ms) for one in self.ours)

    @property
    def theirs_chip_ms(self) -> int:
        """Chip-milliseconds by the record."""
        return sum(one.chips * ((one.end_ms or one.begin_ms) - one.begin_ms) for one in self.theirs)


def compare_records(
    ours: Iterable[HeldInterval],
    theirs: Iterable[HeldInterval],
    restarts: Iterable[Restart],
    window_ms: tuple[int, int],
    *,
    resolution_ms: int,
    max_lag_ms: int = MAX_LAG_MS,
) -> tuple[tuple[ComparedPart, ...], tuple[HeldInterval, ...]]:
    """Return each part with its differences in the window, and what the record has as still held, uncompared."""
    record = [_clipped(one, window_ms) for one in theirs]
    still = {one.part for one in record if one is not None and one.end_ms is None}
    by_part: dict[RecordedPart, tuple[list[HeldInterval], list[HeldInterval]]] = defaultdict(lambda: ([], []))
    for one in ours:
        clipped = _clipped(one, window_ms)
        if clipped is not None and clipped.part not in still:
            by_part[clipped.part][0].append(clipped)
    for clipped in record:
        if clipped is not None and clipped.part not in still:
            by_part[clipped.part][1].append(clipped)
    starts = sorted(one.at_ms for one in restarts)
    found = tuple(
        ComparedPart(
            part=part, ours=tuple(_joined(mine)), theirs=tuple(_ordered(other)),
            differences=tuple(_differences(mine, other, starts, resolution_ms, max_lag_ms)),
        )
        for part, (mine, other) in sorted(by_part.items())
    )  # fmt: skip
    return found, tuple(one for one in record if one is not None and one.part in still)


def _clipped(one: HeldInterval, window_ms: tuple[int, int]) -> HeldInterval | None:
    """Return what an interval has in the window, None for nothing; one that is still held stays open."""
    if one.begin_ms >= window_ms[1] or (one.end_ms is not None and one.end_ms < window_ms[0]):
        return None
    end_ms = None if one.end_ms is None else min(one.end_ms, window_ms[1])
    return replace(one, begin_ms=max(one.begin_ms, window_ms[0]), end_ms=end_ms)


def _ordered(intervals: Iterable[HeldInterval]) -> list[HeldInterval]:
    return sorted(intervals, key=lambda one: (one.begin_ms, one.end_ms or 0))


def _steps(intervals: Sequence[HeldInterval]) -> dict[int, int]:
    """Return by how many chips the sum changes at each moment."""
    steps: dict[int, int] = defaultdict(int)
    for one in intervals:
        if one.end_ms is not None:
            steps[one.begin_ms] += one.chips
            steps[one.end_ms] -= one.chips
    return steps


def _joined(intervals: Sequence[HeldInterval]) -> Iterator[HeldInterval]:
    """Yield the intervals of the ledger, which cuts them where phase or price changes, joined where equal ones meet."""
    steps, chips = _steps(intervals), 0
    begin_ms: int | None = None
    for at_ms in sorted(steps):
        if not steps[at_ms]:
            continue
        if chips and begin_ms is not None:
            yield HeldInterval(part=intervals[0].part, chips=chips, begin_ms=begin_ms, end_ms=at_ms)
        chips, begin_ms = chips + steps[at_ms], at_ms


def _differences(
    ours: Sequence[HeldInterval],
    theirs: Sequence[HeldInterval],
    starts: Sequence[int],
    resolution_ms: int,
    max_lag_ms: int,
) -> Iterator[RecordDifference]:
    mine, other = _steps(ours), _steps(theirs)
    spans: list[tuple[int, int, int, int]] = []
    num_ours = num_theirs = 0
    for begin_ms, end_ms in pairwise(sorted(mine.keys() | other.keys())):
        num_ours, num_theirs = num_ours + mine.get(begin_ms, 0), num_theirs + other.get(begin_ms, 0)
        if num_ours == num_theirs:
            continue
        if spans and spans[-1][1:] == (begin_ms, num_ours, num_theirs):
            spans[-1] = (spans[-1][0], end_ms, num_ours, num_theirs)
        else:
            spans.append((begin_ms, end_ms, num_ours, num_theirs))
    edges = _edges(ours), _edges(theirs)
    skewed = _is_skewed(*edges, max_lag_ms)
    for begin_ms, end_ms, num_ours, num_theirs in spans:
        place = _Place(begin_ms, end_ms, num_ours > num_theirs, *edges)
        cause = _cause(place, starts, skewed, resolution_ms, max_lag_ms)
        yield RecordDifference(begin_ms, end_ms, num_ours, num_theirs, cause)


class _Place(NamedTuple):
    """A difference, and the first and last moment of the part by both; None: it is missing."""

    begin_ms: int
    end_ms: int
    ours_is_more: bool
    ours: tuple[int, int] | None
    theirs: tuple[int, int] | None

    @property
    def is_begin(self) -> bool:
        """Whether one side has begun and the other has not."""
        return bool(self.ours and self.theirs) and self.end_ms <= max(self.ours[0], self.theirs[0])  # type: ignore[index]

    @property
    def is_end(self) -> bool:
        """Whether one side has ended and the other has not."""
        return bool(self.ours and self.theirs) and self.begin_ms >= min(self.ours[1], self.theirs[1])  # type: ignore[index]


def _cause(place: _Place, starts: Sequence[int], skewed: bool, resolution_ms: int, max_lag_ms: int) -> DifferenceCause:
    long_ms, at_edge = place.end_ms - place.begin_ms, place.is_begin or place.is_end
    if long_ms <= resolution_ms and (at_edge or place.ours is None or place.theirs is None):
        return "whole seconds"
    if skewed and at_edge:
        return "clock skew"
    if not place.ours_is_more and long_ms <= max_lag_ms and (place.is_begin or place.ours is None):
        return "queue end"
    if place.is_end and long_ms <= max_lag_ms:
        return "late release"
    if any(place.begin_ms - max_lag_ms <= at_ms <= place.end_ms + max_lag_ms for at_ms in starts):
        return "killed daemon"
    if place.is_end and not place.ours_is_more and long_ms <= MAX_RELEASE_MS:
        return "late release"
    return "unknown"


def _edges(intervals: Sequence[HeldInterval]) -> tuple[int, int] | None:
    ends = [one for one in intervals if one.end_ms is not None and one.end_ms > one.begin_ms]
    return (min(one.begin_ms for one in ends), max(one.end_ms or 0 for one in ends)) if ends else None


def _is_skewed(ours: tuple[int, int] | None, theirs: tuple[int, int] | None, max_lag_ms: int) -> bool:
    """Return whether both edges are off by about the same time, which no report takes."""
    if ours is None or theirs is None:
        return False
    begin_ms, end_ms = theirs[0] - ours[0], theirs[1] - ours[1]
    return min(abs(begin_ms), abs(end_ms)) > max_lag_ms and abs(begin_ms - end_ms) <= max_lag_ms
