"""One configuration of each public set, as a plan file of at most 30 lines; what the sets hold and no plan can say."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from isthmus.core.files.user_files import load_plan
from isthmus.core.model import load_model
from isthmus.core.pool import Pool
from isthmus.plan import predict

pytestmark = pytest.mark.integration

FOLDER = Path(__file__).parent / "public_plans"
PAGE = Path(__file__).parents[2] / "docs" / "published.md"
SYSTEMS = {
    "torchtitan": ("H100", 64, 8, None),
    "megatron-bridge": ("GB200", 72, 4, 72),
    "megatron-bridge-lora": ("H100", 1, 8, None),
    "flagperf": ("A100", 4, 8, None),
    "vtrain": ("A100", 20, 8, None),
}
"""Chip, nodes, chips of a node and of a link domain."""


def system(name: str) -> Pool:
    """The cluster of a set."""
    chip, nodes, each, domain = SYSTEMS[name]
    group = {"name": "g", "chip": chip, "nodes": nodes, "chips_per_node": each, "chips_per_domain": domain}
    return Pool.model_validate({"clusters": [{"name": "c", "owner": "o", "node_groups": [group]}]})


@pytest.mark.parametrize("name", list(SYSTEMS))
def test_a_configuration_of_each_set_takes_at_most_30_lines(name):
    """The file reads, passes the checker with its model and pool, and has a time and bytes by kind."""
    file = FOLDER / f"{name}.yaml"
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 30
    plan = load_plan(file)
    forecast = predict(plan, system(name), load_model(FOLDER / (plan.model or "")))
    assert math.isfinite(forecast.iteration_s)
    assert forecast.low_s < forecast.iteration_s < forecast.high_s
    kinds = ("weights", "gradients", "optimizer", "activations", "buffers")
    assert all(stage[kind] > 0 for stage in forecast.as_dict()["memory"] for kind in kinds)


def test_every_set_is_named_with_its_plan_on_the_page():
    """The page says of each set which configurations can be written; its links are the files here."""
    text = PAGE.read_text(encoding="utf-8")
    for file in FOLDER.glob("*.yaml"):
        assert f"public_plans/{file.name}" in text
