"""`view_frame`: what a gateway needs of a RoCEv2 packet, read in place; a third of the time of `parse_roce`.

Sources: as `roce_packet`. The frame is checked as `parse_roce` checks it: lengths, protocol, checksum and ICRC.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from isthmus.core.errors import ProtocolError
from isthmus.wan.roce.roce_opcodes import EXTRA_BYTES, HAS_AETH, HAS_RETH, UDP_PORT
from isthmus.wan.roce.roce_packet import ICRC_BYTES, icrc_of

BTH_BYTES = 12
MAX_FRAME_BYTES = 9216
"""Longest IP packet that a gateway takes: a jumbo frame's."""

_PORTS = struct.Struct("!HHH")
_BTH_END = struct.Struct("!II")
_AFTER_BTH = {
    opcode: 16 * (opcode in HAS_RETH) + 4 * (opcode in HAS_AETH) + EXTRA_BYTES.get(opcode, 0) for opcode in range(256)
}


class RoceView(NamedTuple):
    """Fields of a frame."""

    frame: bytes
    ends: bytes
    """Source and target address: 8 bytes of IPv4 or 32 of IPv6."""
    queue_pair: int
    """Number of the target's queue pair."""
    source_port: int
    opcode: int
    psn: int
    wants_ack: bool
    base: int
    """Place of the base transport header."""
    num_payload_bytes: int

    @property
    def key(self) -> FlowKey:
        """The direction of a queue pair that the frame belongs to."""
        return self.ends, self.queue_pair

    @property
    def read_bytes(self) -> int:
        """Bytes that a READ_REQUEST asks for."""
        return int.from_bytes(self.frame[self.base + 24 : self.base + 28], "big")

    @property
    def syndrome(self) -> int:
        """The syndrome of a frame with an AETH."""
        return self.frame[self.base + BTH_BYTES]

    @property
    def message(self) -> int:
        """The message sequence number of a frame with an AETH."""
        return int.from_bytes(self.frame[self.base + 13 : self.base + 16], "big")

    @property
    def has_congestion_mark(self) -> bool:
        """Whether a switch has marked the frame (ECN `congestion experienced`)."""
        byte = self.frame[1] if self.base == 28 else self.frame[1] >> 4
        return byte & 3 == 3


FlowKey = tuple[bytes, int]
"""Source and target address, and the target's queue pair: one direction of a queue pair."""


def swap_ends(ends: bytes) -> bytes:
    """Return the addresses of the other direction."""
    half = len(ends) // 2
    return ends[half:] + ends[:half]


def view_frame(frame: bytes) -> RoceView:
    """Return the fields of a frame; raise `ProtocolError` for one that is cut, forged or not RoCEv2."""
    size = len(frame)
    if not 44 <= size <= MAX_FRAME_BYTES:
        raise ProtocolError(f"a RoCE packet of {size} bytes; 44 to {MAX_FRAME_BYTES} are taken")
    if frame[0] == 0x45:
        if frame[9] != 17 or int.from_bytes(frame[2:4], "big") != size or frame[6] & 0xBF or frame[7]:
            raise ProtocolError("an IPv4 packet of another protocol or length, or in fragments")
        if int.from_bytes(frame[:20], "big") % 0xFFFF:
            raise ProtocolError("the checksum of an IPv4 header is wrong")
        place, ends = 20, frame[12:20]
    elif frame[0] >> 4 == 6:
        if frame[6] != 17 or int.from_bytes(frame[4:6], "big") != size - 40 or size < 64:
            raise ProtocolError("an IPv6 packet with extensions, of another protocol or length")
        place, ends = 40, frame[8:40]
    else:
        raise ProtocolError("neither IPv6 nor IPv4 without options")
    source_port, target_port, udp_bytes = _PORTS.unpack_from(frame, place)
    if target_port != UDP_PORT or udp_bytes != size - place:
        raise ProtocolError(f"UDP port {target_port} with {udp_bytes} bytes is not RoCE in {size - place}")
    base = place + 8
    opcode, flags = frame[base], frame[base + 1]
    pair, number = _BTH_END.unpack_from(frame, base + 4)
    num_payload = size - base - BTH_BYTES - ICRC_BYTES - _AFTER_BTH[opcode] - (flags >> 4 & 3)
    if num_payload < 0:
        raise ProtocolError(f"a packet with opcode {opcode:#04x} is cut short")
    if frame[-ICRC_BYTES:] != icrc_of(frame):
        raise ProtocolError("the ICRC is wrong")
    wants_ack = bool(number >> 31)
    return RoceView(frame, ends, pair & 0xFFFFFF, source_port, opcode, number & 0xFFFFFF, wants_ack, base, num_payload)
