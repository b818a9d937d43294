"""Rules of the code of changes: lossless for any bits, near the entropy for an optimizer's, bounded for any bytes."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks._weight_versions import adam_versions, entropy_bytes
from isthmus.weights import DeltaError, decode_changes, encode_changes
from isthmus.weights.bit_fields import ByteReader, pack_fields, unpack_fields, varint
from isthmus.weights.class_ranks import BLOCK, ClassRanks, count_bits
from isthmus.weights.subset_code import decode_subset, encode_subset

ROWS = st.tuples(st.binary(min_size=0, max_size=600), st.sampled_from([np.uint16, np.uint32])).map(
    lambda drawn: np.frombuffer(drawn[0][: len(drawn[0]) // 4 * 4], drawn[1])
)


def changed_bits(old: np.ndarray, share: float, seed: int) -> np.ndarray:
    """Return `old` [n] with about `share` of its elements replaced by any bits."""
    numbers = np.random.default_rng(seed)
    drawn = numbers.integers(0, 2 ** (8 * old.itemsize), len(old), dtype=old.dtype)
    return np.where(numbers.random(len(old)) < share, drawn, old).astype(old.dtype)


@given(ROWS, st.sampled_from([0.0, 0.01, 0.3, 0.7, 1.0]), st.integers(0, 2**32))
def test_any_bits_come_back(old: np.ndarray, share: float, seed: int) -> None:
    """Whatever the old bits and the changes are: NaN, -0, infinity, jumps over all exponents; the count is right."""
    new = changed_bits(old, share, seed)
    code = encode_changes(old, new)
    found, num_changed = decode_changes(old, code)
    assert found.tolist() == new.tolist()
    assert num_changed == np.count_nonzero(old != new)
    assert (code == b"") == (num_changed == 0)


@pytest.mark.parametrize("step_size", [1e-7, 1e-6, 1e-5, 1e-3])
def test_steps_of_an_optimizer_come_back(step_size: float) -> None:
    """From 0.1 % to nearly all weights changed, 100,003 of them."""
    for rounded in (True, False):
        old, new = adam_versions(100_003, step_size, rounded=rounded)
        found, _ = decode_changes(old, encode_changes(old, new))
        assert (found == new).all()


def test_changes_cost_little_more_than_their_entropy() -> None:
    """At about 1 % of 2 million weights: below 0.95 bytes a change, and within 6 % of an ideal code by exponent."""
    old, new = adam_versions(2_000_000)
    num_changed = np.count_nonzero(old != new)
    assert 0.005 < num_changed / len(old) < 0.02
    size = len(encode_changes(old, new))
    assert size / num_changed < 0.95
    assert size < 1.06 * entropy_bytes(old, new)


def test_changes_of_float32_cost_little_more_than_their_entropy() -> None:
    """Of a million weights, nearly all changed by hundreds of steps: within 6 % of an ideal code by exponent."""
    old, new = adam_versions(1_000_000, rounded=False)
    assert np.count_nonzero(old != new) > 0.99 * len(old)
    assert len(encode_changes(old, new)) < 1.06 * entropy_bytes(old, new)


@given(st.integers(1, 400), st.floats(0, 1), st.integers(0, 2**32))
def test_a_set_comes_back(size: int, share: float, seed: int) -> None:
    """Empty, whole, and anything between; the reader stands behind it."""
    members = np.flatnonzero(np.random.default_rng(seed).random(size) < share)
    reader = ByteReader(encode_subset(members, size) + b"\xaa")
    assert decode_subset(reader, size).tolist() == members.tolist()
    assert reader.remaining == 1


@pytest.mark.parametrize("share", [0.002, 0.01, 0.1, 0.3, 0.5, 0.8])
def test_a_set_costs_little_more_than_its_entropy(share: float) -> None:
    """Within 4 % of -p log p - (1 - p) log (1 - p) bits a thing, for random sets of 200,000."""
    size = 200_000
    members = np.flatnonzero(np.random.default_rng(1).random(size) < share)
    ideal = -size * (share * math.log2(share) + (1 - share) * math.log2(1 - share)) / 8
    assert len(encode_subset(members, size)) < 1.04 * ideal


@given(st.lists(st.booleans(), min_size=1, max_size=5 * BLOCK))
def test_ranks_and_places_are_inverse(members: list[bool]) -> None:
    """A rank counts the members before a place; the place of each rank is that member."""
    row = np.zeros(-(-len(members) // BLOCK) * BLOCK, bool)
    row[: len(members)] = members
    places, ranks = np.flatnonzero(row), ClassRanks(row)
    assert ranks.size == len(places)
    assert ranks.ranks_of(places).tolist() == list(range(len(places)))
    assert ranks.places_of(np.arange(len(places))).tolist() == places.tolist()


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_bits_are_counted_with_and_without_the_function_of_numpy_2(words: list[int]) -> None:
    """By sums of neighbouring bits as by any other way."""
    found = count_bits(np.array(words, np.uint64), built_in=False)
    assert found.tolist() == [one.bit_count() for one in words]
    assert count_bits(np.array(words, np.uint64)).tolist() == found.tolist()


@given(st.integers(0, 31).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, 2**n - 1)))))
def test_fields_come_back(case: tuple[int, list[int]]) -> None:
    """Of any width, in as many bytes as their bits need."""
    width, values = case
    data = pack_fields(np.array(values, np.int64), width)
    assert len(data) == -(-width * len(values) // 8)
    assert unpack_fields(ByteReader(data), len(values), width).tolist() == values


@given(st.integers(0, 2**62))
def test_varints_come_back(value: int) -> None:
    """And are refused where they are larger than the reader allows."""
    assert ByteReader(varint(value)).varint(value) == value
    with pytest.raises(DeltaError, match="beyond"):
        ByteReader(varint(value + 1)).varint(value)


@settings(max_examples=300)
@given(st.binary(max_size=64), st.integers(0, 300), st.integers(0, 2**32))
def test_any_bytes_are_read_or_refused(code: bytes, size: int, seed: int) -> None:
    """What no encoder wrote gives some row of the same length or a `DeltaError`, and no array larger than the row."""
    for kind in (np.uint16, np.uint32):
        old = np.random.default_rng(seed).integers(0, np.iinfo(kind).max, size, dtype=kind)
        try:
            new, num_changed = decode_changes(old, code)
        except DeltaError:
            continue
        assert new.shape == old.shape
        assert num_changed <= size


@functools.cache
def coded_step(rounded: bool = True) -> tuple[np.ndarray, bytes]:
    """Weights before a step of Adam, and the code of the step."""
    old, new = adam_versions(3_000, 1e-4, rounded=rounded)
    return old, encode_changes(old, new)


@settings(max_examples=300)
@given(st.integers(0, 10**6), st.integers(0, 255), st.booleans())
def test_a_flipped_byte_is_read_or_refused(place: int, value: int, rounded: bool) -> None:
    """A good code with one byte changed never raises anything but `DeltaError`."""
    old, good = coded_step(rounded)
    code = bytearray(good)
    code[place % len(code)] = value
    try:
        found, _ = decode_changes(old, bytes(code))
    except DeltaError:
        return
    assert found.shape == old.shape


@pytest.mark.parametrize("cut", [1, 2, 5, 30])
def test_a_code_cut_short_is_named(cut: int) -> None:
    """The end of a class, of a set or of steps is missing."""
    old, code = coded_step()
    with pytest.raises(DeltaError, match=r"damaged|too early|more or fewer"):
        decode_changes(old, code[:-cut])


@pytest.mark.attack
def test_classes_without_a_change_are_refused() -> None:
    """Empty classes of three bytes would cost a pass over the row each."""
    old = np.random.default_rng(0).integers(0, 2**16, 1000, dtype=np.uint16)
    empty = b"\x00" + varint(0)
    code = bytes([0, 200]) + b"".join(bytes([one]) + empty for one in range(200))
    with pytest.raises(DeltaError, match="class 0 without a change"):
        decode_changes(old, code)


def test_a_set_of_giant_size_is_refused() -> None:
    """A count beyond the class, and unary bits beyond what its gaps can need, are refused before they are unpacked."""
    for code in (b"\x00" + varint(2**40), b"\x00" + varint(3) + varint(2**40), b"\x3f\x01\x01\x01"):
        with pytest.raises(DeltaError):
            decode_subset(ByteReader(code + bytes(1000)), 100)
