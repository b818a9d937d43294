"""Properties of the search: what it may never do, on random small pools."""

import dataclasses
import gc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.errors import PlanError
from isthmus.core.job import CheckpointConfig, DataConfig, Job, PlacementConstraints, TrainingConfig
from isthmus.core.model import Model
from isthmus.core.pool import Pool
from isthmus.core.process.gc_pause import collection_paused
from isthmus.plan.memory.plan_stage_memory import num_reducing_replicas
from isthmus.plan.memory.stage_memory import stage_memory
from isthmus.plan.profile.model_profile import profile_model
from isthmus.plan.search.costs.search_limits import SearchLimits
from isthmus.plan.search.search_plans import SearchRequest, search_plans
from isthmus.plan.time.predict import predict
from isthmus.schedule import check_schedule, make_schedule, overlapped

pytestmark = pytest.mark.slow

CONFIG = {
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_hidden_layers": 6,
    "hidden_size": 1024,
    "vocab_size": 32000,
}
PROFILE = profile_model(
    Model(
        path="m", architecture="LlamaForCausalLM", num_layers=6, hidden_size=1024, vocab_size=32000,
        config=CONFIG,
    )
)  # fmt: skip

site = st.fixed_dictionaries(
    {
        "count": st.integers(1, 3),
        "flops": st.floats(2e13, 2e14),
        "memory_gb": st.floats(0.8, 6.0),
        "price": st.floats(0.1, 3),
    }
)
sites = st.lists(site, min_size=1, max_size=3)
links = st.fixed_dictionaries({"gbps": st.floats(0.5, 100), "round_trip_ms": st.floats(0, 40)})


def make_pool(sites, gbps, round_trip_ms, names="abc", faster=1.0, larger=1.0):
    """Sites of one chip type each, joined each to each."""
    return Pool.model_validate(
        {
            "chips": [
                {
                    "name": f"chip-{name}",
                    "peak_flop_per_s": {"bf16": one["flops"] * faster},
                    "memory_bytes": round(one["memory_gb"] * 1e9 * larger),
                    "memory_bandwidth_bytes_per_s": 2e12,
                    "in_node_link": {"name": "link", "bandwidth_bytes_per_s": 2e11},
                    "power_w": 400,
                }
                for name, one in zip(names, sites, strict=False)
            ],
            "clusters": [
                {
                    "name": name,
                    "owner": f"owner-{name}",
                    "region": f"region-{name}",
                    "node_groups": [
                        {
                            "name": "g",
                            "chip": f"chip-{name}",
                            "nodes": 1,
                            "chips_per_node": one["count"],
                            "price_per_chip_hour": one["price"],
                        }
                    ],
                }
                for name, one in zip(names, sites, strict=False)
            ],
            "links": [
                {"between": [x, y], "bandwidth_gbps": gbps, "round_trip_ms": round_trip_ms}
                for i, x in enumerate(names[: len(sites)])
                for y in names[i + 1 : len(sites)]
            ],
        }
    )


def ask(pool, placement=None, **more):
    job = Job(
        name="j",
        model="m",
        data=DataConfig(paths=("x",)),
        training=TrainingConfig(steps=1, sequence_length=1024, global_batch_size=8),
        checkpoints=CheckpointConfig(folder="c"),
        output="o",
        placement=placement or PlacementConstraints(),
    )
    limits = more.pop("limits", SearchLimits(max_micro_batch_size=2))
    return search_plans(SearchRequest(job=job, model=PROFILE, pool=pool, limits=limits, explain=False, **more))


def best_s(answer):
    return min((plan.predicted.iteration_s for plan in answer.plans), default=float("inf"))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(sites, links, st.sampled_from(["bandwidth", "memory", "speed"]), st.floats(1.01, 4))
def test_more_of_anything_is_never_slower(sites, links, what, factor):
    """More bandwidth, memory or speed never makes the chosen plan slower."""
    before = best_s(ask(make_pool(sites, **links)))
    more = {"bandwidth": {}, "memory": {"larger": factor}, "speed": {"faster": factor}}[what]
    better = links | ({"gbps": links["gbps"] * factor} if what == "bandwidth" else {})
    after = best_s(ask(make_pool(sites, **better, **more)))
    assert after <= before * (1 + 1e-9)


@settings(max_examples=10, deadline=None)
@given(sites, links, st.permutations("abc"))
def test_names_and_their_order_change_nothing(sites, links, names):
    """Relabelled clusters get the same predicted times."""
    one, two = ask(make_pool(sites, **links)), ask(make_pool(sites, **links, names="".join(names)))
    assert best_s(one) == pytest.approx(best_s(two), rel=1e-9)


@settings(max_examples=12, deadline=None)
@given(sites, links)
def test_every_plan_fits_runs_and_is_never_faster_than_the_bound(sites, links):
    """Memory model, schedule checker, chips there are, the bound, and the simulator's own prediction."""
    pool = make_pool(sites, **links)
    answer = ask(pool)
    for plan in answer.plans:
        assert plan.num_samples == 8
        check_plan(plan, pool, answer.bound_s)


def check_plan(plan, pool, bound_s):
    """Check the bound, the simulator's own prediction, the chips there are, and each replica."""
    assert plan.predicted.iteration_s >= bound_s * (1 - 1e-9)
    assert predict(plan, pool, PROFILE).iteration_s == pytest.approx(plan.predicted.iteration_s, rel=1e-9)
    for part in plan.parts():
        assert part.chips["g"] <= pool.node_group(part.cluster, "g").num_chips
    for replica in range(plan.dp):
        check_replica(plan, pool, replica)


def check_replica(plan, pool, replica):
    """Check schedule and memory of a replica, by the models themselves."""
    stages, count = plan.pipeline(replica), plan.micro_batches_of(replica)
    if plan.warm_up:
        schedule = overlapped(len(stages), count, plan.warm_up)
    else:
        schedule = make_schedule(plan.schedule, len(stages), count)
    alive = check_schedule(schedule)
    for index, stage in enumerate(stages):
        memory = stage_memory(
            PROFILE, stage.layers, is_first=index == 0, is_last=index == len(stages) - 1,
            micro_batch_size=plan.micro_batch_size_of(replica), sequence_length=1024, in_flight=alive[index],
            tp=stage.tp, dp=num_reducing_replicas(plan, replica), sp=stage.sp, zero=plan.zero,
            recompute=stage.recompute, recompute_layers=stage.recompute_layers,
            outer_optimizer=plan.local_steps > 1,
        )  # fmt: skip
        group = pool.node_group(stage.cluster, stage.node_group)
        assert memory.total_bytes <= pool.chip(group).memory_bytes


@settings(max_examples=8, deadline=None)
@given(sites, links, st.sampled_from("abc"))
def test_placement_is_kept(sites, links, name):
    """Owners, regions, chips and where data may be read bind every plan; so does the number of chips."""
    pool = make_pool(sites, **links)
    for placement in (
        PlacementConstraints(owners=(f"owner-{name}",)),
        PlacementConstraints(regions=(f"region-{name}",)),
        PlacementConstraints(chips=(f"chip-{name}",))
        if name in "abc"[: len(sites)]
        else PlacementConstraints(clusters=(name,)),
    ):
        assert {plan.clusters for plan in ask(pool, placement).plans} <= {(name,)}
    for plan in ask(pool, PlacementConstraints(data_owners=(f"owner-{name}",))).plans:
        for replica in range(plan.dp):
            stages = plan.pipeline(replica)
            assert {stages[0].cluster, stages[-1].cluster} == {name}
    for plan in ask(pool, PlacementConstraints(max_chips=2)).plans:
        assert sum(stage.num_chips for stage in plan.stages) <= 2


@settings(max_examples=5, deadline=None)
@given(sites, links)
def test_the_same_question_has_the_same_answer(sites, links):
    """Nothing depends on chance, clocks or the order of sets."""
    one, two = ask(make_pool(sites, **links)), ask(make_pool(sites, **links))
    assert one.plans == two.plans


@settings(max_examples=10, deadline=None)
@given(sites, links)
def test_objectives_find_what_they_ask_for(sites, links):
    """The cheapest plan is not dearer than the fastest; no plan of a Pareto front beats another in all."""
    pool = make_pool(sites, **links)
    fastest, cheapest = ask(pool).plans[:1], ask(pool, objective="cost").plans[:1]
    for a, b in zip(cheapest, fastest, strict=True):
        assert a.predicted.cost_per_iteration <= b.predicted.cost_per_iteration * 1.0001
    front = ask(pool, objective="pareto").scored
    values = [(one.time_s, one.cost, one.energy_j) for one in front]
    for a in values:
        assert not any(all(x <= y for x, y in zip(b, a, strict=True)) and b != a for b in values)


def test_a_search_that_is_stopped_returns_the_best_so_far():
    """`should_continue` ends the search: what was found is simulated and returned, and not called optimal."""
    pool = make_pool([{"count": 4, "flops": 1e14, "memory_gb": 6.0, "price": 1.0}] * 3, gbps=40, round_trip_ms=5)
    whole = ask(pool)
    stopped = ask(pool, should_continue=lambda tally, best: best is None)
    assert stopped.plans
    assert stopped.evaluated < whole.evaluated
    assert not stopped.optimal
    assert best_s(stopped) >= best_s(whole) * (1 - 1e-9)


def test_a_search_leaves_nothing_to_the_cyclic_collector():
    """Its pipelines, cost tables and simulations form no cycles: collecting them took a tenth of its time."""
    pool = make_pool([{"count": 4, "flops": 1e14, "memory_gb": 6.0, "price": 1.0}] * 3, gbps=40, round_trip_ms=5)
    ask(pool)  # caches that stay are filled
    gc.collect()
    with collection_paused():
        ask(pool)
        assert gc.collect() < 100


def test_fixed_degrees_bind_every_plan():
    """Pinned degrees are kept, and refused where they are impossible."""
    pool = make_pool([{"count": 4, "flops": 1e14, "memory_gb": 8.0, "price": 1.0}], gbps=40, round_trip_ms=5)
    limits = SearchLimits(tp=2, pp=2, schedule="gpipe", micro_batch_size=2)
    for plan in ask(pool, limits=limits).plans:
        assert {stage.tp for stage in plan.stages} == {2}
        assert (len(plan.stages), plan.schedule, plan.micro_batch_size) == (2, "gpipe", 2)
    with pytest.raises(PlanError):
        ask(pool, limits=dataclasses.replace(limits, pp=7))


def test_planning_near_old_plans_is_quicker_and_keeps_to_their_branches():
    """Fewer pipelines are split; with nothing changed the same best plan is found."""
    pool = make_pool([{"count": 4, "flops": 1e14, "memory_gb": 6.0, "price": 1.0}] * 3, gbps=40, round_trip_ms=5)
    whole = ask(pool)
    again = ask(pool, warm_start=whole.layouts)
    assert again.plans[0].predicted.iteration_s == pytest.approx(whole.plans[0].predicted.iteration_s, rel=1e-3)
    assert again.evaluated < whole.evaluated
    assert not again.optimal
