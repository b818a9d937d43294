"""The closed form of an iteration and its band, by hand, and the parameters that they depend on."""

from __future__ import annotations

import math

import pytest

from isthmus.core.plan import Plan
from isthmus.plan import estimate_s, predict, profile_model
from isthmus.plan.time.calibration import DATA_SHEET, Calibration, ChipRates, FittedParameter
from isthmus.plan.time.plan_links import simulated_links
from isthmus.plan.time.predict import (
    parameter_effects,
    relative_uncertainty,
    used_parameter_keys,
)
from isthmus.plan.time.replica_reduction import replicas_all_reduce_s
from isthmus.plan.time.stage_costs import stage_costs
from tests.plan.hand import model_of, plan_of, pool_of

MODEL = model_of()
PROFILE = profile_model(MODEL)


def uneven(**fields: object) -> Plan:
    """Two replicas over two clusters, the second with half of the micro-batches."""
    return plan_of(clusters="ab", dp=2, micro_batches=8, replica_micro_batches=(4, 8), **fields)


def test_an_estimate_is_a_pipeline_and_the_longest_end_of_a_step() -> None:
    """Pace and filling by the slowest stage or round trip (1F1B); then the update and reduction of a stage; the
    slowest replica.
    """
    pool = pool_of("A100", "H20")
    for fields in ({}, {"schedule": "interleaved", "chunks": 2, "layers": 8}):
        plan = uneven(**fields)
        first, second = stage_costs(plan, pool, PROFILE, DATA_SHEET, 1)
        wire = simulated_links(plan, pool, DATA_SHEET)["a", "b"]
        hop_s = wire.delay_s + first.load.boundary_bytes / wire.bytes_per_s
        passes = [one.load.forward_s + one.load.backward_s for one in (first, second)]
        round_s = sum(passes) + 2 * hop_s
        pace_s = max(*passes, round_s / 2)
        ends = [
            one.load.update_s + replicas_all_reduce_s(one.reducing, one.load.gradient_bytes) for one in (first, second)
        ]
        expected_s = 8 * pace_s + (round_s - pace_s) / (2 if fields else 1) + max(ends)
        assert estimate_s(plan, pool, MODEL) == pytest.approx(expected_s, rel=1e-12)
        assert estimate_s(plan, pool, PROFILE) == estimate_s(plan, pool, MODEL)


def test_a_replica_alone_reduces_nothing_and_hops_inside_a_cluster() -> None:
    """The time of the message is the stage's own."""
    pool, plan = pool_of("A100"), plan_of(clusters="aa")
    first, second = stage_costs(plan, pool, PROFILE, DATA_SHEET)
    passes = [one.load.forward_s + one.load.backward_s for one in (first, second)]
    round_s = sum(passes) + 2 * first.load.hop_s
    pace_s = max(*passes, round_s / 2)
    ends = max(one.load.update_s for one in (first, second))
    assert estimate_s(plan, pool, MODEL) == pytest.approx(8 * pace_s + round_s - pace_s + ends, rel=1e-12)


def doubtful(correlation: float = 0.0) -> Calibration:
    """Step time and launches in doubt, all else that a plan on A100 uses certain."""
    keys = used_parameter_keys(plan_of(clusters="a"), pool_of("A100"), DATA_SHEET)
    parameters = {key: FittedParameter(value=DATA_SHEET.key_value(key), relative=0.0) for key in keys}
    parameters |= {
        "step_s": FittedParameter(value=0.5, relative=0.25), "launch_s": FittedParameter(value=0.02, relative=0.5)
    }  # fmt: skip
    return Calibration(
        name="d", source="s", parameters=parameters, residual=0.125,
        correlations={"step_s": {"launch_s": correlation}} if correlation else {},
    )  # fmt: skip


def test_effects_are_those_of_one_standard_deviation() -> None:
    """Of the uncertain parameters alone: the logarithm of the time with each larger by its own, over that without."""
    pool, plan = pool_of("A100"), plan_of(clusters="a")
    base_s = estimate_s(plan, pool, PROFILE, doubtful())
    effects = dict(parameter_effects(plan, pool, PROFILE, doubtful()))
    assert set(effects) == {"step_s", "launch_s"}
    assert effects["step_s"] == pytest.approx(math.log((base_s + 0.5 * (math.exp(0.25) - 1)) / base_s))
    slower_s = estimate_s(plan, pool, PROFILE, doubtful().with_values({"launch_s": 0.02 * math.exp(0.5)}))
    assert effects["launch_s"] == pytest.approx(math.log(slower_s / base_s))


@pytest.mark.parametrize("correlation", [0.0, 0.5, -1.0])
def test_a_band_adds_effects_in_squares_and_by_their_correlation(correlation: float) -> None:
    """a^2 + b^2 + 2 r a b beside the scatter, and never less than the scatter; at 90 % 1.645 deviations each way."""
    pool, plan = pool_of("A100"), plan_of(clusters="a")
    known = doubtful(correlation)
    a, b = dict(parameter_effects(plan, pool, PROFILE, known)).values()
    total = math.sqrt(0.125**2 + a * a + b * b + 2 * correlation * a * b)
    assert relative_uncertainty(plan, pool, PROFILE, known) == pytest.approx(total)
    made = predict(plan, pool, PROFILE, known)
    assert math.log(made.high_s / made.iteration_s) == pytest.approx(1.645 * total)
    assert math.log(made.iteration_s / made.low_s) == pytest.approx(1.645 * total)


def test_effects_that_cancel_leave_the_scatter() -> None:
    """Three that each undo the others, which no fit would find: no root of a negative number."""
    keys = ("bias_factor", "stack_factor", "launch_s")
    parameters = doubtful().parameters | {
        key: FittedParameter(value=doubtful().key_value(key), relative=0.125) for key in keys
    }
    parameters |= {key: one.model_copy(update={"relative": 0.0}) for key, one in parameters.items() if key not in keys}
    rows = {keys[0]: {keys[1]: -1.0, keys[2]: -1.0}, keys[1]: {keys[2]: -1.0}}
    known = Calibration(name="d", source="s", parameters=parameters, residual=0.125, correlations=rows)
    pool, plan = pool_of("A100"), plan_of(clusters="a")
    a, b, c = dict(parameter_effects(plan, pool, PROFILE, known)).values()
    assert a * a + b * b + c * c < 2 * (a * b + b * c + a * c)
    assert relative_uncertainty(plan, pool, PROFILE, known) == pytest.approx(0.125)


CHIP_NAMES = [name for name in ChipRates.__dataclass_fields__ if name not in ("narrow_factor", "context_factor")]


def test_a_prediction_uses_the_parameters_of_its_chips_stack_and_links() -> None:
    """Those of narrow products and shared sequences only where it has them; each key once, the chip's own first."""
    pool, alone = pool_of("A100", "H20"), plan_of(clusters="a")
    assert used_parameter_keys(alone, pool, DATA_SHEET) == (*CHIP_NAMES, "stack_factor", "shape_time")
    narrow = used_parameter_keys(plan_of(clusters="a", precision="fp8"), pool, DATA_SHEET)
    assert set(narrow) - set(CHIP_NAMES) == {"narrow_factor", "stack_factor", "shape_time"}
    shared = used_parameter_keys(plan_of(clusters="aa", cp=2), pool, DATA_SHEET)
    assert set(shared) - set(CHIP_NAMES) == {"context_factor", "stack_factor", "shape_time"}
    both = used_parameter_keys(plan_of(clusters="ab"), pool, DATA_SHEET)
    assert both == (*CHIP_NAMES, "stack_factor", "shape_time", "wan_share", "message_s")
    fields = {"a>b/message_s": 1.0, "b<>a/wan_share": 1.0, "H20/skew_s": 1.0, "megatron/stack_factor": 1.0}
    known = DATA_SHEET.with_values(fields)
    own = set(used_parameter_keys(plan_of(clusters="ab", stack="megatron"), pool, known))
    assert set(fields) <= own
    assert {"message_s", "skew_s"} <= own
    assert "megatron/stack_factor" not in used_parameter_keys(plan_of(clusters="ab"), pool, known)
    assert "wan_share" not in own
    returning = used_parameter_keys(plan_of(clusters="aa", dp=2), pool, known)
    assert not any("message" in key or "wan" in key for key in returning)


def test_measured_shapes_count_where_chip_and_tokens_are_the_plan_s() -> None:
    """2 x 2,048 tokens over two chips of a sequence, of any of its parts; those of others do not."""
    pool = pool_of("A100", "H20")
    used = ["A100:h8:n2048:tp1/shape_time", "A100:h2048:n2048:v9/head_time"]
    others = ["A100:h2048:n4096:tp1/shape_time", "H20:h2048:n2048:tp1/shape_time", "A100:h1:n20480:tp1/shape_time"]
    known = DATA_SHEET.with_values(dict.fromkeys([*used, *others], 1.0))
    keys = used_parameter_keys(plan_of(clusters="a", cp=2, micro_batch_size=2), pool, known)
    assert [key for key in keys if ":" in key] == used
