"""`PriceBook`: every published price by resource and time, and the split of an interval where prices change.

Published prices never change: a later tariff adds a schedule, which replaces the one before it from its begin on.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from isthmus.core.errors import ConflictError, FieldError, QuotaError
from isthmus.core.owner.tariff import PRIORITIES, Tariff, TariffPrice
from isthmus.core.pool_resource import PoolResource
from isthmus.core.priority import Priority

MIN_MS = 60_000
DAY_MS = 24 * 60 * MIN_MS
MAX_BEGINS_PER_DAY = 288
"""Most schedules of a resource that begin in one day (UTC): each cuts what every job holds of it into intervals."""
MAX_PUBLISHED_PER_DAY = 10_000
"""Most prices that an owner publishes in one day (UTC): all are kept."""
MAX_AHEAD_DAYS = 366
"""How far ahead a price may begin."""


class PricedSpan(NamedTuple):
    """A part [begin_ms, end_ms) of an interval under one price; None: no price is in force."""

    begin_ms: int
    end_ms: int
    price_millionths: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceWindow:
    """The price of a class from a minute of the day on, up to the next window's begin or midnight UTC."""

    begin_min: int
    price_millionths: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceSchedule:
    """The prices of a resource from `begins_ms` on: the windows of a day by class, ordered, the first at minute 0."""

    begins_ms: int
    windows: dict[str, tuple[PriceWindow, ...]]


@dataclass(slots=True, kw_only=True)
class PriceBook:
    """Schedules by resource, in the order of their begins. `currency` is "" before the first tariff."""

    currency: str = ""
    schedules: dict[PoolResource, list[PriceSchedule]] = field(default_factory=dict)
    # By owner: the day in which it last published prices, and how many.
    published: dict[str, tuple[int, int]] = field(default_factory=dict)

    def check(self, tariff: Tariff, now_ms: int, owner: str = "") -> bool:
        """Return whether a tariff of `owner` ("": the operator) has prices that are not published yet.

        Raises `ConflictError` for another currency, `QuotaError` for too many prices of an owner in a day, `FieldError`
        for a time at which other prices begin already, or that is too far ahead, and for too many begins in a day.
        """
        if self.currency and tariff.currency != self.currency:
            raise ConflictError(
                f"the tariff is in {tariff.currency}, the pool in {self.currency}: a pool has one currency",
                hint=f"state the prices in {self.currency}",
            )
        fresh: Counter[tuple[PoolResource, int]] = Counter()
        for (resource, begins_ms, index), schedule in _schedules(tariff, now_ms).items():
            known = self._schedule_at(resource, begins_ms)
            if known is not None and known != schedule:
                raise FieldError(
                    f"overlaps a published price: other prices of {resource} begin at the same time",
                    place=("prices", str(index)),
                    hint="let these begin later; published prices do not change",
                )
            if known is None:
                fresh[resource, begins_ms // DAY_MS] += 1
                self._check_times(resource, begins_ms, now_ms, index, fresh)
        num_published = self._num_published(owner, now_ms) + len(tariff.prices)
        if fresh and owner and num_published > MAX_PUBLISHED_PER_DAY:
            raise QuotaError(
                f"owner '{owner}' would have published {num_published:,} prices today, at most "
                f"{MAX_PUBLISHED_PER_DAY:,} are accepted",
                hint="publish the rest tomorrow",
            )
        return bool(fresh)

    def add(self, tariff: Tariff, now_ms: int, owner: str = "") -> None:
        """Add the prices of a checked tariff; those without a time begin at `now_ms`."""
        self.currency = tariff.currency
        if owner:
            self.published[owner] = now_ms // DAY_MS, self._num_published(owner, now_ms) + len(tariff.prices)
        for (resource, begins_ms, _), schedule in _schedules(tariff, now_ms).items():
            if self._schedule_at(resource, begins_ms) is None:
                schedules = self.schedules.setdefault(resource, [])
                schedules.append(schedule)
                schedules.sort(key=lambda one: one.begins_ms)

    def listed(self, now_ms: int, is_wanted: Callable[[str], bool]) -> Iterator[tuple[PoolResource, PriceSchedule]]:
        """Yield the schedule in force of each resource at the clusters that are wanted, and those that begin later."""
        for resource, schedules in self.schedules.items():
            if is_wanted(resource.cluster):
                begun = bisect_right(schedules, now_ms, key=lambda one: one.begins_ms)
                yield from ((resource, one) for one in schedules[max(0, begun - 1) :])

    def _num_published(self, owner: str, now_ms: int) -> int:
        """Return how many prices an owner has published today."""
        day, num_prices = self.published.get(owner, (0, 0))
        return num_prices if day == now_ms // DAY_MS else 0

    def _check_times(
        self, resource: PoolResource, begins_ms: int, now_ms: int, index: int, fresh: Counter[tuple[PoolResource, int]]
    ) -> None:
        """Raise `FieldError` for a begin too far ahead, and where `fresh` makes too many begins of a day."""
        if begins_ms > now_ms + MAX_AHEAD_DAYS * DAY_MS:
            raise FieldError(
                f"begins more than {MAX_AHEAD_DAYS} days ahead", place=("prices", str(index), "from"),
                hint="publish it later",
            )  # fmt: skip
        day, known = begins_ms // DAY_MS, self.schedules.get(resource, ())
        first, last = (bisect_left(known, at * DAY_MS, key=lambda one: one.begins_ms) for at in (day, day + 1))
        if last - first + fresh[resource, day] > MAX_BEGINS_PER_DAY:
            raise FieldError(
                f"more than {MAX_BEGINS_PER_DAY} prices of {resource} begin in one day", place=("prices", str(index)),
                hint="state the hours of a day in one price list",
            )  # fmt: skip

    def _schedule_at(self, resource: PoolResource, begins_ms: int) -> PriceSchedule | None:
        found = (one for one in self.schedules.get(resource, ()) if one.begins_ms == begins_ms)
        return next(found, None)

    def spans(self, resource: PoolResource, job_class: Priority, begin_ms: int, end_ms: int) -> Sequence[PricedSpan]:
        """Return the parts of an interval by price, in order; neighbours of equal price are one."""
        schedules = self.schedules.get(resource)
        if begin_ms >= end_ms:
            return ()
        if not schedules:
            return (PricedSpan(begin_ms, end_ms, None),)
        last = schedules[-1]
        if last.begins_ms <= begin_ms and len(windows := last.windows[job_class]) == 1:
            return (PricedSpan(begin_ms, end_ms, windows[0].price_millionths),)
        return tuple(_cut(schedules, job_class, begin_ms, end_ms))


def _cut(schedules: Sequence[PriceSchedule], job_class: Priority, begin_ms: int, end_ms: int) -> Iterator[PricedSpan]:
    """Yield the parts of an interval that is not empty."""
    begun = bisect_right(schedules, begin_ms, key=lambda one: one.begins_ms)
    last: PricedSpan | None = None
    at_ms = begin_ms
    while at_ms < end_ms:
        until_ms = min(end_ms, schedules[begun].begins_ms) if begun < len(schedules) else end_ms
        schedule = schedules[begun - 1] if begun else None
        while at_ms < until_ms:
            price, next_ms = _price_at(schedule, job_class, at_ms, until_ms)
            span = PricedSpan(at_ms, next_ms, price)
            if last is not None and last.price_millionths == price:
                span = PricedSpan(last.begin_ms, span.end_ms, price)
            elif last is not None:
                yield last
            last, at_ms = span, span.end_ms
        begun += 1
    if last is not None:
        yield last


def _schedules(tariff: Tariff, now_ms: int) -> dict[tuple[PoolResource, int, int], PriceSchedule]:
    """Return the schedules of a tariff by resource, begin, and the index of their first price."""
    prices: dict[tuple[PoolResource, int], list[tuple[int, TariffPrice]]] = {}
    for index, price in enumerate(tariff.prices):
        begins_ms = now_ms if price.begins is None else round(price.begins.timestamp() * 1000)
        prices.setdefault((price.resource, begins_ms), []).append((index, price))
    found = {}
    for (resource, begins_ms), of in prices.items():
        windows: dict[str, tuple[PriceWindow, ...]] = {
            job_class: tuple(
                PriceWindow(begin_min=begin, price_millionths=price.price_millionths)
                for begin, price in sorted(
                    ((begin, price) for _, price in of if job_class in price.classes for begin, _ in price.windows_min),
                    key=lambda one: one[0],
                )
            )
            for job_class in PRIORITIES
        }
        found[resource, begins_ms, of[0][0]] = PriceSchedule(begins_ms=begins_ms, windows=windows)
    return found


def _price_at(schedule: PriceSchedule | None, job_class: Priority, at_ms: int, until_ms: int) -> tuple[int | None, int]:
    """Return the price at a moment, and when the next window begins, at most `until_ms`."""
    if schedule is None:
        return None, until_ms
    windows = schedule.windows[job_class]
    if len(windows) == 1:
        return windows[0].price_millionths, until_ms
    midnight_ms = at_ms - at_ms % DAY_MS
    index = bisect_right(windows, (at_ms - midnight_ms) // MIN_MS, key=lambda one: one.begin_min)
    next_min = windows[index].begin_min if index < len(windows) else DAY_MS // MIN_MS
    return windows[index - 1].price_millionths, min(until_ms, midnight_ms + next_min * MIN_MS)
