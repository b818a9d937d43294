"""Rules of the layer split, against enumeration."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.plan.search.splits.split_equal_layers import LayerTimes, split_equal_layers
from isthmus.plan.search.splits.split_layers import split_layers

pytestmark = pytest.mark.integration

layer_times = st.lists(st.floats(0.1, 3), min_size=1, max_size=7)
stages = st.lists(st.tuples(st.floats(0.2, 4), st.integers(1, 7)), min_size=1, max_size=4)


def enumerate_splits(num_layers, num_stages):
    for cuts in itertools.combinations(range(1, num_layers), num_stages - 1):
        yield tuple(itertools.pairwise((0, *cuts, num_layers)))


def table(layer_s, speed, room):
    """Seconds of layers [first, last) at a speed, where at most `room` fit."""
    count = len(layer_s)
    return [
        [sum(layer_s[first:last]) / speed if 0 < last - first <= room else math.inf for last in range(count + 1)]
        for first in range(count)
    ]


def lines(times):
    """The same as the split takes it: (last, seconds) of what fits, by first layer."""
    return [[(last, t) for last, t in enumerate(row) if 0 < t < math.inf] for row in times]


def total_s(split, times, micro_batches, reduce=None):
    each = [times[i][a][b] for i, (a, b) in enumerate(split)]
    reduced = max((reduce[i][a][b] for i, (a, b) in enumerate(split)), default=0.0) if reduce else 0.0
    repeats = (micro_batches - 1) * max(each) if micro_batches > 1 else 0.0  # 0 x infinity is no number
    return sum(each) + repeats + reduced


@settings(deadline=None)
@given(layer_times, stages, st.integers(1, 12))
def test_the_split_is_the_best_of_all_splits(layer_s, stages, micro_batches):
    """Sum + (B - 1) x slowest equals that of enumeration; None exactly where no split fits the memory."""
    times = [table(layer_s, *stage) for stage in stages]
    found = split_layers(len(layer_s), [lines(one) for one in times], micro_batches)
    all_s = [total_s(s, times, micro_batches) for s in enumerate_splits(len(layer_s), len(stages))]
    best_s = min(all_s, default=math.inf)
    if best_s == math.inf:
        assert found is None
        return
    assert math.isclose(found.total_s, best_s, rel_tol=1e-9)
    assert math.isclose(total_s(found.layers, times, micro_batches), best_s, rel_tol=1e-9)


@settings(deadline=None)
@given(layer_times, stages, st.integers(1, 6), st.lists(st.floats(0, 5), min_size=4, max_size=4))
def test_the_largest_all_reduce_is_weighed_as_well(layer_s, stages, micro_batches, rates):
    """With an all-reduce per stage the answer is still that of enumeration."""
    times = [table(layer_s, *stage) for stage in stages]
    reduce = [
        [[rate * (last - first) for last in range(len(layer_s) + 1)] for first in range(len(layer_s))]
        for rate in rates[: len(stages)]
    ]
    found = split_layers(len(layer_s), [lines(one) for one in times], micro_batches, reduce)
    all_s = [total_s(s, times, micro_batches, reduce) for s in enumerate_splits(len(layer_s), len(stages))]
    best_s = min(all_s, default=math.inf)
    assert (found is None) == (best_s == math.inf)
    if found is not None:
        assert math.isclose(found.total_s, best_s, rel_tol=1e-9)


@given(st.integers(1, 9), stages, st.integers(1, 12))
def test_equal_layers_are_shared_as_the_exact_split_shares_them(num_layers, stages, micro_batches):
    """For equal layers and convex times `split_equal_layers` and `split_layers` agree."""
    times = [table([1.0] * num_layers, *stage) for stage in stages]
    kinds = [LayerTimes(tuple(n / speed for n in range(1, min(room, num_layers) + 1))) for speed, room in stages]
    split, share = (
        split_layers(num_layers, [lines(one) for one in times], micro_batches),
        split_equal_layers(kinds, num_layers, micro_batches),
    )
    assert (split is None) == (share is None)
    if share is not None:
        assert sum(share.counts) == num_layers
        assert math.isclose(share.sum_s + (micro_batches - 1) * share.slowest_s, split.total_s, rel_tol=1e-9)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.floats(0.01, 2), min_size=1, max_size=6), min_size=1, max_size=3),
    st.integers(1, 9),
    st.integers(1, 8),
)
def test_times_that_are_not_convex_are_shared_exactly_too(steps, num_layers, micro_batches):
    """Recomputed layers make times rise in uneven steps: the answer is still that of enumeration."""
    kinds = [LayerTimes(tuple(itertools.accumulate(one))) for one in steps]
    share = split_equal_layers(kinds, num_layers, micro_batches)
    best_s = math.inf
    for counts in itertools.product(*(range(1, len(one.seconds) + 1) for one in kinds)):
        if sum(counts) == num_layers:
            each = [one.seconds[n - 1] for one, n in zip(kinds, counts, strict=True)]
            best_s = min(best_s, sum(each) + (micro_batches - 1) * max(each))
    assert (share is None) == (best_s == math.inf)
    if share is not None:
        assert math.isclose(share.sum_s + (micro_batches - 1) * share.slowest_s, best_s, rel_tol=1e-9)
