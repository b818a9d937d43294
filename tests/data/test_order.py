"""Rules of the sample order: a permutation per epoch, addressable at any position."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from isthmus.data.sample_order import sample_order

sizes = st.integers(1, 400)
seeds = st.integers(0, 2**63)


@given(sizes, seeds, st.integers(0, 5))
def test_an_epoch_holds_each_sample_once(num_samples, seed, epoch):
    """Any epoch is a permutation of all samples."""
    order = sample_order(epoch * num_samples, num_samples, num_samples, seed)
    assert sorted(order.tolist()) == list(range(num_samples))


@given(sizes, seeds, st.integers(0, 1000), st.integers(0, 50), st.integers(0, 50))
def test_a_range_is_the_ranges_it_is_made_of(num_samples, seed, first, a, b):
    """Positions can be asked for in any pieces, across epochs too."""
    whole = sample_order(first, a + b, num_samples, seed)
    parts = [sample_order(first, a, num_samples, seed), sample_order(first + a, b, num_samples, seed)]
    assert np.array_equal(whole, np.concatenate(parts))


def test_the_order_is_the_same_everywhere():
    """The order is fixed by (seed, epoch, size) alone: these values hold on every machine and version."""
    assert sample_order(0, 10, 10, 0).tolist() == [5, 1, 9, 3, 6, 0, 8, 7, 2, 4]
    assert sample_order(10, 10, 10, 0).tolist() == [7, 0, 3, 6, 1, 2, 5, 4, 9, 8]


def test_shuffling_shuffles():
    """Epochs and seeds differ, and few neighbours of a large set stay neighbours."""
    orders = [sample_order(epoch * 5000, 5000, 5000, seed) for epoch, seed in ((0, 0), (1, 0), (0, 1))]
    for order in orders:
        assert (np.diff(order) == 1).mean() < 0.005
        assert abs(np.corrcoef(order, np.arange(5000))[0, 1]) < 0.05
    assert (orders[0] == orders[1]).mean() < 0.005
    assert (orders[0] == orders[2]).mean() < 0.005


def test_a_position_far_out_needs_no_walk_from_the_start():
    """Sample 10**15 of a set of 10**12 is found at once, without memory for the set."""
    order = sample_order(10**15, 4, 10**12, 0)
    assert len(set(order.tolist())) == 4
    assert order.max() < 10**12
