"""`encode_changes` and `decode_changes`: what changed between two rows of floats, in little more than its entropy.

An optimizer's step is about as large for each weight, so how many 16-bit weights change, and by how many steps of the
last bit 32-bit weights do, falls with their exponent. The receiver has the old weights, so their exponents are known to
both sides and cost nothing:

1. A weight's class is its exponent; of 16 bits, two neighbouring exponents of bfloat16 together: the upper byte without
   the sign.
2. In each class the set of changed weights is a `subset_code`.
3. A change is the number of steps between neighbouring floats from old to new, with a sign. Signs are bits; the sizes
   are sets in sets: those of 2 steps or more among the changed, of 4 or more among these, and so on, then low bits. Of
   32 bits, nearly all weights change, by hundreds of steps: the sets begin at a power of two that the class states.

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

Bits = Halves | NDArray[np.uint32]
"""Bits of floats of 16 or 32 bits, [n]."""

Steps = NDArray[np.int16] | NDArray[np.int32]

_NO_CLASS = 0xFF
"""Class of the elements that pad a row to whole blocks."""

_RARE_SHARE = 1 / 128
"""The smallest exponents are one class as long as they have at most this share of all changes."""

_FULL_SETS = 3
"""Of 32-bit floats the first set of sizes ends this many powers of two below their mean: inside all are as likely."""


def encode_changes(old: Bits, new: Bits) -> bytes:
    """Return the code of the changes from `old` [n] to `new` [n], of one width; empty if there are none."""
    places = np.flatnonzero(old != new)
    if len(places) == 0:
        return b""
    steps = _as_steps(_order(new[places]) - _order(old[places]))
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


def decode_changes(old: Bits, code: bytes | memoryview) -> tuple[Bits, int]:
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
        steps = _decode_steps(reader, len(places), 8 * old.itemsize)
        new[places] = _from_order(_order(old[places]) + steps.astype(f"i{old.itemsize}").view(old.dtype))
        total += len(places)
    if reader.remaining:
        raise damaged(f"{reader.remaining} bytes after the changes")
    return new, total


def _encode_steps(steps: Steps) -> bytes:
    """Return the code of steps [m], none of them 0."""
    parts = [np.packbits(steps < 0, bitorder="little").tobytes()]
    level, sizes, from_zero = 0, np.abs(steps.astype(np.int64)), 0
    if steps.itemsize == 4:
        level, from_zero = max(int(sizes.mean()).bit_length() - 1 - _FULL_SETS, 0), 1
        parts.append(bytes([level]))
    while len(sizes):
        more = sizes >= 2 << level
        width = level + from_zero
        parts.append(encode_subset(np.flatnonzero(more), len(sizes)))
        parts.append(pack_fields(sizes[~more] & ((1 << width) - 1), width))
        sizes, level, from_zero = sizes[more], level + 1, 0
    return b"".join(parts)


def _decode_steps(reader: ByteReader, count: int, num_bits: int) -> Integers:
    """Return the next `count` steps between floats of `num_bits`, [count]."""
    negative = unpack_fields(reader, count, 1).astype(bool)
    sizes = np.zeros(count, np.int64)
    level, from_zero, members = 0, 0, np.arange(count)
    if num_bits == 32:
        level, from_zero = int(reader.take(1)[0]), 1
    while len(members):
        if level + from_zero >= num_bits:
            raise damaged(f"a change of more than {num_bits} bits")
        more = np.zeros(len(members), bool)
        more[decode_subset(reader, len(members))] = True
        ended = members[~more]
        sizes[ended] = (0 if from_zero else 1 << level) | unpack_fields(reader, len(ended), level + from_zero)
        members, level, from_zero = members[more], level + 1, 0
    return np.where(negative, -sizes, sizes)


def _classes(old: Bits) -> NDArray[np.uint8]:
    """Return the class of each element, padded to whole blocks, [n rounded up]."""
    classes = np.empty(-(-len(old) // BLOCK) * BLOCK, np.uint8)
    classes[len(old) :] = _NO_CLASS
    if old.itemsize == 4:  # infinity and NaN are of the class below, as no class is that of the padding
        exponents = (old >> np.uint32(23)).astype(np.uint8)
        np.minimum(exponents, np.uint8(_NO_CLASS - 1), out=classes[: len(old)])
    else:
        classes[: len(old)] = (old >> np.uint16(8)).astype(np.uint8) & np.uint8(0x7F)
    return classes


def _as_steps(bits: Bits) -> Steps:
    """Return the same bits [m] as integers with a sign."""
    return bits.view(np.int16) if bits.itemsize == 2 else bits.view(np.int32)


def _ranks(classes: NDArray[np.uint8], one: int, floor: int, members: NDArray[np.bool_]) -> ClassRanks:
    """Return the counts of a class; `floor` has all classes below it. `members` [n rounded up] is overwritten."""
    compare = np.less_equal if one == floor else np.equal
    return ClassRanks(compare(classes, np.uint8(one), out=members))


def _floor(counts: NDArray[np.int64]) -> int:
    """Return the class that takes in all below it: with it they have a small share of the changes [num_classes]."""
    totals = np.cumsum(counts)
    return int(np.searchsorted(totals, totals[-1] * _RARE_SHARE, side="right"))


def _order(bits: Bits) -> Bits:
    """Return integers [m] in the order of the floats with these bits: -0 comes just before 0."""
    return bits ^ _flipped(bits)


def _from_order(order: Bits) -> Bits:
    """Return the bits [m] of floats, from their order."""
    return order ^ _flipped(~order)


def _flipped(bits: Bits) -> Bits:
    """Return all ones for floats [m] below 0, the sign alone for others: what differs between bits and order."""
    last = 8 * bits.itemsize - 1
    flipped: Bits = (_as_steps(bits) >> last).view(bits.dtype) | bits.dtype.type(1 << last)
    return flipped
