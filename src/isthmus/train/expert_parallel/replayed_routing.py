"""`replayed_routing`: let a layer's tokens take given experts, weighted by its own router.

Source: rollout routing replay (arXiv 2510.11370, section 3): the choice is that of the engine that sampled, the weights
are the softmax of the trained router's logits over these experts, so gradients reach it as always.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

_RouterOutput = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@contextmanager
def replayed_routing(router: nn.Module, taken: torch.Tensor) -> Iterator[None]:
    """Let the tokens of a layer take the experts `taken` [T, k]; those with -1 take what its `router` chooses."""

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
