"""Events of a gateway, and the instructions that it answers with: plain data between `Gateway` and its shell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from isthmus.wan.roce.gateway.gateway_datagram import FlowFailure


class NicFrame(NamedTuple):
    """A NIC of this site has sent a frame to the other site."""

    frame: bytes


class NicFrames(NamedTuple):
    """Frames that NICs of this site have sent, in their order: what was read at once is cheapest handled at once."""

    frames: Sequence[bytes]


class LinkDatagram(NamedTuple):
    """A datagram of the other gateway has come; the shell has authenticated it."""

    data: bytes


class LinkDatagrams(NamedTuple):
    """Authenticated datagrams of the other gateway, in their order."""

    datagrams: Sequence[bytes]


class Tick(NamedTuple):
    """Time has passed; due at `Gateway.next_tick_s`."""


GatewayEvent = NicFrame | NicFrames | LinkDatagram | LinkDatagrams | Tick


class SendToNic(NamedTuple):
    """Send a frame to the NIC of this site that it is addressed to."""

    frame: bytes


class SendOnLink(NamedTuple):
    """Send a datagram to the other gateway."""

    data: bytes


class QueuePairFailed(NamedTuple):
    """A queue pair is given up: its memory is free, and the NIC that sends on it gets an error."""

    ends: bytes
    """Addresses of its sender and its receiver."""
    queue_pair: int
    reason: FlowFailure


GatewayInstruction = SendToNic | SendOnLink | QueuePairFailed
