"""Compositions of replica groups after the best one: in order, each once, none left out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.plan.search.compose.runner_ups import runner_ups


class Option:
    """An option that takes some seconds."""

    def __init__(self, time_s: float) -> None:
        self.time_s = time_s


def slowest(options: Sequence[list[Option]]) -> tuple[float, tuple[Option, ...]] | float:
    """Return the composition that ends first, which is as slow as its slowest member."""
    if not all(options):
        return float("inf")
    chosen = tuple(min(some, key=lambda one: one.time_s) for some in options)
    return max(one.time_s for one in chosen), chosen


def kept(some: list[Option], keep: Callable[[Option], bool]) -> list[Option]:
    """Return those that `keep` accepts."""
    return [one for one in some if keep(one)]


@given(st.lists(st.lists(st.floats(0.1, 9), min_size=1, max_size=4), min_size=1, max_size=3))
def test_every_composition_comes_once_in_the_order_of_its_time(times: list[list[float]]) -> None:
    """As many as the product of the groups' options, none twice, none before a faster one."""
    options = [[Option(time_s) for time_s in some] for some in times]
    found = list(runner_ups(options, slowest, kept))
    assert [time_s for time_s, _ in found] == sorted(time_s for time_s, _ in found)
    every = {tuple(map(id, chosen)) for chosen in itertools.product(*options)}
    assert len(found) == len(every)
    assert {tuple(map(id, chosen)) for _, chosen in found} == every


def test_a_group_without_options_has_no_composition() -> None:
    """Nothing is yielded, and nothing is raised."""
    assert list(runner_ups([[Option(1.0)], []], slowest, kept)) == []


def test_groups_that_share_their_options_are_told_apart() -> None:
    """Two groups with one list have its square of compositions."""
    shared = [Option(1.0), Option(2.0)]
    assert [time_s for time_s, _ in runner_ups([shared, shared], slowest, kept)] == pytest.approx([1, 2, 2, 2])
