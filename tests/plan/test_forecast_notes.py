"""What a forecast says of its assumptions, word by word."""

from __future__ import annotations

import pytest

from isthmus.core.plan import Plan
from isthmus.core.pool import Pool
from isthmus.core.stack import find_stack
from isthmus.plan import DATA_SHEET, predict, profile_model
from isthmus.plan.time.calibration import Calibration
from isthmus.plan.time.predict import host_update_note, local_steps_note
from isthmus.sim import Interference
from tests.plan.hand import model_of, plan_of, pool_of
from tests.plan.round_numbers import calibration_of

PROFILE = profile_model(model_of())
POOL = pool_of("A100", "A100", "A100")
USUAL = (
    "calibration 'data-sheet': no parameters fitted, from data sheets and the defaults of the time model",
    "balanced experts; gradients are reduced after the last backward",
)


def notes(plan: Plan, pool: Pool = POOL, calibration: Calibration = DATA_SHEET, **options: object) -> tuple[str, ...]:
    """The assumptions beyond the usual two."""
    told = predict(plan, pool, PROFILE, calibration, **options).assumptions  # type: ignore[arg-type]
    assert told[1] == USUAL[1]
    return told[2:] if told[0] == USUAL[0] else told


def test_a_plain_plan_has_the_usual_notes() -> None:
    """The calibration with the number of its fitted values and its source; how experts and gradients count."""
    assert notes(plan_of(clusters="a")) == ()
    known = calibration_of(launch_s=1e-3, step_s=0.01)
    assert notes(plan_of(clusters="a"), calibration=known)[0] == (
        "calibration 'by-hand': 2 parameters fitted, from tests"
    )


def test_local_steps_and_the_host_s_updates_are_assumptions() -> None:
    """How many groups average how often; the rates to and in the host."""
    stages = plan_of(clusters="a", dp=3).stages
    apart = [stages[0], stages[1].model_copy(update={"cluster": "b"}), stages[2].model_copy(update={"cluster": "b"})]
    plan = Plan.model_validate(plan_of(clusters="a", dp=3).model_dump() | {"stages": apart, "local_steps": 4})
    assert notes(plan) == (local_steps_note(plan),)
    assert local_steps_note(plan) == (
        "2 groups of replicas average their parameters every 4 steps: times and bytes are means per step, without the "
        "outer update; convergence differs from that of a reduction every step"
    )
    assert notes(plan_of(clusters="a", optimizer_on_host=True)) == (host_update_note(),)
    assert host_update_note() == (
        "updates on the host: 25 GB/s to and from each chip that states no rate and 25 GB/s of host memory per chip "
        "(assumed, not measured)"
    )


def test_another_framework_and_another_sum_of_gradients_are_named() -> None:
    """With its versions; a strategy only where replicas sum anything."""
    stack = find_stack("megatron")
    assert notes(plan_of(clusters="a", stack="megatron")) == (f"stack 'megatron': {stack.version}",)
    ring = {"synchronisation": "ring"}
    assert notes(plan_of(clusters="a", dp=2), **ring) == ("gradients are summed by 'ring'",)
    assert notes(plan_of(clusters="a"), **ring) == ()


def test_chips_that_a_cluster_does_not_have_are_counted() -> None:
    """By cluster and node group, with separators; as many as there are is no note."""
    pool = pool_of("A100", "A100", nodes=500, chips_per_node=4)
    plan = plan_of(clusters="ab", dp=2001)
    assert notes(plan, pool) == (
        "the plan uses 2,001 chips of a/g, which has 2,000", "the plan uses 2,001 chips of b/g, which has 2,000"
    )  # fmt: skip
    assert notes(plan_of(clusters="ab", dp=2000), pool) == ()


def test_a_stage_that_exceeds_its_chip_is_numbered_over_all_replicas() -> None:
    """With its need, the limit of its stack and the chip's memory, all in GB."""
    plan = plan_of(clusters="a", dp=2, micro_batch_size=64, replica_micro_batch_sizes=(1, 64), sequence_length=4096)
    made = predict(plan, POOL, PROFILE)
    need = made.result.stages[1].peak_memory_bytes / 1e9
    chip = POOL.chip(POOL.node_group("a", "g"))
    size = (chip.reported_bytes or chip.memory_bytes) / 1e9
    assert made.assumptions[2:] == (
        f"stage 1 needs {need:.1f} GB, more than the {0.95 * size:.1f} GB usable of A100's {size:.1f} GB",
    )


TRAFFIC = Interference(bytes_per_s=0.25e9, on_s=1.5, off_s=2.0)


@pytest.mark.parametrize(
    ("ends", "kind", "note"),
    [
        (("a", "b"), "best-effort", "traffic of others from a to b: 2 Gbit/s, 1.5 of every 3.5 s"),
        (("b", "a"), "best-effort", "traffic of others from b to a: 2 Gbit/s, 1.5 of every 3.5 s"),
        (("a", "b"), "reserved", "traffic of others from a to b takes nothing: the link's rate is reserved"),
        (("a", "c"), "best-effort", "traffic of others from a to c crosses no link of this plan"),
        (("c", "b"), "best-effort", "traffic of others from c to b crosses no link of this plan"),
        (("a", "z"), "best-effort", "traffic of others from a to z crosses no link of this plan"),
    ],
)
def test_traffic_of_others_is_told_by_its_link(ends: tuple[str, str], kind: str, note: str) -> None:
    """What takes part of a plan's link, what takes nothing, and what is elsewhere."""
    links = tuple(one.model_copy(update={"link_class": kind}) for one in POOL.links)
    pool = POOL.model_copy(update={"links": links})
    assert notes(plan_of(clusters="ab"), pool, interference={ends: TRAFFIC}) == (note,)


def test_steady_traffic_is_told_as_such_and_all_of_it_in_order() -> None:
    """After the other notes, before the way gradients are summed."""
    steady = Interference(bytes_per_s=0.125e9)
    plan = plan_of(clusters="ab", dp=2, optimizer_on_host=True)
    told = notes(plan, interference={("a", "b"): steady, ("b", "a"): TRAFFIC}, synchronisation="ring")
    assert told == (
        host_update_note(),
        "traffic of others from a to b: 1 Gbit/s, always",
        "traffic of others from b to a: 2 Gbit/s, 1.5 of every 3.5 s",
        "gradients are summed by 'ring'",
    )
