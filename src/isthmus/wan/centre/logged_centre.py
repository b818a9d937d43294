"""`LoggedCentre`: a decision centre whose events are logged before they count, and read again at its start."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from isthmus.core.errors import UnavailableError
from isthmus.wan.centre.centre_requests import AskMessage, LoggedEvent, LookMessage, NameMessage, PathState, TickMessage
from isthmus.wan.centre.domain_requests import DomainMessage
from isthmus.wan.centre.network_log import NetworkLog
from isthmus.wan.centre.served_centre import ServedCentre
from isthmus.wan.control.wan_topology import PathRequest, WanTopology
from isthmus.wan.controller.controller_messages import PathChanged, TimePassed, ToDomain

MAX_OUTCOMES = 1_000
"""Paths whose end is remembered for a client that waits."""


class LoggedCentre:
    """The centre of `topology` with its log in `folder`; times never go back. `remote`: domains of other operators."""

    def __init__(self, topology: WanTopology, folder: Path, remote: frozenset[str] = frozenset()) -> None:
        """Raise `FileError` for a damaged log, `UnavailableError` if it cannot be written."""
        self.remote = remote
        self._outcomes: OrderedDict[str, PathState] = OrderedDict()
        self._log = NetworkLog(folder, LoggedEvent)
        events = list(self._log.read())
        self.served = _replay(topology, remote, events)
        self._now_s = max((event.now_s for event in events), default=0.0)
        kept = _without_ended(events, self.served)
        if len(kept) < len(events) and _plans(_replay(topology, remote, kept)) == _plans(self.served):
            self._log.replace(kept)
            self.served = _replay(topology, remote, kept)

    @property
    def num_paths(self) -> int:
        """Paths that are held or booked."""
        return len(self.served.centre.records)

    def handle(self, message: AskMessage | NameMessage | LookMessage, now_s: float) -> PathState:
        """Return what became of the path; it is on disk by then. Raise `UnavailableError` if it cannot be."""
        self.advance(now_s)
        now_s = self._later(now_s)
        if isinstance(message, LookMessage):
            return self._state(message.name)
        if isinstance(message, AskMessage) and self._log.is_full:
            raise UnavailableError("the centre's log is full", hint="restart the centre: it drops what has ended")
        if isinstance(message, NameMessage) and self.served.record(message.name) is None:
            return PathState(name=message.name, state="unknown", reason=f"no path {message.name}")
        known = self.served.record(message.name)
        if isinstance(message, NameMessage) or known is None:
            self._log.append(LoggedEvent(now_s=now_s, message=message))
        self._outcomes.pop(message.name, None)
        self._note(self.served.handle(message.event(), now_s))
        return self.outcome(message.name)

    def outcome(self, name: str) -> PathState:
        """Return what became of the path since its client last asked for something."""
        return self._outcomes.get(name) or self._state(name)

    def domain_answered(self, message: DomainMessage, now_s: float) -> None:
        """Take the answer of another operator's domain; it is on disk before it counts, if anything follows from it."""
        now_s, event = self._later(now_s), message.event()
        if message.domain not in self.remote:
            return
        if self.served.centre.heeds(event, now_s):
            self._log.append(LoggedEvent(now_s=now_s, message=message))
        self._note(self.served.handle(event, now_s))

    def take_orders(self) -> list[ToDomain]:
        """Return the orders to domains of other operators since the last call."""
        return self.served.take_orders()

    def advance(self, now_s: float) -> None:
        """Let time pass; log it if anything was due."""
        now_s = self._later(now_s)
        due_s = self.served.next_timer_s()
        if due_s is not None and due_s <= now_s:
            self._log.append(LoggedEvent(now_s=now_s, message=TickMessage()))
            self._note(self.served.handle(TimePassed(), now_s))

    def close(self) -> None:
        """Close the log."""
        self._log.close()

    def _note(self, told: Sequence[PathChanged]) -> None:
        """Keep how paths ended, for clients that wait for the domains of other operators."""
        for one in told:
            self._outcomes.pop(one.name, None)
            if one.plan is None:
                self._outcomes[one.name] = _ended(one)
        while len(self._outcomes) > MAX_OUTCOMES:
            self._outcomes.popitem(last=False)

    def _later(self, now_s: float) -> float:
        self._now_s = max(self._now_s, now_s)
        return self._now_s

    def _state(self, name: str) -> PathState:
        record = self.served.record(name)
        if record is None or record.state == "ended":
            return PathState(name=name, state="unknown", reason=f"no path {name}")
        if record.plan is None:
            return PathState(name=name, state=record.state, reason="no path at the moment")
        request = record.request
        gbps = request.bandwidth_gbps if isinstance(request, PathRequest) else 0.0
        plan = record.plan
        return PathState(name=name, state=record.state, pipes=plan.pipes, gbps=gbps, delay_ms=plan.delay_ms)


def _ended(told: PathChanged) -> PathState:
    state = "broken" if told.state == "broken" else "refused" if told.state == "refused" else "released"
    return PathState.model_validate({"name": told.name, "state": state, "reason": told.reason})


def _replay(topology: WanTopology, remote: frozenset[str], events: Sequence[LoggedEvent]) -> ServedCentre:
    served = ServedCentre(topology, remote=remote)
    for event in events:
        message = event.message
        served.handle(TimePassed() if isinstance(message, TickMessage) else message.event(), event.now_s)
    served.take_orders()  # those without an answer are ordered again
    return served


def _without_ended(events: Sequence[LoggedEvent], served: ServedCentre) -> list[LoggedEvent]:
    """Return the events of paths that are still there, from the last one that asked for each on."""
    begun = {event.message.name: number for number, event in enumerate(events) if isinstance(event.message, AskMessage)}
    live = {name: begun[name] for name in served.centre.records if name in begun}
    never = len(events)
    first = min(live.values(), default=never)

    def is_needed(number: int, event: LoggedEvent) -> bool:
        message = event.message
        if isinstance(message, TickMessage) or not message.name:
            return True
        return number >= live.get(message.name, never)

    return [event for number, event in enumerate(events) if number >= first and is_needed(number, event)]


def _plans(served: ServedCentre) -> dict[str, object]:
    """Return the state and path of each record: what may not change when ended ones are dropped."""
    found: dict[str, object] = {
        name: (one.state, one.plan, one.request, one.version if served.remote else 0)
        for name, one in served.centre.records.items()
    }
    return found | {"": frozenset(served.centre.view.down)}
