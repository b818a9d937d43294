"""`encode_changes` and `decode_changes`: what changed between two rows of 16-bit floats, in less than a byte a change.

An optimizer's step is about as large for each weight, so the share of weights that change falls with their exponent,
and most changes are by one step of the last bit. The receiver has the old weights, so their exponents are known to both
sides and cost nothing:

1. A weight's class is its exponent, two neighbouring exponents of bfloat16 together: the upper byte without the sign.
2. In each class the set of changed weights is a `subset_code`.
3. A change is the number of steps between neighbouring floats from old to new, with a sign. Signs are bits; the sizes
   are sets in sets: those of 2 steps or more among the changed, of 4 or more among these, and so on, then low bits.

Any bits are possible, NaN and -0 included: floats are counted by their bits, in the order of their values.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from isthmus.weights.bit_fields import ByteReader, Integers, pack_fields, unpack_fields
from isthmus.weights.class_ranks import BLOCK, ClassRanks
from isthmus.weights.delta_error import damaged
from isthmus.weights.subset_code import decode_subset, encode_subset

Halves = NDArray[np.uint16]
"""Bits of bfloat16 or float16, [n]."""

_NO_CLASS = 0xFF
"""Class of the elements that pad a row to whole blocks."""

_RARE_SHARE = 1 / 128
"""The smallest exponents are one class as long as they have at most this share of all changes."""

_MAX_LOW_BITS = 15


def encode_changes(old: Halves, new: Halves) -> bytes:
    """Return the code of the changes from `old` [n] to `new` [n]; empty if there are none."""
    places = np.flatnonzero(old != new)
    if len(places) == 0:
        return b""
    steps = (_order(new[places]) - _order(old[places])).view(np.int16).astype(np.int64)
    classes = _classes(old)
    floor = _floor(classes[places])
    np.maximum(classes, floor, out=classes)
    changed = classes[places]
    present = np.unique(changed)
    parts = [bytes([floor, len(present)])]
    for one in present:
        mine = changed == one
        ranks = ClassRanks(classes == one)
        parts += [bytes([one]), encode_subset(ranks.ranks_of(places[mine]), ranks.size), _encode_steps(steps[mine])]
    return b"".join(parts)


def decode_changes(old: Halves, code: bytes | memoryview) -> tuple[Halves, int]:
    """Return the new row, [n], and the number of changes; raises `DeltaError` for what is no code of such a row."""
    new = old.copy()
    if len(code) == 0:
        return new, 0
    reader = ByteReader(code)
    floor, num_classes = (int(one) for one in reader.take(2))
    classes = np.maximum(_classes(old), np.uint8(floor))
    total, last = 0, -1
    for _ in range(num_classes):
        one = int(reader.take(1)[0])
        if not last < one < _NO_CLASS:
            raise damaged(f"class {one} after {last}")
        ranks, last = ClassRanks(classes == one), one
        members = decode_subset(reader, ranks.size)
        places = ranks.places_of(members)
        steps = _decode_steps(reader, len(places))
        new[places] = _from_order(_order(old[places]) + steps.astype(np.int16).view(np.uint16))
        total += len(places)
    if reader.remaining:
        raise damaged(f"{reader.remaining} bytes after the changes")
    return new, total


def _encode_steps(steps: Integers) -> bytes:
    """Return the code of steps [m], none of them 0."""
    sizes = np.abs(steps)
    parts = [pack_fields((steps < 0).astype(np.int64), 1)]
    low_bits = np.frexp(sizes.astype(np.float64))[1] - 1
    level, members = 0, np.arange(len(steps))
    while len(members):
        more = np.flatnonzero(low_bits[members] > level)
        parts.append(encode_subset(more, len(members)))
        ended = np.delete(members, more)
        parts.append(pack_fields(sizes[ended] & ((1 << level) - 1), level))
        members, level = members[more], level + 1
    return b"".join(parts)


def _decode_steps(reader: ByteReader, count: int) -> Integers:
    """Return the next `count` steps, [count]."""
    negative = unpack_fields(reader, count, 1).astype(bool)
    sizes = np.zeros(count, np.int64)
    level, members = 0, np.arange(count)
    while len(members):
        if level > _MAX_LOW_BITS:
            raise damaged("a change of more than 16 bits")
        more = decode_subset(reader, len(members))
        ended = np.delete(members, more)
        sizes[ended] = (1 << level) | unpack_fields(reader, len(ended), level)
        members, level = members[more], level + 1
    return np.where(negative, -sizes, sizes)


def _classes(old: Halves) -> NDArray[np.uint8]:
    """Return the class of each element, padded to whole blocks, [n rounded up]."""
    classes = np.full(-(-len(old) // BLOCK) * BLOCK, _NO_CLASS, np.uint8)
    upper = old.astype("<u2", copy=False).view(np.uint8)[1::2]
    np.bitwise_and(upper, 0x7F, out=classes[: len(old)])
    return classes


def _floor(changed: NDArray[np.uint8]) -> int:
    """Return the class that takes in all below it: the largest with a small share of the changes [m] below."""
    counts = np.cumsum(np.bincount(changed))
    return int(np.searchsorted(counts, counts[-1] * _RARE_SHARE, side="right"))


def _order(bits: Halves) -> Halves:
    """Return integers [m] in the order of the floats with these bits: -0 comes just before 0."""
    order: Halves = np.where(bits & 0x8000, ~bits, bits | 0x8000).astype(np.uint16)
    return order


def _from_order(order: Halves) -> Halves:
    """Return the bits [m] of floats, from their order."""
    bits: Halves = np.where(order & 0x8000, order & 0x7FFF, ~order).astype(np.uint16)
    return bits
