"""`encode_subset` and `decode_subset`: which of n things are in a set, as Golomb-Rice codes of the gaps.

Members of a set with a share p of all things have gaps of a geometric distribution. The Rice code (Rice and Plaunt,
1971) writes a gap g as `g >> k` in unary and its low k bits, with the k that is shortest for these gaps. It stays
within some hundredths of a bit of the entropy of each gap for every p up to 1/2; above, the complement is coded.
"""

from __future__ import annotations

import math

import numpy as np

from isthmus.weights.bit_fields import ByteReader, Integers, pack_fields, unpack_fields, varint
from isthmus.weights.delta_error import damaged

COMPLEMENT = 0x80
"""Bit of a subset's mode byte: what follows are the things outside the set. The other bits are k."""

MAX_RICE_BITS = 31


def encode_subset(members: Integers, size: int) -> bytes:
    """Return the code of `members` [m], which rise from 0 to at most `size - 1`."""
    mode = 0
    if 2 * len(members) > size:
        outside = np.ones(size, bool)
        outside[members] = False
        members, mode = np.flatnonzero(outside), COMPLEMENT
    if len(members) == 0:
        return bytes([mode]) + varint(0)
    gaps = np.diff(members, prepend=-1) - 1
    bits = _best_bits(gaps)
    ends = np.cumsum((gaps >> bits) + 1)
    unary = np.zeros(int(ends[-1]), np.uint8)
    unary[ends - 1] = 1
    packed = np.packbits(unary, bitorder="little").tobytes()
    head = bytes([mode | bits]) + varint(len(members)) + varint(len(packed))
    return head + packed + pack_fields(gaps & ((1 << bits) - 1), bits)


def decode_subset(reader: ByteReader, size: int) -> Integers:
    """Return the members, [m], of a set of `size` things; raises `DeltaError` for a code of another size."""
    mode = int(reader.take(1)[0])
    bits, count = mode & ~COMPLEMENT, reader.varint(size)
    members = np.zeros(0, np.int64)
    if count:
        if bits > MAX_RICE_BITS:
            raise damaged(f"a Rice code of {bits} bits")
        longest = (count + (size >> bits)) // 8 + 1
        unary = np.unpackbits(reader.take(reader.varint(longest)), bitorder="little")
        if np.count_nonzero(unary) != count:
            raise damaged(f"a set of {count} with more or fewer gaps")
        high = np.diff(np.flatnonzero(unary), prepend=-1) - 1
        members = np.cumsum(((high << bits) | unpack_fields(reader, count, bits)) + 1) - 1
        if members[-1] >= size or members[0] < 0:
            raise damaged(f"a member beyond a set of {size}")
    if not mode & COMPLEMENT:
        return members
    inside = np.ones(size, bool)
    inside[members] = False
    return np.flatnonzero(inside)


def _best_bits(gaps: Integers) -> int:
    """Return the k with the shortest code: near the logarithm of the mean, so three are tried."""
    near = max(int(math.log2(max(float(gaps.mean()), 1.0) * math.log(2) + 1e-9)), 0)
    return min(range(max(near - 1, 0), min(near + 2, MAX_RICE_BITS + 1)), key=lambda k: _num_bits(gaps, k))


def _num_bits(gaps: Integers, bits: int) -> int:
    return len(gaps) * (1 + bits) + int((gaps >> bits).sum())
