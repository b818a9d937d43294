"""`GatewayHeartbeat`: what gateways tell each other ten times a second, under the VNI of control traffic.

Its counters begin at 0 with each `epoch`. The frame has the Ethernet type of local experiments (IEEE 802), 0x88B5.
"""

from __future__ import annotations

import struct
from dataclasses import astuple, dataclass

from isthmus.core.errors import ProtocolError
from isthmus.wan.tenancy.packets.frame_buffer import FrameBuffer

_FORMAT = struct.Struct("!4sIIQIIQIQQ")
_ETHERNET = b"\2isth\1\2isth\2\x88\xb5"
_MAGIC = b"IST1"
HEARTBEAT_BYTES = len(_ETHERNET) + _FORMAT.size


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayHeartbeat:
    """One message; times are of the sender's clock."""

    epoch: int
    number: int
    sent_us: int
    echo_epoch: int = 0
    """Epoch of the other gateway's last heartbeat; 0 before the first."""
    echo_number: int = 0
    echo_sent_us: int = 0
    held_us: int = 0
    """How long ago that came."""
    num_heard: int = 0
    """Tenants' frames that had come from the other gateway when it came."""
    num_marked: int = 0
    """Of these, those with a congestion mark."""


def build_heartbeat(heartbeat: GatewayHeartbeat) -> FrameBuffer:
    """Return its frame, with room for the outer headers."""
    return FrameBuffer(_ETHERNET + _FORMAT.pack(_MAGIC, *astuple(heartbeat)))


def parse_heartbeat(frame: bytes | memoryview) -> GatewayHeartbeat:
    """Return the heartbeat in a frame; raise `ProtocolError` for any other one."""
    if len(frame) != HEARTBEAT_BYTES or bytes(frame[: len(_ETHERNET)]) != _ETHERNET:
        raise ProtocolError(f"a control frame of {len(frame)} bytes is no heartbeat")
    magic, epoch, number, sent, echo_epoch, echo_number, echo_sent, held, heard, marked = _FORMAT.unpack_from(
        frame, len(_ETHERNET)
    )
    if magic != _MAGIC or not epoch:
        raise ProtocolError("a heartbeat of another version")
    return GatewayHeartbeat(
        epoch=epoch, number=number, sent_us=sent, echo_epoch=echo_epoch, echo_number=echo_number,
        echo_sent_us=echo_sent, held_us=held, num_heard=heard, num_marked=marked,
    )  # fmt: skip
