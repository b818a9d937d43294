"""Messages between the clients of the network, its decision centre, and the controllers of its domains: plain data.

A message may be lost, late, repeated or overtaken: each is an order of a state, or the answer to one, and is sent again
until it is answered.
"""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.wan.control.wan_topology import PathRequest, ServiceClass, TransferRequest
from isthmus.wan.controller.path_plan import PathPlan
from isthmus.wan.controller.pipe_bookings import PipeSpan


@dataclass(frozen=True, slots=True, order=True)
class BookingKey:
    """One version of the path of a booking: a path that is planned again has a higher version."""

    name: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AskPath:
    """A client asks for a path. With `holds` it is only prepared, until `ConfirmPath` or the end of its lease."""

    request: PathRequest | TransferRequest
    holds: bool = False


@dataclass(frozen=True, slots=True)
class ConfirmPath:
    """The client commits a path that it holds."""

    name: str


@dataclass(frozen=True, slots=True)
class RenewHold:
    """The client still wants a path that it holds and has not committed."""

    name: str


@dataclass(frozen=True, slots=True)
class ReleasePath:
    """The client aborts a hold, or gives a path back."""

    name: str


@dataclass(frozen=True, slots=True)
class TimePassed:
    """The time that `next_timer_s` named has come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareSpans:
    """Order: keep these spans free for `lease_s`. Repeated, it renews the lease. Ends earlier versions of the name."""

    key: BookingKey
    spans: tuple[PipeSpan, ...]
    service: ServiceClass
    lease_s: float


@dataclass(frozen=True, slots=True)
class CommitSpans:
    """Order: keep what is prepared, until it is released or its time is over."""

    key: BookingKey


@dataclass(frozen=True, slots=True)
class ReleaseSpans:
    """Order: keep nothing of this version or an earlier one."""

    key: BookingKey


DomainOrder = PrepareSpans | CommitSpans | ReleaseSpans


@dataclass(frozen=True, slots=True)
class SpansPrepared:
    """The spans are kept under a lease."""

    key: BookingKey


@dataclass(frozen=True, slots=True)
class SpansCommitted:
    """The spans are kept."""

    key: BookingKey


@dataclass(frozen=True, slots=True)
class SpansReleased:
    """Nothing is kept of this version or an earlier one."""

    key: BookingKey


@dataclass(frozen=True, slots=True, kw_only=True)
class SpansRefused:
    """The spans are not kept: `pipe` has no room, or ("") the order came too late."""

    key: BookingKey
    pipe: str = ""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainReport:
    """All that a domain holds, and which of its pipes are down; ignored if a later message has overtaken it."""

    down: tuple[str, ...]
    prepared: tuple[BookingKey, ...]
    committed: tuple[BookingKey, ...]


DomainAnswer = SpansPrepared | SpansCommitted | SpansReleased | SpansRefused | DomainReport


@dataclass(frozen=True, slots=True)
class FromDomain:
    """An answer as the centre gets it: `domain` is known from the connection, not from the message.

    `epoch` grows with each start of the controller, `number` with each of its messages.
    """

    domain: str
    epoch: int
    number: int
    answer: DomainAnswer


@dataclass(frozen=True, slots=True)
class ToDomain:
    """Instruction of the centre: send an order to a domain."""

    domain: str
    order: DomainOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class PathChanged:
    """Instruction of the centre: tell the client what became of its path.

    `held`: prepared at all domains; `booked`: committed at all of them; `moved`: booked on another path after a
    failure; `broken`: without a path after a failure, until one is found; `refused` and `released`: ended.
    """

    name: str
    state: str
    plan: PathPlan | None = None
    reason: str = ""


CentreEvent = AskPath | ConfirmPath | RenewHold | ReleasePath | TimePassed | FromDomain
CentreInstruction = ToDomain | PathChanged
