"""Rules of pipelines by worth: none is missed, none comes early, and equal replica groups share them."""

import itertools
import random
from dataclasses import replace

import pytest

from benchmarks._planning import TOY, job, pool
from isthmus.plan.search.costs.routes import Routes
from isthmus.plan.search.costs.search_limits import SearchLimits
from isthmus.plan.search.costs.slots import cluster_slots, pool_slots
from isthmus.plan.search.costs.workload import TrainingWorkload
from isthmus.plan.search.explore.branch_and_bound import BranchAndBound
from isthmus.plan.search.pipelines.equal_layer_bounds import least_end_s, least_interval_s
from isthmus.plan.search.pipelines.search_space import SearchSpace
from isthmus.plan.time.calibration import DATA_SHEET

pytestmark = pytest.mark.integration

MICRO_BATCHES = 16
POOL = pool({name: [(chip, 8)] for name, chip in zip("abc", ("H100", "A100", "H100"), strict=True)}, 400, 0.1)


def space_of(**limits):
    space = SearchSpace(
        TrainingWorkload(TOY, 1024, "bf16", DATA_SHEET), Routes(POOL, DATA_SHEET), SearchLimits(**limits)
    )
    spots = [spot for one in POOL.clusters for spot in cluster_slots(POOL, one, job(8).placement, None)]
    return space, [replace(spot, chips=4) for spot in spots]


def worth(dp, first_s, pace_s):
    return (first_s + 3 * pace_s) / dp


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("limits", [{}, {"max_chips": 6}, {"executable": True}])
def test_all_chains_come_once_by_rising_worth(count, limits):
    """The bounds of a `PipelineGroup` hold for its pipelines, so that expanded lazily they come as if sorted."""
    space, spots = space_of(**limits)
    chains = space.enumerate_pipelines(spots[:count], 1, MICRO_BATCHES)
    every = sorted(worth(one.dp, one.first_s, one.interval_s) for one in chains.all_pipelines())
    ranking = chains.ranked_by(worth)
    assert ranking.num_left >= len(every)
    assert [value for value, _ in ranking] == pytest.approx(every)
    if not limits:
        assert ranking.num_left == 0
    ends = [value for value, _ in chains.ranked_by_end()]
    assert ends == pytest.approx(sorted(ends))
    assert len(ends) == len(every)


def test_a_ranking_that_is_opened_in_steps_gives_the_same_chains():
    """Its bound on the next chain rises with what is opened, and never exceeds that chain's rank."""
    space, spots = space_of()
    for island in (spots[:1], spots[:2], spots):
        chains = space.enumerate_pipelines(island, 1, MICRO_BATCHES)
        every = [value for value, _ in chains.ranked_by_end()]
        ranking, up_to_s = chains.ranked_by_end(), 0.0
        for value in itertools.islice(every, 40):
            bound_s, first = ranking.open_until(up_to_s)
            while first is None:
                assert up_to_s < bound_s <= value
                up_to_s = bound_s
                bound_s, first = ranking.open_until(up_to_s)
            assert bound_s == value == next(ranking)[0]


def test_the_bound_with_empty_stages_holds_for_fewer_stages():
    """`least_end_s` with stages that may be empty is at most the least end of every smaller number of stages."""
    chance = random.Random(4)
    for _ in range(300):
        kinds = [
            (chance.randint(1, 5), chance.choice((1.0, chance.uniform(0.5, 3)))) for _ in range(chance.randint(1, 3))
        ]
        layers, repeats = chance.randint(sum(count for count, _ in kinds), 40), chance.randint(0, 30)
        wire_s = chance.choice((0.0, chance.uniform(0, 20)))
        pace_s = max(least_interval_s(layers, kinds), wire_s)
        bound_s = least_end_s(layers, kinds, repeats, pace_s, may_be_empty=True)
        for counts in itertools.product(*(range(1, count + 1) for count, _ in kinds)):
            some = [(count, layer_s) for count, (_, layer_s) in zip(counts, kinds, strict=True)]
            own_s = max(least_interval_s(layers, some), wire_s)
            assert pace_s <= own_s * (1 + 1e-12)
            assert bound_s <= least_end_s(layers, some, repeats, own_s) * (1 + 1e-12)


def test_a_limit_leaves_out_only_chains_that_end_later():
    """Of a cut whose chips together take longer than the limit no number is looked at."""
    space, spots = space_of()
    every = [value for value, _ in space.enumerate_pipelines(spots, 1, MICRO_BATCHES).ranked_by_end()]
    limit_s = every[0] * 1.05
    some = [value for value, _ in space.enumerate_pipelines(spots, 1, MICRO_BATCHES).ranked_by_end(limit_s)]
    assert len(some) < len(every)
    assert [one for one in some if one < limit_s] == pytest.approx([one for one in every if one < limit_s])


def test_no_split_beats_the_bound_of_its_chain():
    """First micro-batch, pace and end of every pipeline that fits are at least its bounds."""
    space, spots = space_of()
    for island in (spots[:1], spots[:2], spots, [pool_slots((spots[0], spots[2]))]):
        ranking = space.enumerate_pipelines(island, 1, MICRO_BATCHES).ranked_by_end()
        for end_s, one in itertools.islice(ranking, 0, None, 29):
            for schedule in ("1f1b", "overlapped"):
                chain, repeats = one.make(schedule).best_split(MICRO_BATCHES), -(-MICRO_BATCHES // one.dp) - 1
                if chain is not None:
                    assert one.first_s <= chain.cost.first_s * (1 + 1e-9)
                    assert one.interval_s <= chain.cost.interval_s * (1 + 1e-9)
                    assert end_s <= (chain.cost.first_s + repeats * chain.cost.interval_s) * (1 + 1e-9)


def test_islands_that_are_alike_share_chains_and_keep_their_places():
    """Of three sites two are alike: what is cut for one of them beside the third serves the other."""
    space, spots = space_of()
    explorer = BranchAndBound(space, 16, 1)
    layouts = explorer.run(spots)
    best = {names: min(one.estimate_s for one in layouts if one.clusters == names) for names in
            {one.clusters for one in layouts}}  # fmt: skip
    assert best["a", "b"] == best["b", "c"]
    assert best["a",] == best["c",]
