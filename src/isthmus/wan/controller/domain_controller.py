"""`DomainController`: keeps the pipes of one domain: prepares, commits and releases spans, and reports what it holds.

A pure state machine. It alone decides what fits, so a decision centre that is wrong, late or hostile over-books
nothing. What is prepared ends with its lease; what is committed ends with its time or by an order.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from isthmus.core.errors import NotFoundError
from isthmus.wan.control.wan_topology import ServiceClass
from isthmus.wan.controller.controller_messages import (
    BookingKey,
    CommitSpans,
    DomainAnswer,
    DomainOrder,
    DomainReport,
    FromDomain,
    PrepareSpans,
    ReleaseSpans,
    SpansCommitted,
    SpansPrepared,
    SpansRefused,
    SpansReleased,
)
from isthmus.wan.controller.pipe_bookings import PipeBookings, PipeSpan
from isthmus.wan.controller.wan_network import WanNetwork

MAX_HOLDS = 1_000_000
MAX_SPANS = 10_000
"""Spans of one booking in a domain."""
MAX_LEASE_S = 600.0
REMEMBER_S = 1_200.0
"""How long the version of a released booking is remembered, so that a late copy of an order does not bring it back."""


@dataclass(slots=True)
class _Hold:
    key: BookingKey
    ends_s: float
    """When its lease ends, or, committed, its last span."""
    last_span_s: float
    is_committed: bool = False


class DomainController:
    """The controller of `domain`; `epoch` is higher at each start of it."""

    def __init__(self, network: WanNetwork, domain: str, epoch: int) -> None:
        self.domain, self.epoch = domain, epoch
        self.bookings = PipeBookings((one for one in network.pipes if one.domain == domain), network.bulk_share)
        self._holds: dict[str, _Hold] = {}
        self._released: dict[str, tuple[int, float]] = {}
        self._ends: list[tuple[float, str]] = []
        self._forgets: list[tuple[float, str]] = []
        self._number = 0

    def handle(self, order: DomainOrder, now_s: float) -> FromDomain:
        """Return the answer to an order."""
        self._expire(now_s)
        if isinstance(order, PrepareSpans):
            return self._message(self._prepare(order, now_s))
        if isinstance(order, CommitSpans):
            return self._message(self._commit(order))
        return self._message(self._release(order, now_s))

    def set_down(self, pipe: str, is_down: bool) -> None:
        """Record that a pipe of the domain has failed, or is back. What is booked on it stays until it is moved."""
        if pipe not in self.bookings.capacity_kbps:
            raise NotFoundError(f"domain {self.domain} has no pipe {pipe!r}", hint="each domain reports its own pipes")
        (self.bookings.down.add if is_down else self.bookings.down.discard)(pipe)

    def book_own(self, name: str, spans: tuple[PipeSpan, ...], service: ServiceClass) -> bool:
        """Book what the domain uses outside the pool, of which the centre learns by refusals; return if it fits."""
        return self.bookings.book(name, spans, service) is None

    def report(self, now_s: float) -> FromDomain:
        """Return all that is held now; to be sent after `set_down`, and from time to time."""
        self._expire(now_s)
        return self._message(
            DomainReport(
                down=tuple(sorted(self.bookings.down)),
                prepared=tuple(hold.key for hold in self._holds.values() if not hold.is_committed),
                committed=tuple(hold.key for hold in self._holds.values() if hold.is_committed),
            )
        )

    def invariants(self) -> list[str]:
        """Return what is wrong with the state; empty if nothing is."""
        wrong = [f"{pipe} is over-booked" for pipe in self.bookings.over_booked()]
        if {hold.key for hold in self._holds.values()} != {key for key in self.bookings if isinstance(key, BookingKey)}:
            wrong.append("holds and bookings differ")
        return wrong

    def _message(self, answer: DomainAnswer) -> FromDomain:
        self._number += 1
        return FromDomain(self.domain, self.epoch, self._number, answer)

    def _prepare(self, order: PrepareSpans, now_s: float) -> DomainAnswer:
        key, known = order.key, self._holds.get(order.key.name)
        if self._is_over(key) or (known is not None and known.key.version > key.version):
            return SpansRefused(key=key, reason="this version has been released")
        ends_s = now_s + min(max(order.lease_s, 0.0), MAX_LEASE_S)
        if known is not None and known.key == key:
            if known.is_committed:
                return SpansCommitted(key)
            self._set_end(known, max(known.ends_s, ends_s))
            return SpansPrepared(key)
        if known is None and len(self._holds) >= MAX_HOLDS:
            return SpansRefused(key=key, reason=f"domain {self.domain} has {MAX_HOLDS:,} bookings")
        if not 0 < len(order.spans) <= MAX_SPANS:
            return SpansRefused(key=key, reason=f"{len(order.spans)} spans; a booking has 1 to {MAX_SPANS:,}")
        for span in order.spans:
            if span.pipe not in self.bookings.capacity_kbps:
                return SpansRefused(key=key, reason=f"{span.pipe} is no pipe of domain {self.domain}")
        if known is not None:
            self._drop(known, now_s)
        lacking = self.bookings.book(key, order.spans, order.service)
        if lacking is not None:
            reason = f"{lacking.pipe} has no {lacking.kbps / 1e6:g} Gbit/s free for {order.service}"
            return SpansRefused(key=key, pipe=lacking.pipe, reason=reason)
        hold = self._holds[key.name] = _Hold(key, ends_s, max(span.end_s for span in order.spans))
        self._set_end(hold, ends_s)
        return SpansPrepared(key)

    def _commit(self, order: CommitSpans) -> DomainAnswer:
        hold = self._holds.get(order.key.name)
        if hold is None or hold.key != order.key:
            return SpansRefused(key=order.key, reason="nothing is prepared; its lease may have ended")
        if not hold.is_committed:
            hold.is_committed = True
            self._set_end(hold, hold.last_span_s)
        return SpansCommitted(order.key)

    def _release(self, order: ReleaseSpans, now_s: float) -> DomainAnswer:
        hold = self._holds.get(order.key.name)
        if hold is not None and hold.key.version <= order.key.version:
            self._drop(hold, now_s)
        self._remember(order.key, now_s)
        return SpansReleased(order.key)

    def _drop(self, hold: _Hold, now_s: float) -> None:
        del self._holds[hold.key.name]
        self.bookings.release(hold.key)
        self._remember(hold.key, now_s)

    def _is_over(self, key: BookingKey) -> bool:
        return key.version <= self._released.get(key.name, (-1, 0.0))[0]

    def _remember(self, key: BookingKey, now_s: float) -> None:
        version = max(key.version, self._released.get(key.name, (-1, 0.0))[0])
        self._released[key.name] = version, now_s + REMEMBER_S
        heapq.heappush(self._forgets, (now_s + REMEMBER_S, key.name))

    def _set_end(self, hold: _Hold, ends_s: float) -> None:
        hold.ends_s = ends_s
        heapq.heappush(self._ends, (ends_s, hold.key.name))
        if len(self._ends) > 2 * len(self._holds) + 1_000:  # most entries are of holds that were renewed or released
            self._ends = [(hold.ends_s, name) for name, hold in self._holds.items()]
            heapq.heapify(self._ends)

    def _expire(self, now_s: float) -> None:
        """End leases and bookings whose time is over, and forget old versions."""
        while self._ends and self._ends[0][0] <= now_s:
            _, name = heapq.heappop(self._ends)
            hold = self._holds.get(name)
            if hold is not None and hold.ends_s <= now_s:
                self._drop(hold, now_s)
        while self._forgets and self._forgets[0][0] <= now_s:
            _, name = heapq.heappop(self._forgets)
            if name in self._released and self._released[name][1] <= now_s:
                del self._released[name]
