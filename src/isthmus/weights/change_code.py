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
    steps = (_order(new[places]) - _order(old[places])).view(np.int16)
    classes = _classes(old)
    changed = classes[places]
    counts = np.bincount(changed)
    floor = _floor(counts)
    np.maximum(changed, floor, out=changed)
    present = [floor, *(int(one) for one in np.flatnonzero(counts) if one > floor)]
    members = np.empty(len(classes), bool)
    parts = [bytes([floor, len(present)])]
    for one in present:
        mine = np.flatnonzero(changed == one)
        ranks = _ranks(classes, one, floor, members)
        parts += [bytes([one]), encode_subset(ranks.ranks_of(places[mine]), ranks.size), _encode_steps(steps[mine])]
    return b"".join(parts)


def decode_changes(old: Halves, code: bytes | memoryview) -> tuple[Halves, int]:
    """Return the new row, [n], and the number of changes; raises `DeltaError` for any other code."""
    new = old.copy()
    if len(code) == 0:
        return new, 0
    reader = ByteReader(code)
    floor, num_classes = (int(one) for one in reader.take(2))
    classes = _classes(old)
    members = np.empty(len(classes), bool)
    total, last = 0, floor - 1
    for _ in range(num_classes):
        one = int(reader.take(1)[0])
        if not last < one < _NO_CLASS:
            raise damaged(f"class {one} after {last}")
        ranks, last = _ranks(classes, one, floor, members), one
        places = ranks.places_of(decode_subset(reader, ranks.size))
        if not len(places):  # a class costs a pass over the row, however few bytes it has
            raise damaged(f"class {one} without a change")
        steps = _decode_steps(reader, len(places))
        new[places] = _from_order(_order(old[places]) + steps.astype(np.int16).view(np.uint16))
        total += len(places)
    if reader.remaining:
        raise damaged(f"{reader.remaining} bytes after the changes")
    return new, total


def _encode_steps(steps: NDArray[np.int16]) -> bytes:
    """Return the code of steps [m], none of them 0."""
    parts = [np.packbits(steps < 0, bitorder="little").tobytes()]
    level, sizes = 0, np.abs(steps.astype(np.int64))
    while len(sizes):
        more = sizes >= 2 << level
        parts.append(encode_subset(np.flatnonzero(more), len(sizes)))
        parts.append(pack_fields(sizes[~more] & ((1 << level) - 1), level))
        sizes, level = sizes[more], level + 1
    return b"".join(parts)


def _decode_steps(reader: ByteReader, count: int) -> Integers:
    """Return the next `count` steps, [count]."""
    negative = unpack_fields(reader, count, 1).astype(bool)
    sizes = np.zeros(count, np.int64)
    level, members = 0, np.arange(count)
    while len(members):
        if level > _MAX_LOW_BITS:
            raise damaged("a change of more than 16 bits")
        more = np.zeros(len(members), bool)
        more[decode_subset(reader, len(members))] = True
        ended = members[~more]
        sizes[ended] = (1 << level) | unpack_fields(reader, len(ended), level)
        members, level = members[more], level + 1
    return np.where(negative, -sizes, sizes)


def _classes(old: Halves) -> NDArray[np.uint8]:
    """Return the class of each element, padded to whole blocks, [n rounded up]."""
    classes = np.empty(-(-len(old) // BLOCK) * BLOCK, np.uint8)
    classes[len(old) :] = _NO_CLASS
    classes[: len(old)] = (old >> np.uint16(8)).astype(np.uint8) & np.uint8(0x7F)
    return classes


def _ranks(classes: NDArray[np.uint8], one: int, floor: int, members: NDArray[np.bool_]) -> ClassRanks:
    """Return the counts of a class; `floor` has all classes below it. `members` [n rounded up] is overwritten."""
    compare = np.less_equal if one == floor else np.equal
    return ClassRanks(compare(classes, np.uint8(one), out=members))


def _floor(counts: NDArray[np.int64]) -> int:
    """Return the class that takes in all below it: with it they have a small share of the changes [num_classes]."""
    totals = np.cumsum(counts)
    return int(np.searchsorted(totals, totals[-1] * _RARE_SHARE, side="right"))


def _order(bits: Halves) -> Halves:
    """Return integers [m] in the order of the floats with these bits: -0 comes just before 0."""
    order: Halves = np.where(bits & 0x8000, ~bits, bits | 0x8000).astype(np.uint16)
    return order


def _from_order(order: Halves) -> Halves:
    """Return the bits [m] of floats, from their order."""
    bits: Halves = np.where(order & 0x8000, order & 0x7FFF, ~order).astype(np.uint16)
    return bits
