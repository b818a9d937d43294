"""Rules of the layer split."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from isthmus.plan.split import split_layers


def enumerate_splits(num_layers, num_stages):
    for cuts in itertools.combinations(range(1, num_layers), num_stages - 1):
        ends = (0, *cuts, num_layers)
        yield tuple(itertools.pairwise(ends))


@given(
    st.lists(st.floats(0.1, 3), min_size=1, max_size=8),
    st.lists(st.tuples(st.floats(0.2, 4), st.integers(1, 8)), min_size=1, max_size=4),
)
def test_the_split_is_the_best_of_all_splits(layer_s, stages):
    """The slowest stage equals that of exhaustive search; None exactly where no split fits the memory."""

    def time_s(stage, first, last):
        return sum(layer_s[first:last]) / stages[stage][0]

    def fits(stage, first, last):
        return last - first <= stages[stage][1]

    found = split_layers(len(layer_s), len(stages), time_s, fits)
    feasible = [
        max(time_s(i, *part) for i, part in enumerate(split))
        for split in enumerate_splits(len(layer_s), len(stages))
        if all(fits(i, *part) for i, part in enumerate(split))
    ]
    if not feasible:
        assert found is None
        return
    slowest_s = max(time_s(i, *part) for i, part in enumerate(found))
    assert slowest_s <= min(feasible) * (1 + 2e-4)
    assert all(fits(i, *part) for i, part in enumerate(found))


def test_faster_chips_get_more_layers():
    """Two equal chips and one half as fast share ten layers 4, 4, 2."""
    speeds = [1.0, 1.0, 0.5]
    split = split_layers(10, 3, lambda s, a, b: (b - a) / speeds[s], lambda *_: True)
    assert [last - first for first, last in split] == [4, 4, 2]
