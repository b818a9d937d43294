"""`ReplyTemplate`: acknowledgements and congestion notifications in the name of a far responder, built fast.

Source: InfiniBand Architecture Specification, volume 1, 9.7.5 (acknowledgements), annex A17.9.3 (CNP).
"""

from __future__ import annotations

import ipaddress
import struct
import zlib
from typing import Any

from isthmus.wan.roce.roce_opcodes import Opcode
from isthmus.wan.roce.roce_packet import AethHeader, RocePacket, build_roce, crc_of_head
from isthmus.wan.roce.roce_view import RoceView

ACK = 0x1F
"""Syndrome of an acknowledgement without credits."""

RNR_FIRST, RNR_LAST = 0x20, 0x3F
NAK_SEQUENCE = 0x60
NAK_ACCESS = 0x62
"""Remote access error: the request is for memory that the requester may not use."""
NAK_OPERATION = 0x63
"""Remote operational error: the responder cannot complete the request."""

BECN = 0x40
CNP_BYTES = 16
_TAIL = struct.Struct("!II")
_CRC = struct.Struct("<I")


class ReplyTemplate:
    """Replies with the headers of `genuine`, a frame that the responder sent to the requester."""

    def __init__(self, genuine: RoceView, hop_limit: int = 64) -> None:
        half = len(genuine.ends) // 2
        fields: dict[str, Any] = {
            "source": str(ipaddress.ip_address(genuine.ends[:half])),
            "target": str(ipaddress.ip_address(genuine.ends[half:])),
            "queue_pair": genuine.queue_pair,
            "source_port": genuine.source_port,
            "hop_limit": hop_limit,
            "psn": 0,
        }
        ack = build_roce(RocePacket(opcode=Opcode.ACKNOWLEDGE, aeth=AethHeader(ACK, 0), **fields))
        end = genuine.base + 8
        self.head, self.head_crc = ack[:end], crc_of_head(ack, end)
        cnp = RocePacket(opcode=Opcode.CNP, reserved_bits=BECN, payload=bytes(CNP_BYTES), **fields)
        self.cnp = build_roce(cnp)
        """A congestion notification packet for the requester."""

    def acknowledge(self, psn: int, message: int, syndrome: int = ACK) -> bytes:
        """Return an acknowledgement, or a NAK by its syndrome."""
        tail = _TAIL.pack(psn, syndrome << 24 | message)
        return self.head + tail + _CRC.pack(zlib.crc32(tail, self.head_crc))
