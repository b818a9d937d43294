"""Named strategies among the ranks of a group: every rank ends with the sum, whatever order clusters have."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.errors import InputError, PlanError
from isthmus.core.job_parts.runtime_choice import SynchronisationName
from isthmus.strategies import RANK_STRATEGIES, check_steps, crossing_elements, group_steps, regions
from isthmus.strategies.group_steps import MAX_SLICES, MIN_SLICE_ELEMENTS


@given(st.sampled_from(RANK_STRATEGIES), st.integers(1, 4), st.integers(1, 3), st.integers(1, 50), st.randoms())
def test_ranks_alone_sum_everything_everywhere(name: str, hosts: int, chips: int, num: int, random: object) -> None:
    """The checker proves it for clusters of equal size, in any order of ranks."""
    clusters = [chr(97 + host) for host in range(hosts)] * chips
    random.shuffle(clusters)  # type: ignore[attr-defined]
    check_steps(group_steps(name, clusters, num), regions.all_reduce(num, len(clusters)))


@pytest.mark.parametrize("name", RANK_STRATEGIES)
@pytest.mark.parametrize("num", [2 * 4 * MIN_SLICE_ELEMENTS, 99 * 4 * MIN_SLICE_ELEMENTS + 3])
def test_large_sums_are_cut_in_slices_of_the_same_bytes(name: str, num: int) -> None:
    """The checker proves them; each slice is summed in the rounds of the strategy, and no byte is sent twice."""
    cut, whole = group_steps(name, "aabb", num), group_steps(name, "aabb", 4000)
    check_steps(cut, regions.all_reduce(num, 4))
    assert {step.round for step in cut} == {step.round for step in whole}
    assert len(cut) == len(whole) * min(num // (4 * MIN_SLICE_ELEMENTS), MAX_SLICES)
    share = sum(crossing_elements(whole, "aabb").values()) / 4000
    assert sum(crossing_elements(cut, "aabb").values()) == pytest.approx(share * num, rel=1e-3)


def test_servers_are_played_by_ranks_that_send_to_them() -> None:
    """So psring sends what a host has once per direction but its own share, and a worker's push to itself is none."""
    steps = group_steps("psring", "aabb", 8)
    assert crossing_elements(steps, "aabb") == {"a": 8, "b": 8}
    assert {step.sender for step in steps} == {0, 1, 2, 3}
    assert all(step.sender != step.receiver for step in steps)


def test_a_strategy_that_ranks_cannot_execute_is_refused() -> None:
    """Clusters of unequal size, a switch, an unknown name: each with what to do."""
    with pytest.raises(PlanError, match=r"equally many ranks in each cluster \(a: 2, b: 1\)"):
        group_steps("ring", "aab", 8)
    with pytest.raises(PlanError, match="'passing' sums in a switch"):
        group_steps("passing", "aabb", 8)
    with pytest.raises(InputError, match="unknown strategy 'rign'"):
        group_steps("rign", "aabb", 8)


def test_a_job_may_name_each_of_them() -> None:
    """The names of the job file are those of the strategies that ranks execute, and the one of switches."""
    assert get_args(SynchronisationName) == (*RANK_STRATEGIES, "passing")
