"""Opcodes of reliable connections, and the headers that follow the base transport header of each.

Source: InfiniBand Architecture Specification, volume 1, release 1.4, table 38; annex A17 (RoCEv2) for the CNP.
"""

from __future__ import annotations

import enum

UDP_PORT = 4791
"""Destination port of RoCEv2."""


class Opcode(enum.IntEnum):
    """Opcodes of reliable connections, the datagrams that set them up, and the congestion notification packet."""

    SEND_FIRST = 0x00
    SEND_MIDDLE = 0x01
    SEND_LAST = 0x02
    SEND_LAST_IMMEDIATE = 0x03
    SEND_ONLY = 0x04
    SEND_ONLY_IMMEDIATE = 0x05
    WRITE_FIRST = 0x06
    WRITE_MIDDLE = 0x07
    WRITE_LAST = 0x08
    WRITE_LAST_IMMEDIATE = 0x09
    WRITE_ONLY = 0x0A
    WRITE_ONLY_IMMEDIATE = 0x0B
    READ_REQUEST = 0x0C
    READ_RESPONSE_FIRST = 0x0D
    READ_RESPONSE_MIDDLE = 0x0E
    READ_RESPONSE_LAST = 0x0F
    READ_RESPONSE_ONLY = 0x10
    ACKNOWLEDGE = 0x11
    ATOMIC_ACKNOWLEDGE = 0x12
    COMPARE_SWAP = 0x13
    FETCH_ADD = 0x14
    SEND_LAST_INVALIDATE = 0x16
    SEND_ONLY_INVALIDATE = 0x17
    DATAGRAM_SEND_ONLY = 0x64
    """Of an unreliable datagram, as connection management messages are."""
    CNP = 0x81


HAS_RETH = frozenset({0x06, 0x0A, 0x0B, 0x0C})
HAS_AETH = frozenset({0x0D, 0x0F, 0x10, 0x11, 0x12})
EXTRA_BYTES = {0x64: 8, 0x03: 4, 0x05: 4, 0x09: 4, 0x0B: 4, 0x12: 8, 0x13: 28, 0x14: 28, 0x16: 4, 0x17: 4}
"""Bytes of further headers: datagram header, immediate data, keys to invalidate, atomic operands and results."""

SENDS_AND_WRITES = frozenset({*range(0x0C), 0x16, 0x17})
"""Requests whose data goes to the responder: what a gateway may acknowledge in its place."""

ENDS_OF_MESSAGES = frozenset({0x02, 0x03, 0x04, 0x05, 0x08, 0x09, 0x0A, 0x0B, 0x16, 0x17})
"""Last packets of such requests: each raises the message sequence number."""

RESPONSES = frozenset(range(0x0D, 0x13))
PSN_BITS = 24
PSN_SPAN = 1 << PSN_BITS


def psn_distance(first: int, second: int) -> int:
    """Return how far packet sequence number `second` is behind `first`, from -2^23 to 2^23 - 1: they wrap at 2^24."""
    return (second - first + PSN_SPAN // 2) % PSN_SPAN - PSN_SPAN // 2
