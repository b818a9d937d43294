"""VXLAN headers in place: `push_vxlan`, `pull_vxlan`; `push_outer` adds the outer UDP and IPv4 headers.

Source: RFC 7348, section 5. The source port comes from a hash of the inner flow, so that paths of equal cost are used
and a flow keeps one; the UDP checksum is zero. Extensions that reserved bits announce (VXLAN-GPE, group policy) change
the meaning of what follows, so a header with any of them is refused, as Linux does.
"""

from __future__ import annotations

import struct
import zlib

from isthmus.core.errors import ProtocolError
from isthmus.wan.tenancy.packets.frame_buffer import FrameBuffer

VXLAN_PORT = 4789
VXLAN_BYTES, UDP_BYTES, IPV4_BYTES = 8, 8, 20
OUTER_BYTES = VXLAN_BYTES + UDP_BYTES + IPV4_BYTES
"""What a frame grows by, without the outer Ethernet header."""
MAX_VNI = 2**24 - 1
_FLAGS = 0x08000000
_VXLAN = struct.Struct("!II")
_UDP = struct.Struct("!HHHH")
_IPV4 = struct.Struct("!BBHHHBBH4s4s")
_FIRST_PORT, _NUM_PORTS = 49152, 16384
_TTL = 64


def push_vxlan(buffer: FrameBuffer, vni: int) -> None:
    """Add the VXLAN header before a frame."""
    _VXLAN.pack_into(buffer.data, buffer.push(VXLAN_BYTES), _FLAGS, vni << 8)


def pull_vxlan(buffer: FrameBuffer) -> int:
    """Remove the VXLAN header; return its VNI. Raises `ProtocolError` for a header that is cut or not plain VXLAN."""
    if len(buffer) < VXLAN_BYTES:
        raise ProtocolError(f"a VXLAN packet of {len(buffer)} bytes")
    flags, second = _VXLAN.unpack_from(buffer.data, buffer.start)
    if flags != _FLAGS or second & 0xFF:
        raise ProtocolError(f"VXLAN flags {flags:#010x} and {second & 0xFF:#04x}: not plain VXLAN with a VNI")
    buffer.pull(VXLAN_BYTES)
    return int(second >> 8)


def push_outer(
    buffer: FrameBuffer, source: bytes, target: bytes, traffic_class: int, entropy: bytes, port: int = VXLAN_PORT
) -> None:
    """Add UDP and IPv4 headers between two gateways (addresses of four bytes); `entropy` names the inner flow."""
    source_port = _FIRST_PORT + zlib.crc32(entropy) % _NUM_PORTS
    place = buffer.push(UDP_BYTES)
    _UDP.pack_into(buffer.data, place, source_port, port, len(buffer), 0)
    place = buffer.push(IPV4_BYTES)
    _IPV4.pack_into(buffer.data, place, 0x45, traffic_class, len(buffer), 0, 0x4000, _TTL, 17, 0, source, target)
    words = _TEN_WORDS.unpack_from(buffer.data, place)
    total = sum(words)
    total = (total & 0xFFFF) + (total >> 16)
    total = ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF
    buffer.data[place + 10], buffer.data[place + 11] = total >> 8, total & 0xFF


_TEN_WORDS = struct.Struct("!10H")
