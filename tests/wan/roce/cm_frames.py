"""Frames with connection management messages, put together by the offsets of the specification's tables."""

from __future__ import annotations

from isthmus.wan.roce import RocePacket, build

REQ, REJ, REP, RTU, DREQ, DREP = 0x10, 0x12, 0x13, 0x14, 0x15, 0x16
MTU_1024 = 3


def cm_frame(
    source: str, target: str, attribute: int, *, local_id: int, remote_id: int = 0, queue_pair: int = 0,
    first_psn: int = 0, mtu: int = MTU_1024, psn: int = 0,
) -> bytes:  # fmt: skip
    """Return a frame from `source` to queue pair 1 of `target`."""
    body = bytearray(232)
    body[0:4] = local_id.to_bytes(4)
    if attribute == REQ:
        body[32:35], body[44:47], body[50] = queue_pair.to_bytes(3), first_psn.to_bytes(3), mtu << 4 | 7
        body[47] = 14 << 3 | 7  # the receiver's time-out, retries
    else:
        body[4:8] = remote_id.to_bytes(4)
    if attribute == REP:
        body[12:15], body[20:23] = queue_pair.to_bytes(3), first_psn.to_bytes(3)
    head = bytes([1, 7, 2, 3]) + bytes(4) + (77).to_bytes(8) + attribute.to_bytes(2) + bytes(6)
    datagram_header = (0x80010000).to_bytes(4) + (1).to_bytes(4)
    return build(
        RocePacket(
            source=source, target=target, opcode=0x64, queue_pair=1, psn=psn, extra=datagram_header,
            payload=head + bytes(body),
        )
    )  # fmt: skip
