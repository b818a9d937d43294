"""Model FLOPs utilisation: the definition, and that every prediction carries it."""

from __future__ import annotations

import pytest

from isthmus.core.model import Model
from isthmus.core.plan import Plan, Stage
from isthmus.core.pool import Cluster, NodeGroup, Pool
from isthmus.plan import mfu_fraction, predict, profile_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000,
}  # fmt: skip
MODEL = Model(
    path="m", architecture="LlamaForCausalLM", num_layers=32, hidden_size=4096, vocab_size=32000, config=CONFIG
)
GROUP = NodeGroup(name="g", chip="A100", nodes=1, chips_per_node=8, price_per_chip_hour=3.6)
POOL = Pool(clusters=(Cluster(name="a", owner="o", node_groups=(GROUP,)),))


def plan_of(tp: int) -> Plan:
    stage = Stage(cluster="a", node_group="g", layers=(0, 32), tp=tp)
    return Plan(id="p", stages=(stage,), micro_batches=4, micro_batch_size=1, sequence_length=2048)


def test_it_is_the_models_operations_over_the_peak_of_all_chips() -> None:
    """About 6 operations per parameter and token plus attention, over 8 A100 with 312 TFLOP/s each."""
    profile = profile_model(MODEL)
    share = mfu_fraction(plan_of(8), POOL, profile, "bf16", 1.0)
    matrix = 6 * (profile.num_parameters - 32000 * 4096) * 4 * 2048
    assert matrix / (8 * 312e12) < share < 1.15 * matrix / (8 * 312e12)
    assert mfu_fraction(plan_of(8), POOL, profile, "bf16", 2.0) == pytest.approx(share / 2)
    assert mfu_fraction(plan_of(4), POOL, profile, "bf16", 1.0) == pytest.approx(share * 2)


def test_a_forecast_has_utilisation_and_price() -> None:
    """Recomputation costs time and counts as no useful work; the price is that of all chips for the step."""
    plain = predict(plan_of(8), POOL, MODEL)
    stages = (plan_of(8).stages[0].model_copy(update={"recompute": "full"}),)
    again = predict(Plan.model_validate(plan_of(8).model_dump() | {"stages": stages}), POOL, MODEL)
    assert 0 < again.mfu_fraction < plain.mfu_fraction < 1
    assert plain.cost == pytest.approx(8 * 3.6 / 3600 * plain.iteration_s)
    assert plain.as_dict()["mfu_fraction"] == plain.mfu_fraction
