"""Equal stages are costed once; a stage that differs in anything that its cost depends on is not equal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isthmus.core.plan import Plan, Stage
from isthmus.core.plan_parts.activation_offload import ActivationOffload
from isthmus.plan.profile.layer_profile import ModelProfile
from isthmus.plan.profile.model_profile import profile_model
from isthmus.plan.time.stage_costs import StageCost, stage_costs
from tests.plan.hand import model_of
from tests.plan.test_stage_loads import RATES, pool_of

EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
DENSE = profile_model(model_of(5))
MIXTURE = profile_model(model_of(5, **EXPERTS).model_copy(update={"architecture": "MixtralForCausalLM"}))
USUAL = {"cluster": "a", "node_group": "g", "tp": 2, "cp": 2, "recompute": "selective"}


def plan_of(unlike: dict[str, object], second: dict[str, object] | None = None, **fields: object) -> Plan:
    """Five stages of one layer each, the third unlike the others; with `second` two such replicas, one of `second`."""
    rows = [unlike] if second is None else [unlike, second]
    stages = tuple(
        Stage.model_validate({**USUAL, **(changes if index == 2 else {}), "layers": (index, index + 1), "replica": at})
        for at, changes in enumerate(rows)
        for index in range(5)
    )
    known = {"micro_batches": 8, "micro_batch_size": 1, "sequence_length": 2048}
    return Plan.model_validate({"id": "p", "stages": stages, "dp": len(rows)} | known | fields)


def each_alone(plan: Plan, profile: ModelProfile) -> tuple[StageCost, ...]:
    """The costs where no two layers count as equal, and so no two stages."""
    unlike = replace(profile, layers=tuple(replace(layer) for layer in profile.layers))
    return stage_costs(plan, pool_of(), unlike, RATES)


@pytest.mark.parametrize(
    "unlike",
    [
        {}, {"cluster": "b"}, {"node_group": "slow"}, {"tp": 4}, {"cp": 4}, {"cp_kind": "ring"}, {"ep": 2},
        {"sp": True}, {"recompute": "none"}, {"recompute_layers": 0}, {"recompute_modules": ("mlp",)},
        {"offload": ActivationOffload(overlap=False)}, {"precision": "fp32"}, {"cp_rates": (1.0, 0.25)},
    ],
)  # fmt: skip
def test_a_stage_costs_what_it_costs_alone(unlike: dict[str, object]) -> None:
    """Whatever its neighbours are; with a change its cost is another."""
    profile = MIXTURE if "ep" in unlike else DENSE
    plan = plan_of(unlike)
    found = stage_costs(plan, pool_of(), profile, RATES)
    assert found == each_alone(plan, profile)
    plain = stage_costs(plan_of({}), pool_of(), profile, RATES)
    assert (found[2].load == plain[2].load) == (not unlike)
    assert [cost.stage for cost in found] == list(plan.stages)


def test_equal_stages_are_costed_once() -> None:
    """Of five, the three between embedding and head have one time; under DualPipe each has another mirror image."""
    first, second, third, fourth, last = stage_costs(plan_of({}), pool_of(), DENSE, RATES)
    assert second.time is third.time is fourth.time
    assert len({id(cost.time) for cost in (first, second, last)}) == 3
    both = stage_costs(plan_of({}, schedule="dualpipe"), pool_of(), DENSE, RATES)
    assert len({id(cost.time) for cost in both}) == 5


def test_replicas_that_reduce_elsewhere_make_a_stage_another() -> None:
    """The third stage of a second replica is in another node group: its gradients cross a slower network."""
    plan = plan_of({}, {"node_group": "slow"})
    found = stage_costs(plan, pool_of(), DENSE, RATES)
    assert found == each_alone(plan, DENSE)
    assert [cost.num_reducing for cost in found] == [2] * 5
    assert found[2].load.local_bytes_per_s < found[1].load.local_bytes_per_s
