"""Of which parts a predicted time consists, and what a forecast says of itself."""

import math

import pytest

from isthmus.core.errors import FileError, InputError
from isthmus.core.link_throughput import effective_bytes_per_s
from isthmus.core.plan import Plan, StageTime
from isthmus.plan import DATA_SHEET, estimate_s, pipeline_bounds, predict, profile_model
from isthmus.plan.time.calibration import Calibration, FittedParameter, load_calibration, save_calibration
from isthmus.plan.time.collectives import (
    NETWORK_HOP_S,
    NODE_HOP_S,
    Topology,
    all_gather_s,
    all_reduce_bytes_per_s,
    all_reduce_s,
    all_to_all_s,
    send_s,
)
from isthmus.plan.time.fit_plan import OverfullStage, fitting_changes, overfull_stages
from isthmus.plan.time.one_f_one_b_estimate import iteration_estimate_s, micro_batch_interval_s
from isthmus.plan.time.plan_links import simulated_links
from isthmus.plan.time.predict import relative_uncertainty, used_parameter_keys
from isthmus.plan.time.replica_schedules import first_equal_replicas
from isthmus.plan.time.stage_costs import stage_costs
from isthmus.plan.time.time_model_parameters import shape_scope, vocabulary_scope
from tests.plan.hand import model_of, plan_of, pool_of

MODEL = model_of()
PROFILE = profile_model(MODEL)
NODE = Topology(
    chips_per_node=8,
    link_bytes_per_s=100e9,
    link_latency_s=30e-6,
    network_bytes_per_s=10e9,
    network_latency_s=50e-6,
)


def fitted(**values):
    """A calibration with values that are certain."""
    parameters = {key: FittedParameter(value=value, relative=0.0) for key, value in values.items()}
    return Calibration(name="fit", source="tests", parameters=parameters)


def test_small_collectives_over_two_nodes_take_their_steps_and_latencies():
    """16 chips, 8 a node: a tree in each node, one between the nodes; a gather has half the steps of a ring."""
    tree = 2 * 3 * NODE_HOP_S + 2 * 8 / 100e9
    between = 2 * NETWORK_HOP_S + 1 / 10e9
    assert all_reduce_s(NODE, 8, 16) == pytest.approx(30e-6 + tree + 50e-6 + between, rel=1e-9)
    inside = 30e-6 + 7 * NODE_HOP_S + 7 / 8 * 8 / 100e9
    outside = 50e-6 + NETWORK_HOP_S + 1 / 2 * 8 / 8 / 10e9
    assert all_gather_s(NODE, 8, 16) == pytest.approx(inside + outside, rel=1e-9)


def test_an_all_to_all_uses_both_links_at_once():
    """Of 16 chips 7 are in the same node, 8 in the other; the slower of the two counts."""
    assert all_to_all_s(NODE, 16e9, 16) == pytest.approx(50e-6 + 8e9 / 10e9, rel=1e-9)
    fast = Topology(**{**vars(NODE), "network_bytes_per_s": 1e12})
    assert all_to_all_s(fast, 16e9, 16) == pytest.approx(30e-6 + 7e9 / 100e9, rel=1e-9)
    assert all_to_all_s(NODE, 16e9, 4, stride=8) == pytest.approx(50e-6 + 12e9 / 10e9, rel=1e-9)


def test_one_chip_exchanges_nothing():
    """Its rate is without limit."""
    assert [fun(NODE, 1e9, 1) for fun in (all_reduce_s, all_gather_s, all_to_all_s)] == [0, 0, 0]
    assert all_reduce_bytes_per_s(NODE, 1) == math.inf
    assert all_reduce_bytes_per_s(NODE, 2) == pytest.approx(100e9, rel=1e-3)
    assert send_s(NODE, 1e9, same_node=True) == pytest.approx(30e-6 + 0.01)


@pytest.mark.parametrize(
    ("size", "stride", "tiers"),
    [(8, 1, (8, 1)), (9, 1, (8, 2)), (16, 2, (4, 4)), (2, 16, (1, 2)), (3, 4, (2, 2)), (1, 1, (1, 1))],
)
def test_a_group_spans_as_many_nodes_as_its_chips_need(size, stride, tiers):
    """Chips that are `stride` apart leave fewer of them in a node, at least one."""
    assert NODE.tiers(size, stride) == tiers


def test_the_pace_of_a_pipeline_is_its_slowest_stage_or_round_trip():
    """Three stages; two hops that are paid both ways; the last stage has one micro-batch in flight."""
    times = [StageTime(forward_s=1, backward_s=2), StageTime(forward_s=1, backward_s=3)]
    assert micro_batch_interval_s(times, [0.0]) == 4
    assert micro_batch_interval_s(times, [3.0]) == (3 + 4 + 6) / 2
    slow_first = [StageTime(forward_s=5, backward_s=5), StageTime(forward_s=1, backward_s=1)]
    assert micro_batch_interval_s(slow_first, [0.0]) == 10
    assert iteration_estimate_s(times, [3.0], 5) == 7 + 6 + 4 * 6.5
    assert iteration_estimate_s(times, [3.0], 1) == 13
    assert iteration_estimate_s(times, [3.0], 5, 2) == 5 * 6.5 + (13 - 6.5) / 2, "chunks halve filling and draining"


def test_equal_replicas_are_simulated_once():
    """Equal in stages, micro-batches and their size; the number of the replica is no difference."""
    assert first_equal_replicas(plan_of(clusters="ab", dp=3)) == (0, 0, 0)
    assert first_equal_replicas(plan_of(clusters="a", dp=3, replica_micro_batches=(8, 7, 8))) == (0, 1, 0)
    plan = plan_of(clusters="a", dp=2)
    other = plan.stages[1].model_copy(update={"tp": 2})
    assert first_equal_replicas(plan.model_copy(update={"stages": (plan.stages[0], other)})) == (0, 1)


def test_links_run_at_the_share_that_the_transport_reaches():
    """Both ways, between the plan's clusters only; a share of more than 1 is none; a message adds its time."""
    pool = pool_of("A100", "A100", "A100", round_trip_ms=20.0)
    plan = plan_of(clusters="ab")
    link = next(one for one in pool.links if (one.source, one.target) == ("a", "b"))
    back = next(one for one in pool.links if (one.source, one.target) == ("b", "a"))
    whole = effective_bytes_per_s(link, back)
    links = simulated_links(plan, pool, fitted(wan_share=0.5, **{"a>b/message_s": 0.25, "b>a/wan_share": 3.0}))
    assert set(links) == {("a", "b"), ("b", "a")}
    assert links["a", "b"].bytes_per_s == pytest.approx(0.5 * whole)
    assert links["b", "a"].bytes_per_s == pytest.approx(whole)
    assert links["a", "b"].delay_s - links["b", "a"].delay_s == pytest.approx(0.25)


def test_a_parameter_of_a_chip_goes_before_the_general_one():
    """Also for its uncertainty; new values keep it."""
    parameters = {
        "launch_s": FittedParameter(value=2.0, relative=0.2),
        "H20/launch_s": FittedParameter(value=3.0, relative=0.3),
    }
    made = Calibration(name="c", source="s", parameters=parameters)
    assert [made.value("launch_s", scope) for scope in ("", "H20", "A100")] == [2, 3, 2]
    assert [made.relative_uncertainty("launch_s", scope) for scope in ("", "H20", "A100")] == [0.2, 0.3, 0.2]
    assert (made.value("step_s"), made.relative_uncertainty("step_s", "H20")) == (0.01, 1.0)
    varied = made.with_values({"H20/launch_s": 5.0, "A100/step_s": 7.0})
    assert varied.parameters["H20/launch_s"] == FittedParameter(value=5.0, relative=0.3)
    assert varied.parameters["A100/step_s"] == FittedParameter(value=7.0, relative=1.0)
    assert made.parameters == parameters


def test_mistakes_in_a_calibration_are_named(tmp_path):
    """An unknown parameter with those that exist; a file that cannot be written; a run that it was fitted on."""
    with pytest.raises(ValueError, match=r"unknown parameter 'H20/speed'; known: matmul_share, attention_share"):
        Calibration(name="c", source="s", parameters={"H20/speed": FittedParameter(value=1, relative=0)})
    with pytest.raises(FileError, match="cannot be written") as raised:
        save_calibration(DATA_SHEET, tmp_path / "no" / "file")
    assert raised.value.file == str(tmp_path / "no" / "file")
    (tmp_path / "bad.yaml").write_text("version: 1\nname: c\nsource: s\nresidual: -1\n")
    with pytest.raises(FileError, match="residual"):
        load_calibration(tmp_path / "bad.yaml")
    seen = Calibration(name="c", source="s", fitted_on=("run",))
    seen.require_unseen("other")
    with pytest.raises(InputError) as told:
        seen.require_unseen("run")
    assert str(told.value) == (
        "calibration 'c' was fitted on 'run' (compare its predictions with other runs, or calibrate without this run)"
    )


def test_scopes_name_the_shape():
    """Chip, hidden size, rounded tokens, and tensor parallelism or vocabulary."""
    assert shape_scope("H20", 4096, 2047.6, 4) == "H20:h4096:n2048:tp4"
    assert vocabulary_scope("H20", 4096, 2047.6, 260) == "H20:h4096:n2048:v260"


def test_the_band_holds_the_uncertainty_of_what_the_plan_uses():
    """Links between its clusters, its chips, parts of its shape; without uncertainty only the residual is left."""
    pool, plan = pool_of("A100", "H20"), plan_of(clusters="ab")
    keys = used_parameter_keys(plan, pool, fitted(**{"H20/launch_s": 1.0, "a>b/wan_share": 1.0}))
    assert {"launch_s", "H20/launch_s", "a>b/wan_share", "wan_share", "message_s"} <= set(keys)
    assert len(keys) == len(set(keys))
    shapes = {
        "A100:h2048:n2048:tp1/shape_time": 1.0,
        "A100:h2048:n4096:tp1/shape_time": 1.0,
        "L40S:h2048:n2048:tp1/shape_time": 1.0,
    }
    assert set(used_parameter_keys(plan, pool, fitted(**shapes))) & set(shapes) == {"A100:h2048:n2048:tp1/shape_time"}
    alone = plan_of(clusters="a")
    assert not any("wan" in key for key in used_parameter_keys(alone, pool, DATA_SHEET))
    certain = fitted(**{key: DATA_SHEET.value(key) for key in used_parameter_keys(alone, pool, DATA_SHEET)})
    assert relative_uncertainty(alone, pool, PROFILE, certain) == pytest.approx(certain.residual)
    forecast = predict(alone, pool, PROFILE, certain)
    assert forecast.high_s / forecast.iteration_s == pytest.approx(math.exp(1.645 * certain.residual), rel=1e-3)
    assert forecast.low_s * forecast.high_s == pytest.approx(forecast.iteration_s**2)


def test_one_uncertain_parameter_widens_the_band_by_its_effect():
    """Its standard deviation, added in squares to the residual."""
    pool, alone = pool_of("A100"), plan_of(clusters="a")
    values = {key: DATA_SHEET.value(key) for key in used_parameter_keys(alone, pool, DATA_SHEET)}
    certain = fitted(**values)
    doubt = certain.model_copy(
        update={"parameters": certain.parameters | {"step_s": FittedParameter(value=0.01, relative=0.5)}}
    )
    base_s = estimate_s(alone, pool, PROFILE, certain)
    effect = math.log((base_s + 0.01 * (math.exp(0.5) - 1)) / base_s)
    assert relative_uncertainty(alone, pool, PROFILE, doubt) == pytest.approx(math.hypot(doubt.residual, effect))


def test_a_forecast_says_what_was_assumed():
    """The calibration and its source; local steps and the host's updates; too little memory, too few chips."""
    pool = pool_of("A100")
    assert predict(plan_of(clusters="a"), pool, PROFILE).assumptions == (
        "calibration 'data-sheet': no parameters fitted, from data sheets and the defaults of the time model",
        "balanced experts; gradients are reduced after the last backward",
    )
    assert predict(plan_of(clusters="a"), pool, PROFILE, fitted(launch_s=1.0)).assumptions[0] == (
        "calibration 'fit': 1 parameters fitted, from tests"
    )
    host = predict(plan_of(clusters="a", optimizer_on_host=True), pool, PROFILE).assumptions
    assert any(note.startswith("updates on the host: ") for note in host)
    long = predict(plan_of(clusters="a", sequence_length=1 << 20), pool, PROFILE).assumptions
    assert any(note.startswith("stage 0 needs ") and note.endswith("GB usable of A100's 85.0 GB") for note in long)
    many = predict(plan_of(clusters="a", dp=65), pool, PROFILE).assumptions
    assert many[-1] == "the plan uses 65 chips of a/g, which has 64"
    assert len(predict(plan_of(clusters="a", dp=64), pool, PROFILE).assumptions) == 2


def test_the_simulated_time_lies_between_the_closed_forms():
    """Not below the longest chain of operations, not above all of them one after another; of unlike replicas the
    longest counts.
    """
    pool = pool_of("A100", "L40S")
    for clusters in ("ab", "aabb"):
        plan = plan_of(clusters=clusters, micro_batches=4)
        bounds = pipeline_bounds(plan, pool, MODEL)
        assert 0 < bounds.critical_path_s <= predict(plan, pool, MODEL).iteration_s <= 1.01 * bounds.serial_s
    alone = [pipeline_bounds(plan_of(clusters=name, micro_batches=4), pool, MODEL) for name in "ab"]
    assert alone[0].critical_path_s < alone[1].critical_path_s


def test_forwards_ahead_hide_a_long_link_within_memory():
    """The warm-up of `overlapped` is chosen with the times of the plan; a plan that names one keeps it."""
    pool = pool_of("A100", "A100", round_trip_ms=60.0)
    names = ("1f1b", "overlapped")
    plain, early = (predict(plan_of(schedule=name, micro_batches=16), pool, MODEL).iteration_s for name in names)
    assert early < 0.95 * plain
    least = predict(plan_of(schedule="overlapped", micro_batches=16, warm_up=(2, 1)), pool, MODEL).iteration_s
    assert early < 0.95 * least
    assert least == pytest.approx(plain, rel=0.01)


def test_the_price_is_that_of_all_chips_for_an_iteration():
    """Cards of two chips count once for the rate per card."""
    pool = pool_of("BI-V150", price_per_chip_hour=36.0)
    plan = plan_of(clusters="a", dp=2, tp=2)
    forecast = predict(plan, pool, PROFILE)
    assert forecast.cost == pytest.approx(4 * 36.0 / 3600 * forecast.iteration_s)
    assert forecast.num_cards == 2
    assert forecast.tokens == 2 * 8 * 2048


def test_zero_exposes_what_it_cannot_hide():
    """ZeRO 3 gathers weights in both passes and cuts the update; ZeRO 1 sends gradients and half of the weights."""
    pool = pool_of("A100")
    costs = {zero: stage_costs(plan_of(clusters="aa", dp=4, zero=zero), pool, PROFILE, DATA_SHEET) for zero in range(4)}
    for index in range(2):
        plain, one, three = (costs[zero][index].load for zero in (0, 1, 3))
        assert one.gradient_bytes == pytest.approx(0.75 * plain.gradient_bytes)
        assert three.gradient_bytes == pytest.approx(0.5 * plain.gradient_bytes), "weights are gathered in each pass"
        step_s = DATA_SHEET.value("step_s")
        assert one.update_s - step_s == pytest.approx((plain.update_s - step_s) / 4)
        assert three.update_s == pytest.approx(one.update_s)
        assert three.forward_s >= plain.forward_s


def test_local_steps_send_the_averaged_parameters():
    """Four bytes each, and nothing of them where every step reduces gradients."""
    pool = pool_of("A100", "A100")
    every = stage_costs(plan_of(clusters="a", dp=2), pool, PROFILE, DATA_SHEET)
    assert [cost.load.averaged_bytes for cost in every] == [0]
    plan = plan_of(clusters="a", dp=3, tp=2)
    there = plan.stages[2].model_copy(update={"cluster": "b"})
    plan = Plan.model_validate(plan.model_dump() | {"stages": (*plan.stages[:2], there), "local_steps": 4})
    (cost,) = stage_costs(plan, pool, PROFILE, DATA_SHEET)
    assert cost.load.averaged_bytes == pytest.approx(4 * PROFILE.num_parameters, rel=1e-2)
    assert cost.num_reducing == 2, "the third averages with them"


def test_stages_that_do_not_fit_are_named_in_the_order_of_the_plan():
    """With what they need and what their chip has."""
    pool = pool_of("A100", "A100")
    plan = plan_of(clusters="ab", dp=2, sequence_length=1 << 18)
    stages = (plan.stages[0], plan.stages[2], plan.stages[1], plan.stages[3])
    plan = plan.model_copy(update={"stages": stages})
    forecast = predict(plan, pool, PROFILE)
    peaks = [run.peak_memory_bytes for run in forecast.result.stages]
    chip_bytes = pool.chip(pool.node_group("a", "g")).reported_bytes
    found = overfull_stages(plan, pool, forecast)
    in_plan_order = [peaks[0], peaks[2], peaks[1], peaks[3]]
    assert found == tuple(
        OverfullStage(stage=index, peak_bytes=peak, limit_bytes=0.95 * chip_bytes, chip_bytes=chip_bytes)
        for index, peak in enumerate(in_plan_order)
        if peak > 0.95 * chip_bytes
    )
    assert found
    assert overfull_stages(plan_of(clusters="ab"), pool, predict(plan_of(clusters="ab"), pool, PROFILE)) == ()


def test_changes_that_make_a_plan_fit_are_simulated():
    """Each that applies, and the first two together; those that do not apply or do not help are left out."""
    pool = pool_of("A100")
    plan = plan_of(clusters="aa", dp=2, micro_batch_size=4)
    names = [text for text, _ in fitting_changes(plan, pool, MODEL)]
    assert names == [
        "recompute: full in every stage",
        "optimizer_on_host: true",
        "zero: 1",
        "precision: fp32",
        "micro_batch_size: 2",
        "recompute: full in every stage and optimizer_on_host: true",
    ]
    changes = dict(fitting_changes(plan, pool, PROFILE))
    halved = plan.model_copy(update={"micro_batch_size": 2, "micro_batches": 16})
    assert changes["micro_batch_size: 2"] == predict(halved, pool, PROFILE).iteration_s
    done = plan_of(clusters="aa", recompute="full", optimizer_on_host=True, precision="fp32", zero=0)
    assert [text for text, _ in fitting_changes(done, pool, MODEL)] == ["precision: bf16"]
    large = plan_of(clusters="aa", sequence_length=1 << 22)
    assert fitting_changes(large, pool, MODEL) == ()
