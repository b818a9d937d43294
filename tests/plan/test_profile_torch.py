"""Rule: parameter counts equal those of the classes in transformers, built on the meta device."""

import json

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.plan.published import CONFIGS, NAMES, PARAMETERS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", NAMES)
def test_counts_are_those_of_transformers(name):
    """Every published configuration, every parameter: nothing is allocated on the meta device."""
    fields = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    kind = fields.pop("model_type")
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**fields))
    assert sum(parameter.numel() for parameter in module.parameters()) == PARAMETERS[name]
