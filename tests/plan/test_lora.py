"""Low-rank adapters: what autograd keeps beside frozen weights, their state, and products without weight gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from isthmus.core.plan_parts.low_rank_adapters import LowRankAdapters
from isthmus.plan import DATA_SHEET, profile_model
from isthmus.plan.memory.stage_memory import stage_memory
from isthmus.plan.profile.adapted_profile import adapted_profile
from isthmus.plan.time.stage_costs import stage_costs
from tests.plan.hand import model_of, plan_of, pool_of
from tests.plan.torch_memory import kept_bytes, small, tokens

PROFILE = profile_model(model_of())
HIDDEN, FFN, VOCABULARY, LAYERS, RANK = 2048, 8192, 32000, 8, 16
NAMES = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj", "gate": "gate_proj", "up": "up_proj"}


class Adapted(nn.Module):
    """A frozen product with an adapter beside it: W x + B A x."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, rank, bias=False, dtype=base.weight.dtype)
        self.b = nn.Linear(rank, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product and the adapter's; `x` and the result are [..., width]."""
        return self.base(x) + self.b(self.a(x))


def adapted_module(targets, precision):
    """A small Llama with adapters, whose first layer's input needs a gradient, as that of all others does."""
    noun, module = small("LlamaForCausalLM", precision=precision)
    module.requires_grad_(False)
    for layer in module.model.layers:
        for target in targets:
            holder = layer.mlp if target in ("gate", "up", "down") else layer.self_attn
            name = NAMES.get(target, f"{target}_proj")
            setattr(holder, name, Adapted(getattr(holder, name), RANK))
    module.enable_input_require_grads()
    return noun, module


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("targets", [("q", "v"), ("q", "k", "v", "o"), ("q", "k", "v", "o", "gate", "up", "down")])
def test_saved_tensors_agree_with_torch(targets, precision):
    """Adapters written by hand beside the frozen products of a small Llama: bytes that autograd keeps, within 3 %."""
    noun, module = adapted_module(targets, precision)
    profile = adapted_profile(profile_model(noun), LowRankAdapters(rank=RANK, targets=targets))
    trained = sum(one.numel() for one in module.parameters() if one.requires_grad)
    weights = [w for layer in profile.layers for part in layer.components for w in part.weights]
    assert sum(one.parameters for one in weights if one.trainable) == trained
    ours = stage_memory(
        profile, (0, 3), is_first=True, is_last=True, micro_batch_size=2, sequence_length=128, in_flight=1,
        precision=precision,
    )  # fmt: skip
    measured = kept_bytes(module, tokens(module, 2, 128))
    assert -0.02 <= ours.activations_bytes / measured - 1 <= 0.03, f"{ours.activations_bytes:,.0f} for {measured:,.0f}"


def test_frozen_weights_have_their_precision_and_nothing_else():
    """Two bytes a frozen parameter, eighteen a trained one: rank x (inputs + outputs) of each target."""
    profile = adapted_profile(PROFILE, LowRankAdapters(rank=RANK, targets=("q", "down")))
    memory = stage_memory(
        profile, (0, LAYERS), is_first=True, is_last=True, micro_batch_size=1, sequence_length=2048, in_flight=1
    )
    trained = LAYERS * RANK * (2 * HIDDEN + FFN + HIDDEN)
    assert memory.weights_bytes == 2 * (PROFILE.num_parameters + trained)
    assert memory.gradients_bytes == 4 * trained
    assert memory.optimizer_bytes == 12 * trained


def test_the_backward_pass_computes_no_gradient_of_frozen_weights():
    """Backward and forward products are equally many, where training all computes twice as many backward."""
    plans = [plan_of(clusters="a", dp=8, lora=lora) for lora in (None, {"rank": 1, "targets": ["q"]})]
    whole, adapted = (stage_costs(one, pool_of("H100"), PROFILE, DATA_SHEET)[0] for one in plans)
    forward_s = whole.time.matmul_s / 3
    assert adapted.time.matmul_s == pytest.approx(2 * forward_s, rel=0.02), "the factors' own products take the rest"
    assert adapted.load.gradient_bytes < 1e-4 * whole.load.gradient_bytes, "only the adapters are reduced"
    assert adapted.load.update_s < whole.load.update_s
