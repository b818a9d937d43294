"""Equal stages are costed once; a stage that differs in anything that its cost depends on is not equal."""

from __future__ import annotations

import pytest

from isthmus.core.plan import Plan, Stage
from isthmus.core.plan_parts.activation_offload import ActivationOffload
from isthmus.plan.profile.layer_profile import ModelProfile
from isthmus.plan.profile.model_profile import profile_model
from isthmus.plan.time import stage_costs as stage_costs_module
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


def each_alone(plan: Plan, profile: ModelProfile, monkeypatch: pytest.MonkeyPatch) -> tuple[StageCost, ...]:
    """The costs where no stage counts as equal to another."""
    with monkeypatch.context() as patch:
        patch.setattr(stage_costs_module, "_stage_kind", lambda _plan, _profile, _stages, index: index)
        return stage_costs(plan, pool_of(), profile, RATES)


@pytest.mark.parametrize(
    "unlike",
    [
        {}, {"cluster": "b"}, {"node_group": "slow"}, {"tp": 4}, {"cp": 4}, {"cp_kind": "ring"}, {"ep": 2},
        {"sp": True}, {"recompute": "none"}, {"recompute_layers": 0}, {"recompute_modules": ("mlp",)},
        {"offload": ActivationOffload(overlap=False)}, {"precision": "fp32"}, {"cp_rates": (1.0, 0.25)},
    ],
)  # fmt: skip
def test_a_stage_costs_what_it_costs_alone(unlike: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its neighbours are; with a change its cost is another."""
    profile = MIXTURE if "ep" in unlike else DENSE
    plan = plan_of(unlike)
    found = stage_costs(plan, pool_of(), profile, RATES)
    assert found == each_alone(plan, profile, monkeypatch)
    plain = stage_costs(plan_of({}), pool_of(), profile, RATES)
    assert (found[2].load == plain[2].load) == (not unlike)
    assert [cost.stage for cost in found] == list(plan.stages)


def test_equal_stages_are_costed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five, the first with the embedding, three between and the last with the head: three costs."""
    costed: list[int] = []
    whole = stage_costs_module._stage_cost

    def counted(*args: object) -> StageCost:
        costed.append(args[-1])  # type: ignore[arg-type]
        return whole(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(stage_costs_module, "_stage_cost", counted)
    stage_costs(plan_of({}), pool_of(), DENSE, RATES)
    assert costed == [0, 1, 4]
    costed.clear()
    stage_costs(plan_of({}, schedule="dualpipe"), pool_of(), DENSE, RATES)
    assert costed == [0, 1, 2, 3, 4], "each shares its chips with another mirror image"


def test_replicas_that_reduce_elsewhere_make_a_stage_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third stage of a second replica is in another node group: its gradients cross a slower network."""
    plan = plan_of({}, {"node_group": "slow"})
    found = stage_costs(plan, pool_of(), DENSE, RATES)
    assert found == each_alone(plan, DENSE, monkeypatch)
    assert [cost.num_reducing for cost in found] == [2] * 5
    assert found[2].load.local_bytes_per_s < found[1].load.local_bytes_per_s
