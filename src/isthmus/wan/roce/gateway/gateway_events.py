"""Events of a gateway, and the instructions that it answers with: plain data between `Gateway` and its shell."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.wan.roce.gateway.gateway_datagram import Failure


@dataclass(frozen=True, slots=True)
class NicFrame:
    """A NIC of this site has sent a frame to the other site."""

    frame: bytes


@dataclass(frozen=True, slots=True)
class LinkDatagram:
    """A datagram of the other gateway has come; the shell has authenticated it."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; due at `Gateway.next_tick_s`."""


GatewayEvent = NicFrame | LinkDatagram | Tick


@dataclass(frozen=True, slots=True)
class SendToNic:
    """Send a frame to the NIC of this site that it is addressed to."""

    frame: bytes


@dataclass(frozen=True, slots=True)
class SendOnLink:
    """Send a datagram to the other gateway."""

    data: bytes


@dataclass(frozen=True, slots=True)
class QueuePairFailed:
    """A queue pair is given up: its memory is free, and the NIC that sends on it gets an error."""

    ends: bytes
    """Addresses of its sender and its receiver."""
    queue_pair: int
    reason: Failure


GatewayInstruction = SendToNic | SendOnLink | QueuePairFailed
