"""What happens to a `DatagramSession`, and what it says is to be done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class SendFrame:
    """The owner hands over one frame."""

    data: bytes


class PacketArrived(NamedTuple):
    """A packet of the far side came; its number and its content are authentic."""

    number: int
    content: bytes


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The time of `next_due_s` has come."""


class SendPacket(NamedTuple):
    """Send `content` under `number`, which is used once."""

    number: int
    content: bytes


@dataclass(frozen=True, slots=True)
class DeliverFrame:
    """A frame is whole."""

    data: bytes


@dataclass(frozen=True, slots=True)
class TakeFrame:
    """One more `SendFrame` may come."""


@dataclass(frozen=True, slots=True)
class EndSession:
    """The leg is over; nothing follows."""

    reason: str


SessionEvent = SendFrame | PacketArrived | TimerFired
SessionInstruction = SendPacket | DeliverFrame | TakeFrame | EndSession
