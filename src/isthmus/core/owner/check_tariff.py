"""`check_tariff`: refuses prices that overlap, leave a gap in the day, or hold backwards."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import NamedTuple

from isthmus.core.errors import FieldError
from isthmus.core.owner.tariff import DAY_MIN, PRIORITIES, Tariff
from isthmus.core.pool_resource import PoolResource
from isthmus.core.priority import Priority

MAX_WINDOWS = 96
"""Most prices of a resource for one priority in a day: each cuts what every job holds there into intervals."""


class _Window(NamedTuple):
    """A window of the day in minutes, and the index of its price in the tariff."""

    begin_min: int
    end_min: int
    place: int


def check_tariff(tariff: Tariff, now_s: float | None = None) -> None:
    """Raise `FieldError` for overlaps and gaps; with `now_s` (epoch) also for a price that begins before it."""
    by_key: dict[tuple[PoolResource, datetime | None], list[int]] = {}
    for index, price in enumerate(tariff.prices):
        if now_s is not None and price.begins is not None and price.begins.timestamp() < now_s:
            raise _retroactive(index, price.begins, now_s)
        by_key.setdefault((price.resource, price.begins), []).append(index)
    for indexes in by_key.values():
        for job_class in PRIORITIES:
            _check_day(tariff, indexes, job_class)


def _check_day(tariff: Tariff, indexes: list[int], job_class: Priority) -> None:
    """Raise unless the prices of one resource cover each minute of a day once for `job_class`."""
    last, covered_min = indexes[0], 0
    windows = sorted(_windows(tariff, indexes, job_class))
    if len(windows) > MAX_WINDOWS:
        raise FieldError(
            f"{tariff.prices[last].resource} has {len(windows)} prices a day for class {job_class}, "
            f"at most {MAX_WINDOWS}",
            place=("prices", str(windows[MAX_WINDOWS].place)),
            hint="state prices for longer hours",
        )
    for window in windows:
        if window.begin_min < covered_min:
            raise _overlap(tariff, last, window, job_class)
        if window.begin_min > covered_min:
            raise _gap(tariff, window.place, job_class, covered_min, window.begin_min)
        last, covered_min = window.place, window.end_min
    if covered_min < DAY_MIN:
        raise _gap(tariff, last, job_class, covered_min, DAY_MIN)


def _windows(tariff: Tariff, indexes: list[int], job_class: Priority) -> Iterator[_Window]:
    for index in indexes:
        price = tariff.prices[index]
        if job_class in price.classes:
            yield from (_Window(begin, end, index) for begin, end in price.windows_min)


def _retroactive(index: int, begins: datetime, now_s: float) -> FieldError:
    now = datetime.fromtimestamp(now_s, UTC)
    return FieldError(
        f"{begins:%Y-%m-%dT%H:%M:%SZ} has passed, it is {now:%Y-%m-%dT%H:%M:%SZ}: no price holds backwards",
        place=("prices", str(index), "from"),
        hint="name a later time, or remove `from`: then it holds from the moment that the server accepts it",
    )


def _overlap(tariff: Tariff, other: int, window: _Window, job_class: Priority) -> FieldError:
    first, second = sorted((other, window.place))
    resource, at = tariff.prices[second].resource, _clock(window.begin_min)
    return FieldError(
        f"overlaps price {first + 1} of the file: both hold for {resource}, class {job_class}, at {at}",
        place=("prices", str(second)),
        hint="give each a class, hours or a `from` of its own",
    )


def _gap(tariff: Tariff, index: int, job_class: Priority, begin_min: int, end_min: int) -> FieldError:
    resource, begin, end = tariff.prices[index].resource, _clock(begin_min), _clock(end_min)
    return FieldError(
        f"{resource} has no price for class {job_class} from {begin} to {end}",
        place=("prices", str(index)),
        hint="add a price for these hours and this class, 0 if they are free",
    )


def _clock(minute: int) -> str:
    return f"{minute // 60:02d}:{minute % 60:02d}"
