"""The loss that keeps the experts of a mixture evenly used, defined layer by layer so that any cut has it.

For one layer and one micro-batch of T tokens, E experts of which each token takes some,

    balance = E * sum over e of (assignments to expert e / T) * (mean router probability of e)

and the loss of the model is the mean of it over its layers with experts. It is equation (4) of W. Fedus et
al., "Switch Transformers" (2021), for several experts a token. transformers multiplies means over all layers
instead of taking the mean of products: equal for one such layer, but no stage could compute it alone.

It is added, times `router_aux_loss_coef`, where `config.json` says `output_router_logits: true`, as
transformers does; in training only, and never to the reported `loss`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PretrainedConfig


def balance_coefficient(config: PretrainedConfig) -> float:
    """Return what the balance loss weighs in the training of a model; 0 where it has none."""
    if not getattr(config, "output_router_logits", False):
        return 0.0
    return float(getattr(config, "router_aux_loss_coef", 0.0))


def router_of(layer: nn.Module) -> nn.Module | None:
    """Return the router of a decoder layer, None where it has no experts."""
    return getattr(layer.mlp, "gate", None) if hasattr(layer.mlp, "experts") else None


@contextmanager
def watched(router: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Yield a list that gets the balance loss (a scalar, fp32) of each call of `router` inside."""
    losses: list[torch.Tensor] = []

    def note(_: nn.Module, __: object, output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        losses.append(balance_loss(output[0], output[2]))

    handle = router.register_forward_hook(note)
    try:
        yield losses
    finally:
        handle.remove()


def balance_loss(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return the balance loss (fp32) of a layer: router `logits` [T, E], experts `chosen` [T, k] (int64)."""
    num_tokens, num_experts = logits.shape
    probabilities = torch.softmax(logits.float(), dim=-1).mean(dim=0)
    taken = torch.zeros(num_experts, dtype=torch.float32, device=logits.device)
    taken.index_add_(0, chosen.reshape(-1), taken.new_ones(chosen.numel()))
    return num_experts * torch.sum(taken / num_tokens * probabilities)
