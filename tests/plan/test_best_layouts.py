"""`BestLayouts`: what a search may leave out changes nothing of what is simulated."""

import itertools
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from isthmus.plan.search.compose.best_layouts import LEAST_SIMULATED, BestLayouts


@dataclass(frozen=True)
class Found:
    """A layout as the search compares it."""

    estimate_s: float
    clusters: tuple[str, ...]
    simulation_cells: int
    num_chips: int = 8


FOUND = st.lists(
    st.builds(Found, st.integers(1, 10**6), st.sampled_from([("a",), ("b",), ("a", "b")]), st.integers(1, 40)),
    max_size=30, unique_by=lambda one: one.estimate_s,
)  # fmt: skip


def within_cells(layouts, max_cells):
    """Return the layouts that are simulated for their estimates, best first."""
    ordered = sorted(layouts, key=lambda one: one.estimate_s)
    spent = itertools.accumulate(one.simulation_cells for one in ordered)
    enough = next((place for place, cells in enumerate(spent, start=1) if cells > max_cells), len(ordered))
    return ordered[: max(enough, LEAST_SIMULATED)]


def best_of_sets(layouts):
    """Return the best layout of each set of clusters."""
    return {one.clusters: one for one in sorted(layouts, key=lambda one: -one.estimate_s)}


@given(FOUND, st.integers(1, 200))
def test_layouts_above_the_cutoff_of_their_clusters_are_never_simulated(found, max_cells):
    """A search that drops them ends with the same layouts within the cells, and the same best ones of each set."""
    best = BestLayouts(len(found) + 1, max_cells=max_cells)
    for one in found:
        if one.estimate_s < best.cutoff_for(one.clusters):
            best.keep(one)
    assert within_cells(best.layouts, max_cells) == within_cells(found, max_cells)
    assert best_of_sets(best.layouts) == best_of_sets(found)


def test_a_set_of_clusters_without_a_layout_is_searched_up_to_the_last_layout_kept():
    """Its first layout may be slower than all that are simulated; a second one must beat the first."""
    best = BestLayouts(4, max_cells=10)
    for estimate_s in (1, 2, 3, 9):
        best.keep(Found(estimate_s, ("a",), 20))
    assert best.cutoff_for(("a",)) == 3
    assert best.cutoff_for(("b",)) == 9
    best.keep(Found(5, ("b",), 20))
    assert best.cutoff_for(("b",)) == 5
