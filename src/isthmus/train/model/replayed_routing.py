"""`replayed_routing`: let a layer's tokens take given experts, weighted by its own router.

Source: rollout routing replay (arXiv 2510.11370, section 3): the choice is that of the engine that sampled, the weights
are the softmax of the trained router's logits over these experts, so gradients reach it as always.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from isthmus.core.model_parts.routing_shape import RoutingShape
from isthmus.train.model.balance_loss import find_router

_RouterOutput = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def find_routers(layers: Iterable[nn.Module], held: tuple[int, int]) -> tuple[RoutingShape, dict[int, int]]:
    """Return the shape of the routing of all `layers`, and the number of the router of each layer in `held`."""
    routers = {number: one for number, layer in enumerate(layers) if (one := find_router(layer)) is not None}
    first = next(iter(routers.values()), None)
    shape = RoutingShape(0, 0, 0) if first is None else RoutingShape(len(routers), first.top_k, first.num_experts)
    return shape, {layer: place for place, layer in enumerate(routers) if held[0] <= layer < held[1]}


@contextmanager
def replayed_routing(layer: nn.Module, taken: torch.Tensor) -> Iterator[None]:
    """Let the tokens of `layer` take the experts `taken` [T, k]; those with -1 take what its router chooses."""
    router = find_router(layer)
    if router is None:
        raise ValueError("a layer without a router")

    def take(_: nn.Module, __: object, output: _RouterOutput) -> _RouterOutput:
        logits, weights, chosen = output
        experts = torch.where(taken < 0, chosen, taken.to(chosen.dtype))
        shares = torch.softmax(logits.float(), dim=-1).gather(-1, experts)
        if getattr(router, "norm_topk_prob", True):
            shares = shares / shares.sum(dim=-1, keepdim=True)
        return logits, shares.to(weights.dtype), experts

    handle = router.register_forward_hook(take)
    try:
        yield
    finally:
        handle.remove()
