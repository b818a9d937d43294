"""Rules of how many sequences fit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.errors import InputError
from isthmus.plan.memory.kv_cache_limits import (
    USABLE_SHARE,
    available_cache_bytes,
    parse_lengths,
    sequence_limits,
    serving_limits,
)
from isthmus.plan.memory.memory_table import MeshDegrees, memory_table
from tests.plan.hand import model_of

lengths = st.lists(st.integers(1, 2000), min_size=1, max_size=40)


def fits(number, room_bytes, kv_bytes_per_token, sample):
    """Run it: all start together and grow a token a step; count what is cached at each length."""
    count = len(sample)
    return all(
        number * sum(one >= length for one in sample) / count * length * kv_bytes_per_token <= room_bytes * (1 + 1e-9)
        for length in range(1, max(sample) + 1)
    )


@given(lengths, st.integers(1, 10**6), st.integers(1, 50))
def test_the_limit_by_distribution_is_the_largest_that_runs(sample, room_bytes, per_token):
    """As many as are found fit at every length; one more does not."""
    limit = sequence_limits(room_bytes, per_token, sample)
    assert fits(limit.by_distribution, room_bytes, per_token, sample)
    assert not fits(limit.by_distribution + 1, room_bytes, per_token, sample)


@given(lengths, st.integers(1, 10**6), st.integers(1, 50))
def test_the_longest_is_the_most_careful_measure(sample, room_bytes, per_token):
    """By maximum is never above by mean, nor above by distribution."""
    limit = sequence_limits(room_bytes, per_token, sample)
    assert limit.by_maximum <= limit.by_mean
    assert limit.by_maximum <= limit.by_distribution
    assert limit.tightest_length in sample


def test_what_fits_exactly_fits():
    """Room for three thirds of the longest holds three, whatever a third is in floating point."""
    assert sequence_limits(1999, 1, [1, 1, 1999]).by_distribution == 3


def test_equal_lengths_leave_no_choice():
    """Where all sequences are equally long the three answers agree."""
    limit = sequence_limits(1000, 1, [100, 100])
    assert (limit.by_maximum, limit.by_mean, limit.by_distribution) == (10, 10, 10)


def test_few_long_ones_leave_room_for_many():
    """The report's argument: if most end early, far more than by the maximum can start."""
    limit = sequence_limits(32_000, 1, [1000] * 9 + [32_000])
    assert (limit.by_maximum, limit.by_mean, limit.by_distribution) == (1, 7, 10)


def test_the_room_is_what_the_share_leaves():
    """Used share of the chip, less weights, profiled peak and what lies outside the framework; never
    negative.
    """
    parts = {"weights_bytes": 7.0, "peak_activation_bytes": 10.0, "other_bytes": 3.0}
    assert available_cache_bytes(100.0, usable_share=0.87, **parts) == pytest.approx(67.0)
    assert available_cache_bytes(10.0, usable_share=0.87, **parts) == 0


@pytest.mark.parametrize("sample", [[], [0, 5]])
def test_a_sample_without_lengths_is_refused(sample):
    """There is nothing to conclude from no length."""
    with pytest.raises(InputError, match="no lengths"):
        sequence_limits(1000, 1, sample)


def test_a_chip_serves_what_its_memory_leaves_beside_weights_and_one_layer():
    """90 % of the memory, less the weights and one layer's activations with balanced routing."""
    made = memory_table(model_of(layers=4, hidden=256), MeshDegrees(), sequence_length=1024, inference=True)
    layer = made["per_layer_activations"]
    used = made["per_chip"]["weights"]["total"] + layer["attention"]["total"] + layer["moe"]["balanced"]
    cache_bytes = USABLE_SHARE * 1e9 - used
    limits = serving_limits(made, 1e9, (100, 2000))
    assert limits == {
        "cache_bytes": pytest.approx(cache_bytes),
        **vars(sequence_limits(cache_bytes, made["kv_bytes_per_token"], (100, 2000))),
    }
    assert limits["tightest_length"] == 2000


def test_the_largest_parts_of_few_sequences():
    """Ten short ones at once are tighter than one long one; all lengths count for the mean."""
    limits = sequence_limits(9_000, 2, [100] * 9 + [500])
    assert vars(limits) == {"by_maximum": 9, "by_mean": 32, "by_distribution": 45, "tightest_length": 100}


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "1024,", "a", "²", "9" * 10])
def test_lengths_are_whole_numbers_of_at_least_one(text):
    """Anything else is named, at most 20 characters of it."""
    with pytest.raises(InputError, match=r"^sequence length '") as raised:
        parse_lengths(text)
    assert raised.value.hint == "write measured lengths in tokens: 1024,2048,8192"
    with pytest.raises(InputError, match=r"^sequence length 'x{20}'"):
        parse_lengths("x" * 30)
    assert parse_lengths(" 1024, 8 ,999999999") == (1024, 8, 999999999)
