"""`complete_checksum`: the TCP or UDP checksum of a frame whose sender left it to a NIC.

Frames that a program on this machine sends come with the pseudo header's sum only. Source: RFC 1071.
"""

from __future__ import annotations

from isthmus.wan.tenancy.packets.frame_buffer import FrameBuffer
from isthmus.wan.tenancy.packets.inner_frame import ETHERNET_BYTES, IPV4, TCP, UDP, view_inner


def complete_checksum(buffer: FrameBuffer) -> None:
    """Set the checksum; raise `ProtocolError` for a frame that `view_inner` refuses."""
    view = view_inner(buffer)
    if view.protocol not in (TCP, UDP):
        return
    data, ip = buffer.data, buffer.start + ETHERNET_BYTES
    if view.ether_type == IPV4:
        place, end = ip + (data[ip] & 15) * 4, ip + int.from_bytes(data[ip + 2 : ip + 4], "big")
    else:
        place, end = ip + 40, ip + 40 + int.from_bytes(data[ip + 4 : ip + 6], "big")
    at = place + (16 if view.protocol == TCP else 6)
    if at + 2 > end:
        return
    data[at : at + 2] = b"\0\0"
    covered = view.source + view.target + bytes((0, view.protocol)) + (end - place).to_bytes(2, "big")
    covered += bytes(data[place:end]) + bytes((end - place) % 2)
    total = 0xFFFF - int.from_bytes(covered, "big") % 0xFFFF
    data[at : at + 2] = (total or 0xFFFF).to_bytes(2, "big")
