"""Which changes are tried to make a plan fit, and which stages exceed their chips, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isthmus.core.errors import PlanError
from isthmus.core.plan import Plan
from isthmus.plan.profile.model_profile import profile_model
from isthmus.plan.time import fit_plan as module
from isthmus.plan.time.fit_plan import OverfullStage, fitting_changes, overfull_stages
from isthmus.plan.time.predict import PlanForecast, predict
from tests.plan.hand import model_of, plan_of, pool_of

POOL = pool_of("A100", "H20")
PROFILE = profile_model(model_of())


def changes(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, object]]:
    """The changes that are tried: by their text, the fields of a plan that differ."""
    tried: list[Plan] = []

    def kept(changed: Plan, _pool: object, profile: object) -> PlanForecast:
        assert profile is PROFILE
        tried.append(changed)
        return predict(plan_of(clusters="a"), POOL, PROFILE)

    with monkeypatch.context() as patch:
        patch.setattr(module, "predict", kept)
        patch.setattr(module, "overfull_stages", lambda *_: ())
        texts = [text for text, _ in fitting_changes(plan, POOL, PROFILE)]
    before = plan.model_dump()
    fields = [{key: value for key, value in one.model_dump().items() if value != before[key]} for one in tried]
    return dict(zip(texts, fields, strict=True))


def recomputed(plan: Plan) -> tuple[dict[str, object], ...]:
    """Its stages with all layers recomputed."""
    return tuple(stage.model_dump() | {"recompute": "full", "recompute_layers": None} for stage in plan.stages)


def test_each_change_alone_and_the_first_two_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recompute all, update on the host, shard the optimizer, the other precision, half a micro-batch."""
    plan = plan_of(clusters="aa", dp=2, micro_batch_size=4)
    full = {"stages": recomputed(plan)}
    assert changes(plan, monkeypatch) == {
        "recompute: full in every stage": full,
        "optimizer_on_host: true": {"optimizer_on_host": True},
        "zero: 1": {"zero": 1},
        "precision: fp32": {"precision": "fp32"},
        "micro_batch_size: 2": {"micro_batch_size": 2, "micro_batches": 16},
        "recompute: full in every stage and optimizer_on_host: true": full | {"optimizer_on_host": True},
    }


@pytest.mark.parametrize(
    ("fields", "gone"),
    [
        ({"recompute": "full"}, "recompute"), ({"optimizer_on_host": True}, "optimizer_on_host"),
        ({"zero": 2}, "zero"), ({"dp": 1}, "zero"), ({"micro_batch_size": 3}, "micro_batch_size"),
        ({"replica_micro_batches": (4, 4), "micro_batches": 4}, "micro_batch_size"),
        ({"replica_micro_batch_sizes": (4, 2)}, "micro_batch_size"),
    ],
)  # fmt: skip
def test_what_a_plan_has_already_is_not_tried(
    fields: dict[str, object], gone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor what its replicas do not allow: halves of micro-batches that each has a number or size of its own for."""
    tried = changes(plan_of(clusters="aa", **({"dp": 2, "micro_batch_size": 4} | fields)), monkeypatch)
    single = {text.partition(":")[0] for text in tried if " and " not in text}
    assert {"recompute", "optimizer_on_host", "zero", "precision", "micro_batch_size"} - single == {gone}


def test_layers_that_are_kept_may_still_be_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that recomputes some layers of a stage; fp32 and tf32 may become bf16; one change has no pair."""
    some = plan_of(clusters="aa", recompute="full", recompute_layers=2)
    assert changes(some, monkeypatch)["recompute: full in every stage"] == {"stages": recomputed(some)}
    for precision, other in (("fp32", "bf16"), ("tf32", "bf16"), ("bf16", "fp32"), (None, "fp32"), ("fp8", "fp32")):
        done = plan_of(clusters="aa", recompute="full", optimizer_on_host=True, precision=precision)
        assert changes(done, monkeypatch) == {f"precision: {other}": {"precision": other}}


def test_changes_that_do_not_fit_or_are_refused_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is judged as it was simulated, with the seconds of its step."""
    forecast = predict(plan_of(clusters="a"), POOL, PROFILE)

    def judged(changed: Plan, _pool: object, _profile: object) -> PlanForecast:
        if changed.optimizer_on_host:
            raise PlanError("no", hint="no")
        return forecast

    full = OverfullStage(stage=0, peak_bytes=2, limit_bytes=1, chip_bytes=1)
    monkeypatch.setattr(module, "predict", judged)
    monkeypatch.setattr(
        module, "overfull_stages",
        lambda changed, pool, seen: (full,) if changed.zero or pool is not POOL or seen is not forecast else (),
    )  # fmt: skip
    found = fitting_changes(plan_of(clusters="aa", dp=2, recompute="full"), POOL, PROFILE)
    assert found == (("precision: fp32", forecast.iteration_s),)


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
