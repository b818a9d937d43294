"""Load-balancing loss of mixture-of-experts layers, per layer so that any pipeline split can compute it.

For one layer and a micro-batch of T tokens, each routed to some of E experts,

    balance = E * sum over e of (assignments to expert e / T) * (mean router probability of e)

and the model's loss is its mean over all MoE layers: equation (4) of W. Fedus et al., "Switch Transformers"
(2021), for several experts per token. transformers multiplies means over all layers instead of averaging
products, which no single stage could compute; for one MoE layer the two are equal.

As in transformers, training adds it times `router_aux_loss_coef` if `config.json` sets
`output_router_logits: true`. The reported `loss` excludes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PretrainedConfig

from isthmus.core.model_parts.routing_shape import RoutingShape


def balance_coefficient(config: PretrainedConfig) -> float:
    """Return the weight of the balance loss in training; 0 if the model does not use it."""
    if not getattr(config, "output_router_logits", False):
        return 0.0
    return float(getattr(config, "router_aux_loss_coef", 0.0))


def find_router(layer: nn.Module) -> nn.Module | None:
    """Return the router of a decoder layer; None for a dense layer."""
    return getattr(layer.mlp, "gate", None) if hasattr(layer.mlp, "experts") else None


def find_routers(layers: Iterable[nn.Module]) -> tuple[RoutingShape, tuple[int, ...]]:
    """Return the shape of the routing of all `layers` of a model, and the numbers of those that have a router."""
    routers = {number: one for number, layer in enumerate(layers) if (one := find_router(layer)) is not None}
    first = next(iter(routers.values()), None)
    shape = RoutingShape(0, 0, 0) if first is None else RoutingShape(len(routers), first.top_k, first.num_experts)
    return shape, tuple(routers)


@contextmanager
def capture_balance_losses(
    router: nn.Module, sum_shares: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> Iterator[list[torch.Tensor]]:
    """Yield a list that collects the balance loss (fp32 scalar) of each call of `router`; see `balance_loss`."""
    losses: list[torch.Tensor] = []

    def append(_: nn.Module, __: object, output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        losses.append(balance_loss(output[0], output[2], sum_shares))

    handle = router.register_forward_hook(append)
    try:
        yield losses
    finally:
        handle.remove()


def balance_loss(
    logits: torch.Tensor,
    expert_ids: torch.Tensor,
    sum_shares: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return the balance loss (fp32) of router `logits` [T, E] and int64 expert ids `expert_ids` [T, k].

    Where ranks share the tokens, `sum_shares` sums over them, and the result is this rank's part of a sum. Only the
    number of assignments is summed, which has no gradient.
    """
    num_tokens, num_experts = logits.shape
    taken = torch.zeros(num_experts + 1, dtype=torch.float32, device=logits.device)
    taken.index_add_(0, expert_ids.reshape(-1), taken.new_ones(expert_ids.numel()))
    taken[-1] = num_tokens
    if sum_shares is not None:
        taken = sum_shares(taken)
    probabilities = torch.softmax(logits.float(), dim=-1).mean(dim=0) * (num_tokens / taken[-1])
    return num_experts * torch.sum(taken[:-1] / taken[-1] * probabilities)
