"""Rules of even micro-batches: exact against enumeration, and no replica more than one ahead of another."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks._planning import TOY, job, pool
from isthmus.plan.search.compose.compose_equal import compose_equal, distribute_equally
from isthmus.plan.search.compose.compose_groups import PipelineOption, PipelineOptions
from isthmus.plan.search.costs.search_limits import SearchLimits
from isthmus.plan.search.pipelines.pipeline_shape import PipelineCost
from isthmus.plan.search.search_plans import SearchRequest, search_plans
from isthmus.plan.search.splits.distribute_micro_batches import ReplicaTiming

options = st.lists(st.tuples(st.floats(0.1, 5), st.floats(0.01, 2), st.integers(1, 6)), min_size=1, max_size=5)
islands = st.lists(options, min_size=1, max_size=3)


def made(rows, looser):
    """Options whose bounds are `looser` than the costs they are cut to."""
    every = [
        PipelineOption(
            SimpleNamespace(dp=dp, true=PipelineCost(first, pace)),
            PipelineCost(first * looser, pace * looser),
        )
        for first, pace, dp in rows
    ]
    return PipelineOptions(every)


def cut(option, micro_batches):
    """An option of an odd number of replicas and a high pace turns out infeasible."""
    assert micro_batches >= 1
    option.cost, option.exact = option.shape.true, True
    return feasible(option.shape.true.interval_s, option.shape.dp)


def feasible(pace_s, dp):
    return dp % 2 == 0 or pace_s < 1


@settings(deadline=None)
@given(rows=islands, total=st.integers(1, 40), looser=st.sampled_from([1.0, 0.5]))
def test_the_least_end_is_that_of_enumeration(rows, total, looser):
    """With an option per replica group, each replica taking ceil(total / replicas), none ends earlier."""
    best = math.inf
    for chosen in itertools.product(*rows):
        if all(feasible(pace, dp) for _, pace, dp in chosen):
            each = math.ceil(total / sum(dp for _, _, dp in chosen))
            best = min(best, max(first + (each - 1) * pace for first, pace, _ in chosen))
    found = compose_equal([made(one, looser) for one in rows], total, cut)
    if best == math.inf:
        assert isinstance(found, float)
    else:
        assert math.isclose(found[0], best)


@given(
    st.lists(st.tuples(st.floats(0.1, 5), st.floats(0.1, 2), st.integers(1, 5)), min_size=1, max_size=4),
    st.integers(1, 50),
)
def test_all_is_dealt_and_no_replica_is_more_than_one_ahead(rows, total):
    """Micro-batches are dealt whole; those that take one more are the first to end with it."""
    paces = [ReplicaTiming(*row) for row in rows]
    dealt = distribute_equally(paces, total)
    if sum(one.num_replicas for one in paces) > total:
        assert dealt is None
        return
    flat = [count for row in dealt for count in row]
    assert sum(flat) == total
    assert max(flat) - min(flat) <= 1
    assert [len(row) for row in dealt] == [one.num_replicas for one in paces]


@pytest.mark.slow
def test_a_plan_with_even_batches_gives_unlike_replicas_the_same():
    """Three sites far apart train replicas of their own; with even batches none takes more than one more."""
    where = pool({"a": [("A100", 8)], "b": [("V100", 16)], "c": [("H20", 8)]}, 1.0, 60.0)
    asked = SearchRequest(job=job(64, 1024), model=TOY, pool=where, explain=False)
    even = replace(asked, limits=SearchLimits(equal_micro_batches=True))
    for plan in search_plans(even).plans:
        counts = [plan.micro_batches_of(replica) for replica in range(plan.dp)]
        assert sum(counts) * plan.micro_batch_size == 64
        assert max(counts) - min(counts) <= 1
    best, best_even = (search_plans(one).plans[0].predicted.iteration_s for one in (asked, even))
    assert best <= best_even
