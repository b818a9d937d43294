"""A count of the ledger's usage by other means: what parts held by the coordinator's records, at published prices.

A log is replayed, and after each event every part of every cluster is looked at. What a part held at a price must be
booked once. While its site was away it may be missing, unless the part was still there when the site was back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from isthmus.control.accounting.ledger import Ledger, Transaction
from isthmus.control.coordinator.coordinator import Coordinator, CoordinatorConfig
from isthmus.control.state.events import Event, TariffPublished
from isthmus.control.state.job_records import PoolState
from isthmus.core.pool_resource import PoolResource

HOLDS = frozenset({"ready", "prepared", "running", "succeeded", "failed"})
"""States of a part in which its site keeps the chips for it."""


class Place(NamedTuple):
    """What is held: the chips of a node group by a part of an attempt."""

    job: str
    attempt: int
    resource: PoolResource


@dataclass(frozen=True, kw_only=True)
class Held:
    """Chips that were held in [begin_ms, end_ms). `is_due`: they must be booked."""

    chips: int
    begin_ms: int
    end_ms: int
    is_due: bool


@dataclass(frozen=True, kw_only=True)
class Recount:
    """Intervals that the ledger lacks, has more than once, or has with another amount or price than was held."""

    lost: int = 0
    doubled: int = 0
    wrong: int = 0

    def __add__(self, other: Recount) -> Recount:
        return Recount(
            lost=self.lost + other.lost, doubled=self.doubled + other.doubled, wrong=self.wrong + other.wrong
        )


@dataclass(kw_only=True)
class Observer:
    """Follows a coordinator event by event."""

    now_ms: int = 0
    # Chips, since when, and whether the site is away.
    current: dict[Place, tuple[int, int, bool]] = field(default_factory=dict)
    past: dict[Place, list[Held]] = field(default_factory=dict)
    # Times and prices in millionths for an hour, in order.
    prices: dict[PoolResource, list[tuple[int, int]]] = field(default_factory=dict)

    def look(self, state: PoolState, event: Event) -> None:
        """Note what is held after `event`."""
        self.now_ms = max(self.now_ms, int(event.now_s * 1000))
        if isinstance(event, TariffPublished):
            for price in event.tariff.prices:
                self.prices.setdefault(price.resource, []).append((self.now_ms, price.price_millionths))
        found = dict(held_now(state))
        for place, (chips, since_ms, is_away) in tuple(self.current.items()):
            if found.get(place) == (chips, is_away):
                continue
            past = self.past.setdefault(place, [])
            past.append(Held(chips=chips, begin_ms=since_ms, end_ms=self.now_ms, is_due=not is_away))
            if place in found and not found[place][1]:
                self.past[place] = [replace(one, is_due=True) for one in past]
            del self.current[place]
        for place, (chips, is_away) in found.items():
            if place not in self.current:
                self.current[place] = chips, self.now_ms, is_away

    def price_at(self, resource: PoolResource, at_ms: int) -> int | None:
        """Return the price in force, None for none."""
        return next((price for since_ms, price in reversed(self.prices.get(resource, [])) if since_ms <= at_ms), None)


def held_now(state: PoolState) -> Iterator[tuple[Place, tuple[int, bool]]]:
    """Yield the chips of each part that its site keeps, and whether the site is away."""
    for name, record in state.clusters.items():
        for part in record.parts.values():
            for group, chips in part.chips.items() if part.allocated and part.state in HOLDS else ():
                own = chips - part.borrowed.get(group, 0)
                if own > 0:
                    place = Place(part.job, part.attempt, PoolResource.chips(name, group))
                    yield place, (own, not record.connected)


def recount(
    events: Iterable[Event], ledger: Ledger, config: CoordinatorConfig, coordinator: Coordinator | None = None
) -> Recount:
    """Compare the usage in `ledger` with what the log says; at its end nothing may be held.

    The log is replayed by `coordinator` (default: a fresh one).
    """
    coordinator, observer = coordinator or Coordinator(config), Observer()
    for event in events:
        coordinator.handle(event)
        observer.look(coordinator.state, event)
    booked: dict[Place, list[Transaction]] = {}
    for one in ledger.transactions:
        if one.resource is not None and one.begin_ms < one.end_ms:
            booked.setdefault(Place(one.job, one.attempt, one.resource), []).append(one)
    places = booked.keys() | observer.past.keys()
    return sum((_compare(observer, place, booked.get(place, [])) for place in places), Recount())


def _compare(observer: Observer, place: Place, booked: list[Transaction]) -> Recount:
    """Compare what was booked of a place with what was held, between all moments at which either changes."""
    held, resource = observer.past.get(place, []), place.resource
    cuts = {at for one in (*held, *booked) for at in (one.begin_ms, one.end_ms)}
    cuts |= {at_ms for at_ms, _ in observer.prices.get(resource, [])}
    lost = doubled = wrong = 0
    for begin_ms, end_ms in pairwise(sorted(cuts)):
        found = [one for one in booked if one.begin_ms <= begin_ms and end_ms <= one.end_ms]
        then = next((one for one in held if one.begin_ms <= begin_ms and end_ms <= one.end_ms), None)
        price = observer.price_at(resource, begin_ms)
        expected = None if then is None or price is None else (then.chips, price)
        lost += expected is not None and then is not None and then.is_due and not found
        doubled += max(0, len(found) - 1)
        wrong += sum((one.amount, one.price_millionths) != expected for one in found)
    return Recount(lost=lost, doubled=doubled, wrong=wrong)
