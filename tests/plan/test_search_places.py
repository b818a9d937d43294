"""Rules of pipelines that end where they began, and of stages whose replicas are in several places."""

import itertools
import random

import pytest

from benchmarks._planning import TOY, job, small_pool
from benchmarks.search_quality import LIMITS, SAMPLES, layouts, seconds, space_of, spots_in
from isthmus.core.job import PlacementConstraints
from isthmus.core.pool import Pool
from isthmus.plan.search.costs.slots import pool_slots, pooled_combinations
from isthmus.plan.search.pipelines.slot_orders import returning_orders, slot_orders
from isthmus.plan.search.pipelines.stage_layout import PipelineSegment
from isthmus.plan.search.search_plans import SearchRequest, search_plans
from isthmus.plan.time.predict import predict


def alike(sizes, gbps=400.0, memory_gb=4.0, owners="abc"):
    """Clusters of one chip type and these numbers of chips, one a node, joined each to each."""
    names = "abc"[: len(sizes)]
    return Pool.model_validate(
        {
            "chips": [
                {
                    "name": "chip",
                    "peak_flop_per_s": {"bf16": 1e14},
                    "memory_bytes": round(memory_gb * 1e9),
                    "memory_bandwidth_bytes_per_s": 2e12,
                    "in_node_link": {"name": "link", "bandwidth_bytes_per_s": 2e11},
                    "power_w": 400,
                }
            ],
            "clusters": [
                {
                    "name": name,
                    "owner": owner,
                    "node_groups": [{"name": "g", "chip": "chip", "nodes": size, "chips_per_node": 1}],
                }
                for name, owner, size in zip(names, owners, sizes, strict=False)
            ],
            "links": [
                {"between": pair, "bandwidth_gbps": gbps, "round_trip_ms": 0.1}
                for pair in itertools.combinations(names, 2)
            ],
        }
    )


def ask(pool, placement=None, **limits):
    asked = job(SAMPLES, 1024, placement)
    return search_plans(SearchRequest(job=asked, model=TOY, pool=pool, limits=LIMITS, explain=False, **limits))


def test_a_pool_is_filled_stage_by_stage():
    """Five and three places, two replicas of four stages: the third stage is in both."""
    space, _ = space_of(alike([5, 3]))
    whole = pool_slots(spots_in(alike([5, 3])))
    seat = space.cost_table(whole, space.degree_choices(whole)[0], 1)
    shape = space.make_shape([PipelineSegment(whole, seat, 4)], 2, "1f1b")
    rows = [([spot.cluster for spot in one.slots], one.dp) for one in shape.uniform_shapes]
    assert rows == [(["a", "a", "a", "b"], 1), (["a", "a", "b", "b"], 1)]


def test_every_two_or_more_spots_of_a_kind_are_pooled():
    """Three alike: three pairs beside the third, and all; each with all their chips."""
    spots = spots_in(alike([1, 2, 3]))
    lists = list(pooled_combinations(spots))
    assert [sum(spot.chips for spot in one) for one in lists] == [6] * 4
    assert [len(one) for one in lists] == [2, 2, 2, 1]


def test_chips_that_are_left_over_in_two_clusters_train_together():
    """Three and three chips hold three replicas of two stages, one of which is in both clusters."""
    answer = ask(alike([3, 3], memory_gb=2.2))
    best = answer.plans[0]
    assert len(best.stages) == 6
    assert {len(best.pipeline(replica)) for replica in range(best.dp)} <= {2, 3, 6}
    assert best.predicted.iteration_s >= answer.bound_s


def test_a_chain_may_return_to_where_the_data_are():
    """Only one owner reads the data: a plan that uses both clusters starts and ends there."""
    placement = PlacementConstraints(data_owners=("a",))
    plans = [plan for plan in ask(alike([2, 3]), placement).plans if len(plan.clusters) > 1]
    assert plans
    for plan in plans:
        for replica in range(plan.dp):
            stages = plan.pipeline(replica)
            assert (stages[0].cluster, stages[-1].cluster) == ("a", "a")


def test_orders_pass_a_cluster_once_and_may_come_back_at_the_end():
    """Two spots have two orders, after each of which a pipeline may return; a pool is filled from either end."""
    where = alike([1, 2])
    space, _ = space_of(where)
    spots = spots_in(where)
    assert len(slot_orders(spots, space.routes)) == len(returning_orders(spots, space.routes)) == 2
    whole = pool_slots(spots)
    assert len(slot_orders([whole], space.routes)) == 2
    assert returning_orders([whole], space.routes) == []


@pytest.mark.slow
def test_no_plan_of_pools_of_like_chips_is_missed_or_refuted():
    """Small pools of one or two types: the fastest of all plans, simulated, is found; the bound is below."""
    chance, seen = random.Random(1), 0
    while seen < 3:
        fields = small_pool(chance, chips=2).model_dump(by_alias=True)
        for cluster in fields["clusters"]:
            for group in cluster["node_groups"]:
                group["chip"] = f"chip{chance.randint(0, min(1, len(fields['chips']) - 1))}"
                group["chips_per_node"] = 2
        where = Pool.model_validate(fields)
        space, asked = space_of(where)
        spots = spots_in(where)
        every = list(itertools.islice(layouts(space, spots, SAMPLES), 301)) if len(spots) > 1 else []
        if not 0 < len(every) <= 300:
            continue
        seen += 1
        best_s = min(seconds(one, asked, where, space.workload) for one in every)
        answer = ask(where)
        found_s = min(plan.predicted.iteration_s for plan in answer.plans)
        assert found_s == pytest.approx(best_s, rel=1e-6)
        assert answer.bound_s <= best_s * (1 + 1e-9)
        for plan in answer.plans:
            assert predict(plan, where, TOY).iteration_s == pytest.approx(plan.predicted.iteration_s, rel=1e-9)
