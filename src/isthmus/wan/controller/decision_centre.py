"""`DecisionCentre`: composes paths over the domains: plans each, prepares it at all its domains, commits it, moves it.

Source: the report on cross-domain pooling, 3.5. A pure state machine. A path is promised to its client only when every
domain has committed it; where a domain refuses, is silent or has lost it, all domains release it, and another path is
planned. With `AskPath(holds=True)` the centre is itself a party of a two-phase commit: it prepares, and commits or
aborts as its client says.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from isthmus.wan.control.wan_topology import PathRefusal, PathRequest, WanTopology
from isthmus.wan.controller.booking_record import BookingRecord
from isthmus.wan.controller.controller_messages import (
    AskPath,
    BookingKey,
    CentreEvent,
    CentreInstruction,
    CommitSpans,
    ConfirmPath,
    DomainReport,
    FromDomain,
    PathChanged,
    PrepareSpans,
    ReleasePath,
    ReleaseSpans,
    RenewHold,
    SpansCommitted,
    SpansRefused,
    SpansReleased,
    TimePassed,
    ToDomain,
)
from isthmus.wan.controller.displace_bulk import displace_bulk
from isthmus.wan.controller.path_plan import PathPlan
from isthmus.wan.controller.pending_releases import PendingReleases
from isthmus.wan.controller.pipe_bookings import PipeBookings, PipeSpan
from isthmus.wan.controller.plan_again import plan_again
from isthmus.wan.controller.wan_network import WanNetwork


@dataclass(frozen=True, kw_only=True)
class CentreTimes:
    """Times of a decision centre, in seconds."""

    lease_s: float = 30.0
    """Lease of what is prepared; renewed at a third of it."""
    resend_s: float = 1.0
    """After which an order without an answer is sent again."""
    answer_s: float = 20.0
    """After which a domain that does not answer ends an attempt."""
    hold_s: float = 60.0
    """How long a client may hold a path without renewing or confirming it."""
    retry_s: float = 5.0
    """After which another path is sought for a booking without one."""


MAX_BOOKINGS = 1_000_000
MAX_PLANS = 4
"""Plans of a request, each without the pipes where a domain refused an earlier one."""


class DecisionCentre:
    """The centre of a network; its view of the domains' bookings is what it has planned itself."""

    def __init__(self, topology: WanTopology, times: CentreTimes | None = None) -> None:
        self.network = WanNetwork(topology)
        self.times = times or CentreTimes()
        self.view = PipeBookings(self.network.pipes, topology.bulk_share)
        self.records: dict[str, BookingRecord] = {}
        self._pipes: defaultdict[str, set[str]] = defaultdict(set)
        for pipe in topology.pipes:
            self._pipes[pipe.domain].add(pipe.name)
        self._releases = PendingReleases()
        self._last_version = 0
        self._latest: defaultdict[str, tuple[int, int]] = defaultdict(lambda: (-1, -1))
        self._timers: list[tuple[float, str]] = []
        self._out: list[CentreInstruction] = []

    def handle(self, event: CentreEvent, now_s: float) -> list[CentreInstruction]:
        """Apply an event; return what is to be sent and told."""
        self._out = []
        if isinstance(event, FromDomain):
            self._on_domain(event, now_s)
        elif isinstance(event, AskPath):
            self._ask(event, now_s)
        elif isinstance(event, TimePassed):
            self._on_time(now_s)
        else:
            self._on_client(event, now_s)
        return self._out

    def next_timer_s(self) -> float | None:
        """Return when to pass `TimePassed` next; None if nothing waits."""
        return self._timers[0][0] if self._timers else None

    # Clients

    def _ask(self, event: AskPath, now_s: float) -> None:
        name, known = event.request.name, self.records.get(event.request.name)
        if known is not None:
            if known.request != event.request:
                self._tell(name, "refused", reason=f"{name} is booked already, for another request")
            return
        if len(self.records) >= MAX_BOOKINGS:
            self._tell(name, "refused", reason=f"the network has {MAX_BOOKINGS:,} bookings")
            return
        record = BookingRecord(request=event.request, holds=event.holds)
        if record.ends_s <= now_s:
            self._tell(name, "refused", reason=f"its time ended at {record.ends_s:g} s")
            return
        self.records[name] = record
        self._plan(record, now_s)

    def _on_client(self, event: ConfirmPath | RenewHold | ReleasePath, now_s: float) -> None:
        record = self.records.get(event.name)
        if record is None:
            self._tell(event.name, "released", reason=f"no booking {event.name}")
        elif isinstance(event, ReleasePath):
            self._end(record, "released", "its client released it", now_s)
        elif record.state == "held":
            record.gives_up_s = now_s + self.times.hold_s
            if isinstance(event, ConfirmPath):
                record.holds = False
                self._commit(record, now_s)
        elif isinstance(event, ConfirmPath) and record.state == "booked":
            self._tell(event.name, "booked", record.plan)

    # Domains

    def _on_domain(self, event: FromDomain, now_s: float) -> None:
        if event.domain not in self._pipes:
            return
        is_latest = (event.epoch, event.number) > self._latest[event.domain]
        self._latest[event.domain] = max(self._latest[event.domain], (event.epoch, event.number))
        answer = event.answer
        if isinstance(answer, DomainReport):
            if is_latest:
                self._on_report(event.domain, answer, now_s)
            return
        if isinstance(answer, SpansReleased):
            self._releases.answered(event.domain, answer.key)
            return
        record = self._record_of(event.domain, answer.key)
        if record is None:
            if not isinstance(answer, SpansRefused):  # a late copy of an order was carried out
                self._release(answer.key, [event.domain], now_s)
        elif not _changes(record, event):
            return
        elif isinstance(answer, SpansRefused):
            self._replan(record, answer.pipe, answer.reason, now_s)
        else:
            record.waits_for.discard(event.domain)
            if not record.waits_for:
                self._all_answered(record, now_s)

    def heeds(self, event: FromDomain, now_s: float) -> bool:
        """Return whether an answer changes more than which orders to release are sent again."""
        answer = event.answer
        if isinstance(answer, DomainReport):
            down, lost = self._differences(event.domain, answer, now_s)
            return bool(lost) or down != self._pipes[event.domain] & self.view.down
        if isinstance(answer, SpansReleased):
            return False
        record = self._record_of(event.domain, answer.key)
        return record is not None and _changes(record, event)

    def _record_of(self, domain: str, key: BookingKey) -> BookingRecord | None:
        """Return the booking whose present version is `key`, if a part of its path is in `domain`."""
        record = self.records.get(key.name)
        return record if record is not None and record.key == key and domain in record.by_domain else None

    def _all_answered(self, record: BookingRecord, now_s: float) -> None:
        if record.state == "preparing" and record.holds:
            record.move_to("held")
            record.gives_up_s = now_s + self.times.hold_s
            self._wake(record, now_s + self.times.lease_s / 3)
            self._tell(record.request.name, "held", record.plan)
        elif record.state == "preparing":
            self._commit(record, now_s)
        else:
            record.move_to("booked")
            record.num_plans, record.avoid = 0, set()
            self._tell(record.request.name, "moved" if record.was_booked else "booked", record.plan)
            record.was_booked = True
            self._wake(record, record.plan_ends_s)

    def _on_report(self, domain: str, report: DomainReport, now_s: float) -> None:
        """Take over which pipes are down; release what is unknown here; plan again what the domain has lost."""
        own = self._pipes[domain]
        down, lost = self._differences(domain, report, now_s)
        failed = down - self.view.down
        has_more = bool(self.view.down.intersection(own) - down)
        self.view.down.difference_update(own)
        self.view.down.update(down)
        for key in {*report.prepared, *report.committed}:
            if self._record_of(domain, key) is None:
                self._release(key, [domain], now_s)
        self._move(lost, f"domain {domain} has lost it", now_s)
        self.fail_pipes(failed, now_s)
        if has_more:
            for record in [one for one in self.records.values() if one.state == "broken"]:
                self._plan(record, now_s)

    def _differences(self, domain: str, report: DomainReport, now_s: float) -> tuple[set[str], list[BookingRecord]]:
        """Return which pipes of the domain are down, and the bookings that it should keep and does not."""
        committed = set(report.committed)
        lost = [
            record
            for record in self.records.values()
            if record.state == "booked"
            and domain in record.by_domain
            and record.key not in committed
            and record.plan_ends_s > now_s
        ]
        return self._pipes[domain].intersection(report.down), lost

    def fail_pipes(self, failed: Iterable[str], now_s: float) -> None:
        """Move all bookings away from pipes that have failed."""
        keys = [key for pipe in failed for key in self.view.bookings_on(pipe)]
        names = dict.fromkeys(key.name for key in keys if isinstance(key, BookingKey))
        records = [self.records[name] for name in names]
        self._move(records, f"failed: {', '.join(sorted(failed))}", now_s)

    def _move(self, records: list[BookingRecord], reason: str, now_s: float) -> None:
        """Plan other paths for bookings whose path is dead: all are released first, and training goes first."""
        records = [record for record in records if record.state not in ("broken", "ended")]
        for record in records:
            self._drop_plan(record, now_s)
            record.num_plans, record.avoid = 0, set()
        for record in sorted(records, key=_class_and_name):
            self._plan(record, now_s, reason)

    # Plans

    def _plan(self, record: BookingRecord, now_s: float, reason: str = "") -> None:
        """Plan a path and prepare it at its domains; without one the booking ends, or waits if it was booked."""
        record.num_plans += 1
        # From the time, so that a centre that lost its log, or dropped events of others from it, repeats no version.
        self._last_version = max(self._last_version + 1, int(now_s * 1e3))
        record.version = self._last_version
        record.plan, record.by_domain, record.waits_for = None, {}, set()
        if record.num_plans > MAX_PLANS:
            found: PathPlan | PathRefusal = PathRefusal(name=record.request.name, reason=reason, nearest_gbps=0.0)
        else:
            found = plan_again(self.network, self.view, record, now_s)
        displaced: list[BookingRecord] = []
        if isinstance(found, PathRefusal) and record.num_plans <= MAX_PLANS:
            found, displaced = self._displace(record, found, now_s)
        if isinstance(found, PathRefusal):
            self._without_path(record, found.reason, now_s)
            return
        spans: defaultdict[str, list[PipeSpan]] = defaultdict(list)
        for span in found.spans:
            spans[self.network.pipe(span.pipe).domain].append(span)
        record.plan, record.by_domain = found, {domain: tuple(some) for domain, some in spans.items()}
        self.view.book(record.key, found.spans, found.service)
        record.move_to("preparing")
        record.waits_for, record.gives_up_s = set(spans), now_s + self.times.answer_s
        self._send_prepare(record, record.waits_for)
        self._wake(record, now_s + self.times.resend_s)
        for one in displaced:
            self._plan(one, now_s, f"{record.request.name}, of the class training, has its bandwidth")

    def _displace(
        self, record: BookingRecord, refusal: PathRefusal, now_s: float
    ) -> tuple[PathPlan | PathRefusal, list[BookingRecord]]:
        """Return a plan for training in the place of bulk bookings, which are released; else the refusal."""
        if not isinstance(record.request, PathRequest):
            return refusal, []
        request = record.request.model_copy(update={"start_s": max(record.request.start_s, now_s)})
        found = displace_bulk(self.network, self.view, request, record.avoid)
        if found is None:
            return refusal, []
        displaced = [self.records[key.name] for key in found[1] if isinstance(key, BookingKey)]
        for one in displaced:
            self._drop_plan(one, now_s)
            one.num_plans, one.avoid = 0, set()
        return found[0], displaced

    def _replan(self, record: BookingRecord, pipe: str, reason: str, now_s: float) -> None:
        if pipe:
            record.avoid.add(pipe)
        self._drop_plan(record, now_s)
        self._plan(record, now_s, reason)

    def _without_path(self, record: BookingRecord, reason: str, now_s: float) -> None:
        if not record.was_booked:
            self._end(record, "refused", reason, now_s)
            return
        if record.state != "broken":
            record.move_to("broken")
            self._tell(record.request.name, "broken", reason=reason)
        record.num_plans, record.avoid = 0, set()
        self._wake(record, min(now_s + self.times.retry_s, record.ends_s))

    def _commit(self, record: BookingRecord, now_s: float) -> None:
        record.move_to("committing")
        record.waits_for, record.gives_up_s = set(record.by_domain), now_s + self.times.answer_s
        self._out += [ToDomain(domain, CommitSpans(record.key)) for domain in sorted(record.by_domain)]
        self._wake(record, now_s + self.times.resend_s)

    def _end(self, record: BookingRecord, state: str, reason: str, now_s: float) -> None:
        self._drop_plan(record, now_s)
        record.move_to("ended")
        del self.records[record.request.name]
        self._tell(record.request.name, state, reason=reason)

    def _drop_plan(self, record: BookingRecord, now_s: float) -> None:
        """Release the present version here and at its domains."""
        if record.plan is not None:
            record.sent_kbits += _sent_kbits(record.plan, now_s) if record.state == "booked" else 0.0
            self.view.release(record.key)
            self._release(record.key, record.by_domain, now_s)
            record.plan = None

    # Orders and timers

    def _send_prepare(self, record: BookingRecord, domains: Iterable[str]) -> None:
        if record.plan is None:
            return
        for domain in sorted(domains):
            order = PrepareSpans(
                key=record.key,
                spans=record.by_domain[domain],
                service=record.plan.service,
                lease_s=self.times.lease_s,
            )
            self._out.append(ToDomain(domain, order))

    def _release(self, key: BookingKey, domains: Iterable[str], now_s: float) -> None:
        self._releases.add(key, domains, now_s + self.times.answer_s)
        self._out += [ToDomain(domain, ReleaseSpans(key)) for domain in sorted(domains)]
        heapq.heappush(self._timers, (now_s + self.times.resend_s, key.name))

    def _wake(self, record: BookingRecord, at_s: float) -> None:
        record.wakes_s = at_s
        heapq.heappush(self._timers, (at_s, record.request.name))

    def _tell(self, name: str, state: str, plan: PathPlan | None = None, reason: str = "") -> None:
        self._out.append(PathChanged(name=name, state=state, plan=plan, reason=reason))

    def _on_time(self, now_s: float) -> None:
        names = dict[str, None]()
        while self._timers and self._timers[0][0] <= now_s:
            names[heapq.heappop(self._timers)[1]] = None
        for name in names:
            orders = self._releases.again(name, now_s)
            if orders:
                self._out += orders
                heapq.heappush(self._timers, (now_s + self.times.resend_s, name))
            record = self.records.get(name)
            if record is not None and record.wakes_s <= now_s:
                self._on_wake(record, now_s)

    def _on_wake(self, record: BookingRecord, now_s: float) -> None:
        if record.ends_s <= now_s or (record.state == "booked" and record.plan_ends_s <= now_s):
            self._end(record, "released", "its time is over", now_s)
        elif record.state == "broken":
            self._plan(record, now_s)
        elif record.state == "held":
            if record.gives_up_s <= now_s:
                self._end(record, "refused", "it was not confirmed in time", now_s)
                return
            self._send_prepare(record, record.by_domain)
            self._wake(record, now_s + self.times.lease_s / 3)
        elif record.state in ("preparing", "committing"):
            if record.gives_up_s <= now_s:
                silent = ", ".join(sorted(record.waits_for))
                self._drop_plan(record, now_s)
                self._without_path(record, f"no answer from domain {silent}", now_s)
                return
            if record.state == "preparing":
                self._send_prepare(record, record.waits_for)
            else:
                self._out += [ToDomain(domain, CommitSpans(record.key)) for domain in sorted(record.waits_for)]
            self._wake(record, now_s + self.times.resend_s)


def _changes(record: BookingRecord, event: FromDomain) -> bool:
    """Return whether an answer to an order about the present version of a booking is the one that it waits for."""
    if isinstance(event.answer, SpansRefused):
        return record.state in ("preparing", "held", "committing")
    is_expected = (
        isinstance(event.answer, SpansCommitted) if record.state == "committing" else record.state == "preparing"
    )
    return event.domain in record.waits_for and is_expected


def _class_and_name(record: BookingRecord) -> tuple[bool, str]:
    """Return a key that sorts training before bulk."""
    request = record.request
    return not (isinstance(request, PathRequest) and request.service == "training"), request.name


def _sent_kbits(plan: PathPlan, now_s: float) -> float:
    return sum(max(min(end_s, now_s) - start_s, 0.0) * kbps for start_s, end_s, kbps in plan.rates_kbps)
