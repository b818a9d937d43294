"""Which changes are tried to make a plan fit, and which stages exceed their chips, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isthmus.core.plan import Plan
from isthmus.core.plan_parts.tensor_formats import TensorFormats
from isthmus.plan.profile.model_profile import profile_model
from isthmus.plan.time.fit_plan import OverfullStage, fitting_changes, overfull_stages
from isthmus.plan.time.predict import predict
from tests.plan.hand import model_of, plan_of, pool_of

POOL = pool_of("A100", "H20")
PROFILE = profile_model(model_of())


def assert_tried(plan: Plan, expected: dict[str, dict[str, object]]) -> None:
    """These changes are tried, each with the seconds of a plan whose fields are so."""
    seconds = tuple(
        (text, predict(Plan.model_validate(plan.model_dump() | fields), POOL, PROFILE).iteration_s)
        for text, fields in expected.items()
    )
    assert fitting_changes(plan, POOL, PROFILE) == seconds


def names(plan: Plan) -> set[str]:
    """The first words of the single changes."""
    return {text.partition(":")[0] for text, _ in fitting_changes(plan, POOL, PROFILE) if " and " not in text}


def recomputed(plan: Plan) -> tuple[dict[str, object], ...]:
    """Its stages with all layers recomputed."""
    return tuple(stage.model_dump() | {"recompute": "full", "recompute_layers": None} for stage in plan.stages)


def test_each_change_alone_and_the_first_two_together() -> None:
    """Recompute all, update on the host, shard the optimizer, the other precision, half a micro-batch."""
    plan = plan_of(clusters="aa", dp=2, micro_batch_size=4)
    full = {"stages": recomputed(plan)}
    expected = {
        "recompute: full in every stage": full,
        "optimizer_on_host: true": {"optimizer_on_host": True},
        "zero: 1": {"zero": 1},
        "precision: fp32": {"precision": "fp32"},
        "micro_batch_size: 2": {"micro_batch_size": 2, "micro_batches": 16},
        "recompute: full in every stage and optimizer_on_host: true": full | {"optimizer_on_host": True},
    }
    assert_tried(plan, expected)


@pytest.mark.parametrize(
    ("fields", "gone"),
    [
        ({"recompute": "full"}, "recompute"), ({"optimizer_on_host": True}, "optimizer_on_host"),
        ({"zero": 2}, "zero"), ({"dp": 1}, "zero"), ({"micro_batch_size": 3}, "micro_batch_size"),
        ({"replica_micro_batches": (4, 4), "micro_batches": 4}, "micro_batch_size"),
        ({"replica_micro_batch_sizes": (4, 2)}, "micro_batch_size"),
    ],
)  # fmt: skip
def test_what_a_plan_has_already_is_not_tried(fields: dict[str, object], gone: str) -> None:
    """Nor what its replicas do not allow: halves of micro-batches that each has a number or size of its own for."""
    tried = names(plan_of(clusters="aa", **({"dp": 2, "micro_batch_size": 4} | fields)))
    assert {"recompute", "optimizer_on_host", "zero", "precision", "micro_batch_size"} - tried == {gone}


def test_layers_that_are_kept_may_still_be_recomputed() -> None:
    """A plan that recomputes some layers of a stage; fp32 and tf32 may become bf16; one change has no pair."""
    some = plan_of(clusters="aa", recompute="full", recompute_layers=2, optimizer_on_host=True)
    both = {"stages": recomputed(some)}, {"precision": "fp32"}
    texts = "recompute: full in every stage", "precision: fp32"
    assert_tried(some, dict(zip((*texts, " and ".join(texts)), (*both, both[0] | both[1]), strict=True)))
    for precision, other in (("fp32", "bf16"), ("tf32", "bf16"), ("bf16", "fp32"), (None, "fp32"), ("fp8", "fp32")):
        done = plan_of(clusters="aa", recompute="full", optimizer_on_host=True, precision=precision)
        assert_tried(done, {f"precision: {other}": {"precision": other}})


def test_changes_that_are_refused_or_do_not_fit_are_left_out() -> None:
    """Scales for each row have no products in fp32; of a long sequence, recomputation alone makes room."""
    rows = plan_of(
        clusters="aa", recompute="full", optimizer_on_host=True, precision="fp8", stack="torchtitan",
        formats=TensorFormats(scales="row"), micro_batch_size=2,
    )  # fmt: skip
    assert_tried(rows, {"micro_batch_size: 1": {"micro_batch_size": 1, "micro_batches": 16}})
    long = plan_of(clusters="aa", sequence_length=1 << 17, micro_batches=2)
    full = {"stages": recomputed(long)}
    assert_tried(
        long,
        {
            "recompute: full in every stage": full,
            "recompute: full in every stage and optimizer_on_host: true": full | {"optimizer_on_host": True},
        },
    )


def test_a_stage_is_overfull_beyond_what_its_allocator_may_reserve() -> None:
    """Not at that limit; in the order of the plan, where the simulation lists replica by replica."""
    plan = plan_of(clusters="ab", dp=2)
    mixed = Plan.model_validate(plan.model_dump() | {"stages": [plan.stages[at] for at in (2, 0, 1, 3)]})
    chips = [POOL.chip(POOL.node_group(name, "g")) for name in "ab"]
    sizes = [chip.reported_bytes or chip.memory_bytes for chip in chips]
    limits = [size - 0.05 * size for size in sizes]
    forecast = predict(mixed, POOL, PROFILE)
    peaks = (limits[0] + 3, limits[1] + 4, limits[0] + 1, limits[1])
    runs = tuple(replace(run, peak_memory_bytes=peak) for run, peak in zip(forecast.result.stages, peaks, strict=True))
    overfull = replace(forecast, result=replace(forecast.result, stages=runs))
    assert overfull_stages(mixed, POOL, overfull) == (
        OverfullStage(stage=0, peak_bytes=limits[0] + 1, limit_bytes=limits[0], chip_bytes=sizes[0]),
        OverfullStage(stage=1, peak_bytes=limits[0] + 3, limit_bytes=limits[0], chip_bytes=sizes[0]),
        OverfullStage(stage=2, peak_bytes=limits[1] + 4, limit_bytes=limits[1], chip_bytes=sizes[1]),
    )
