"""What a decision centre orders at the port of a domain's controller, and the answers: one line of JSON each."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from isthmus.core.base_model import FrozenModel, Name, NonNegativeFloat, NonNegativeInt, PositiveInt
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
from isthmus.wan.controller.domain_controller import MAX_HOLDS, MAX_LEASE_S, MAX_SPANS
from isthmus.wan.controller.pipe_bookings import PipeSpan

MAX_ORDER_BYTES = 2**21
"""Of a line with an order of the most spans."""
MAX_REPORT_BYTES = 2**27
"""Of a line with a report of the most bookings."""
MAX_REASON_CHARS = 500


class PortRequest(FrozenModel):
    """A line of a client; `token` is the secret of the port's clients, where it has one."""

    token: Annotated[str, Field(max_length=256)] = ""


class KeyMessage(FrozenModel):
    """One version of a booking."""

    name: Name
    version: NonNegativeInt

    @property
    def key(self) -> BookingKey:
        """The key of the booking."""
        return BookingKey(self.name, self.version)


class SpanMessage(FrozenModel):
    """A rate on one pipe of the domain for a time."""

    pipe: Name
    start_s: NonNegativeFloat
    end_s: NonNegativeFloat
    kbps: PositiveInt


class PrepareMessage(KeyMessage):
    """Keep spans free under a lease."""

    kind: Literal["prepare"] = "prepare"
    spans: Annotated[tuple[SpanMessage, ...], Field(max_length=MAX_SPANS)]
    service: ServiceClass
    lease_s: Annotated[float, Field(ge=0, le=MAX_LEASE_S)]

    def order(self) -> DomainOrder:
        """Return what the controller handles."""
        spans = tuple(PipeSpan(one.pipe, one.start_s, one.end_s, one.kbps) for one in self.spans)
        return PrepareSpans(key=self.key, spans=spans, service=self.service, lease_s=self.lease_s)


class EndMessage(KeyMessage):
    """Commit what is prepared, or keep nothing of it."""

    kind: Literal["commit", "release"]

    def order(self) -> DomainOrder:
        """Return what the controller handles."""
        return CommitSpans(self.key) if self.kind == "commit" else ReleaseSpans(self.key)


class ReportMessage(FrozenModel):
    """Say what is held, and which pipes are down; changes nothing."""

    kind: Literal["report"] = "report"


OrderMessage = PrepareMessage | EndMessage


class DomainRequest(PortRequest):
    """A line of a decision centre."""

    message: Annotated[OrderMessage | ReportMessage, Field(discriminator="kind")]


DOMAIN_REQUEST: TypeAdapter[DomainRequest] = TypeAdapter(DomainRequest)


def order_message(order: DomainOrder) -> OrderMessage:
    """Return an order as it is sent."""
    name, version = order.key.name, order.key.version
    if isinstance(order, PrepareSpans):
        spans = tuple(
            SpanMessage(pipe=one.pipe, start_s=one.start_s, end_s=one.end_s, kbps=one.kbps) for one in order.spans
        )
        return PrepareMessage(name=name, version=version, spans=spans, service=order.service, lease_s=order.lease_s)
    return EndMessage(kind="commit" if isinstance(order, CommitSpans) else "release", name=name, version=version)


class AnswerMessage(KeyMessage):
    """What became of one version of a booking; `pipe` is the one without room."""

    kind: Literal["prepared", "committed", "released", "refused"]
    pipe: Name | Literal[""] = ""
    reason: Annotated[str, Field(max_length=MAX_REASON_CHARS)] = ""

    def answer(self) -> DomainAnswer:
        """Return what the centre handles."""
        if self.kind == "refused":
            return SpansRefused(key=self.key, pipe=self.pipe, reason=self.reason)
        return _ANSWERS[self.kind](self.key)


class ReportAnswer(FrozenModel):
    """All that a domain holds, and which of its pipes are down."""

    kind: Literal["report"] = "report"
    down: Annotated[tuple[Name, ...], Field(max_length=MAX_HOLDS)] = ()
    prepared: Annotated[tuple[KeyMessage, ...], Field(max_length=MAX_HOLDS)] = ()
    committed: Annotated[tuple[KeyMessage, ...], Field(max_length=MAX_HOLDS)] = ()

    def answer(self) -> DomainAnswer:
        """Return what the centre handles."""
        return DomainReport(
            down=self.down,
            prepared=tuple(one.key for one in self.prepared),
            committed=tuple(one.key for one in self.committed),
        )


class DomainReply(FrozenModel):
    """The answer of a controller: its start, the number of the answer since then, and the answer."""

    epoch: NonNegativeInt
    number: NonNegativeInt
    answer: Annotated[AnswerMessage | ReportAnswer, Field(discriminator="kind")]


class DomainMessage(DomainReply):
    """A reply in the log of a centre, which knows the domain from the connection."""

    kind: Literal["domain"] = "domain"
    domain: Name

    def event(self) -> FromDomain:
        """Return what the centre handles."""
        return FromDomain(self.domain, self.epoch, self.number, self.answer.answer())

    @property
    def name(self) -> str:
        """The booking of the answer; empty for a report."""
        return self.answer.name if isinstance(self.answer, AnswerMessage) else ""


def domain_reply(found: FromDomain) -> DomainReply:
    """Return an answer of a controller as it is sent."""
    answer = found.answer
    sent: AnswerMessage | ReportAnswer
    if isinstance(answer, DomainReport):
        prepared, committed = (
            tuple(KeyMessage(name=key.name, version=key.version) for key in keys)
            for keys in (answer.prepared, answer.committed)
        )
        sent = ReportAnswer(down=answer.down, prepared=prepared, committed=committed)
    elif isinstance(answer, SpansRefused):
        name, version = answer.key.name, answer.key.version
        reason = answer.reason[:MAX_REASON_CHARS]
        sent = AnswerMessage(kind="refused", name=name, version=version, pipe=answer.pipe, reason=reason)
    else:
        kind = next(kind for kind, one in _ANSWERS.items() if isinstance(answer, one))
        sent = AnswerMessage(kind=kind, name=answer.key.name, version=answer.key.version)
    return DomainReply(epoch=found.epoch, number=found.number, answer=sent)


_Kind = Literal["prepared", "committed", "released"]
_ANSWERS: dict[_Kind, type[SpansPrepared | SpansCommitted | SpansReleased]] = {
    "prepared": SpansPrepared,
    "committed": SpansCommitted,
    "released": SpansReleased,
}
