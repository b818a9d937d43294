"""Rules and known answers of dealing attention blocks to cores."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.errors import InputError
from isthmus.plan.sequence.attention_blocks import balance_blocks, core_range

costs = st.lists(st.floats(0, 100), min_size=1, max_size=40)


def test_the_reports_examples():
    """8 blocks on 8 cores: 3.37 is rounded down, so 3 to 8 cores. 8 blocks on 4 cores: all 4."""
    assert core_range(8, 8) == (3, 8)
    assert core_range(8, 4) == (4, 4)


@given(st.integers(1, 2000), st.integers(1, 200))
def test_the_range_is_the_formula_rounded_down(num_blocks, num_cores):
    """min(sqrt(blocks + 1/4) + 1/2, cores) to min(blocks, cores), unless blocks abound."""
    fewest, most = core_range(num_blocks, num_cores)
    assert 1 <= fewest <= most == min(num_blocks, num_cores)
    if num_blocks < (num_cores - 2) * num_cores:
        assert fewest == min(math.floor(math.sqrt(num_blocks + 0.25) + 0.5 + 1e-12), num_cores)


@given(costs, st.integers(1, 12), st.floats(0, 10))
def test_every_block_has_one_core_and_the_order_stays(block_costs, num_cores, cost_per_core):
    """A plan deals all blocks in order; its costs are what they say."""
    plan = balance_blocks(block_costs, num_cores, cost_per_core)
    assert [j for core in plan.cores for j in core] == list(range(len(block_costs)))
    slowest = max(sum(block_costs[j] for j in core) for core in plan.cores)
    assert plan.slowest_cost == pytest.approx(slowest)
    assert plan.total_cost == pytest.approx(slowest + cost_per_core * len(plan.cores))
    assert slowest >= max(max(block_costs), sum(block_costs) / num_cores) - 1e-9


def test_cores_that_cost_more_than_they_save_are_left_out():
    """Eight equal blocks: free cores are all used; at a cost of 1 a core, three of them do."""
    assert [len(core) for core in balance_blocks([1.0] * 8, 8).cores] == [1] * 8
    assert [len(core) for core in balance_blocks([1.0] * 8, 8, 1.0).cores] == [3, 2, 3]
    assert balance_blocks([1.0] * 8, 8, 1.0).total_cost == 6


def test_unequal_blocks_are_weighed_not_counted():
    """One block as heavy as four has a core to itself."""
    assert balance_blocks([4.0, 1.0, 1.0, 1.0, 1.0], 2).cores == ((0,), (1, 2, 3, 4))


def test_bad_input_is_refused():
    """No blocks, no cores, negative costs."""
    for block_costs, num_cores, cost in (([], 1, 0), ([1.0], 0, 0), ([-1.0], 1, 0), ([1.0], 1, -1)):
        with pytest.raises(InputError):
            balance_blocks(block_costs, num_cores, cost)
