"""Rules of the planner's first version."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isthmus.core.job import CheckpointConfig, DataConfig, Job, PlacementConstraints, TrainingConfig
from isthmus.core.model import load_model
from isthmus.core.pool import Pool
from isthmus.plan import make_plans
from isthmus.schedule import check_schedule, make_schedule

pytestmark = pytest.mark.integration

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 260,
    "hidden_size": 160,
    "intermediate_size": 448,
    "num_hidden_layers": 8,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    file = tmp_path_factory.mktemp("model") / "config.json"
    file.write_text(json.dumps(CONFIG))
    return load_model(file)


def job(placement=None, **training):
    fields = {"steps": 1, "sequence_length": 128, "global_batch_size": 16, "precision": "fp32"} | training
    return Job(
        name="j",
        model="m",
        data=DataConfig(paths=("x",)),
        training=TrainingConfig(**fields),
        checkpoints=CheckpointConfig(folder="c"),
        output="o",
        placement=placement or PlacementConstraints(),
    )


def pool(sizes=None, *, memory=1e-3, gbps=1.0, round_trip_ms=20.0, links=None, chips=None, owners=None):
    """A pool of clusters a, b, c... with H20s a thousand times slower, joined each to each."""
    sizes = sizes or {"a": 1, "b": 1, "c": 1}
    names = list(sizes)
    pairs = [[x, y] for i, x in enumerate(names) for y in names[i + 1 :]] if links is None else links
    return Pool.model_validate(
        {
            "clusters": [
                {
                    "name": name,
                    "owner": (owners or {}).get(name, f"owner-{name}"),
                    "node_groups": [
                        {
                            "name": "g",
                            "chip": (chips or {}).get(name, "H20"),
                            "nodes": 1,
                            "chips_per_node": count,
                            "virtual": {"compute_scale": 1.6e-3, "memory_scale": memory},
                        }
                    ],
                }
                for name, count in sizes.items()
            ],
            "links": [{"between": pair, "bandwidth_gbps": gbps, "round_trip_ms": round_trip_ms} for pair in pairs],
        }
    )


def reasons(plans):
    return {one.clusters: one.reason for one in plans.refused}


def test_a_job_that_no_single_cluster_can_hold_gets_plans_across_clusters(model):
    """Every smaller combination is refused with its reason, in bytes; at least two candidates remain."""
    plans = make_plans(job(), model, pool(memory=2.4e-4))
    assert len(plans.plans) >= 2
    assert all(len(plan.clusters) == 3 for plan in plans.plans)
    assert set(reasons(plans)) == {("a",), ("b",), ("c",), ("a", "b"), ("a", "c"), ("b", "c")}
    assert all("too little memory" in reason and "MiB" in reason for reason in reasons(plans).values())


def test_plans_come_fastest_first_and_say_what_bounds_them(model):
    """The order is that of the predicted iteration; each has a reason, its memory and its WAN demand."""
    plans = make_plans(job(), model, pool({"a": 2, "b": 2})).plans
    times = [plan.predicted.iteration_s for plan in plans]
    assert times == sorted(times)
    for plan in plans:
        assert "is the slowest" in plan.why
        assert len(plan.predicted.peak_memory_bytes) == len(plan.stages)
        assert len(plan.predicted.wan_gbps) == len(plan.all_hops())
        assert plan.predicted.assumptions


def test_a_fast_link_lets_more_chips_pay_a_slow_one_does_not(model):
    """At no distance the best plan uses both clusters; at a second's round trip it stays in one."""
    near = make_plans(job(), model, pool({"a": 2, "b": 2}, round_trip_ms=0)).plans[0]
    far = make_plans(job(), model, pool({"a": 2, "b": 2}, round_trip_ms=1000)).plans[0]
    assert len(near.clusters) == 2
    assert len(far.clusters) == 1


@pytest.mark.parametrize(
    ("arguments", "placement", "clusters", "words"),
    [
        ({"links": []}, {}, ("a", "b"), "no link from a to b"),
        ({}, {"several_owners": False}, ("a", "b"), "several owners"),
        ({}, {"max_chips": 1}, ("a", "b"), "at most 1 chips"),
        ({"chips": {"b": "L40S"}}, {"chips": ("H20",)}, ("b",), "no free chip that the job allows"),
        ({"chips": {"b": "L40S"}}, {"mixed_chips": False}, ("a", "b"), "does not allow mixed chips"),
        ({"gbps": 1e-4}, {}, ("a", "b"), "the pipeline needs"),
        ({"memory": 1e-5}, {}, ("a", "b"), "too little memory"),
    ],
)
def test_every_refused_combination_says_why(model, arguments, placement, clusters, words):
    """The reason names what is missing."""
    plans = make_plans(job(PlacementConstraints(**placement)), model, pool({"a": 1, "b": 1}, **arguments))
    assert words in reasons(plans)[clusters]


def test_clusters_outside_the_placement_are_not_considered(model):
    """`placement.clusters` and `placement.owners` bound the choice."""
    allowed = make_plans(job(PlacementConstraints(clusters=("a",))), model, pool())
    assert {plan.clusters for plan in allowed.plans} == {("a",)}
    owned = make_plans(job(PlacementConstraints(owners=("owner-b",))), model, pool())
    assert {plan.clusters for plan in owned.plans} == {("b",)}


@pytest.mark.parametrize("round_trip_ms", [0, 1000])
def test_the_site_that_gets_the_model_takes_part_in_every_plan(model, round_trip_ms):
    """`output_site` is in each plan, near or far; combinations without it say why they are refused."""
    asked = job().model_copy(update={"output_site": "b"})
    plans = make_plans(asked, model, pool({"a": 2, "b": 1, "c": 2}, round_trip_ms=round_trip_ms))
    assert plans.plans
    assert all("b" in plan.clusters for plan in plans.plans)
    assert "b, which gets the model (output_site), takes no part" in reasons(plans)[("a",)]
    taken = make_plans(asked, model, pool({"a": 2, "b": 1}), {"a": {"g": 2}, "b": {"g": 0}})
    assert not taken.plans
    assert "b has no free chip" in reasons(taken)[("b",)]


def test_only_free_chips_are_planned_on(model):
    """A cluster whose chips are taken is refused; one with a single free chip gets a single stage."""
    plans = make_plans(job(), model, pool({"a": 2, "b": 2}), {"a": {"g": 1}, "b": {"g": 0}})
    assert all([stage.cluster for stage in plan.stages] == ["a"] for plan in plans.plans)
    assert "b has no free chip" in reasons(plans)[("b",)]


@pytest.mark.slow
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(st.sampled_from("abc"), st.integers(1, 3), min_size=1),
    st.floats(2e-4, 2e-3),
    st.floats(0.01, 10),
    st.floats(0, 100),
    st.sampled_from(["H20", "BI-V150"]),
)
def test_every_plan_fits_its_chips_and_passes_the_schedule_checker(model, sizes, memory, gbps, rtt, other):
    """Memory within each chip, layers complete, schedule sound, and no more chips than there are."""
    where = pool(sizes, memory=memory, gbps=gbps, round_trip_ms=rtt, chips={"a": other})
    for plan in make_plans(job(), model, where).plans:
        assert plan.num_layers == model.num_layers
        check_schedule(make_schedule(plan.schedule, len(plan.stages), plan.micro_batches))
        for part in plan.parts():
            assert part.chips["g"] <= sizes[part.cluster]
        for stage, peak in zip(plan.stages, plan.predicted.peak_memory_bytes, strict=True):
            group = where.cluster(stage.cluster).group(stage.node_group)
            assert peak <= where.chip(group).memory_bytes


@pytest.mark.slow
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.permutations(["a", "b", "c"]))
def test_the_order_of_clusters_in_the_pool_changes_nothing(model, order):
    """Relabelling and reordering give the same predicted times."""
    usual = make_plans(job(), model, pool(chips={"c": "BI-V150"}))
    other = make_plans(job(), model, pool(dict.fromkeys(order, 1), chips={"c": "BI-V150"}))
    assert [p.predicted.iteration_s for p in usual.plans] == [p.predicted.iteration_s for p in other.plans]


def test_the_same_question_has_the_same_answer(model):
    """Plan ids name what a plan is, so that a plan chosen once can be found again."""
    one, two = make_plans(job(), model, pool()), make_plans(job(), model, pool())
    assert one == two
    assert json.loads(one.model_dump_json())["plans"][0]["id"].startswith("plan-")
