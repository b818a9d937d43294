"""`overlap_shared_expert`: a layer computes its shared expert while rows are under way to its routed ones and back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from isthmus.train.expert_parallel.token_exchange import TokenExchange

Region = Callable[[torch.Tensor], torch.Tensor]
"""Enters or leaves the part of a layer that tensor-parallel ranks share: hidden states [T, H] -> [T', H]."""


def overlap_shared_expert(block: nn.Module, exchange: TokenExchange, enter: Region, leave: Region) -> None:
    """Let `block`, which has routed experts with `exchange` and a shared one, compute the latter meanwhile.

    Gate and up projection go with the rows' way to their experts, the down projection with their way back. `enter` is
    applied to the input of the shared expert, `leave` to its result.
    """
    block.forward = partial(_forward, block, exchange, enter, leave)


class _SharedExpert:
    """The shared expert of one call, in two parts; `result` [T, H] is there after the second."""

    def __init__(self, module: Any, hidden: torch.Tensor, leave: Region) -> None:
        self._module, self._hidden, self._leave = module, hidden, leave
        self._inner: torch.Tensor | None = None
        self.result: torch.Tensor | None = None

    def on_the_way(self) -> None:
        module, hidden = self._module, self._hidden
        self._inner = module.act_fn(module.gate_proj(hidden)) * module.up_proj(hidden)

    def on_the_way_back(self) -> None:
        self.result = self._leave(self._module.down_proj(self._inner))


def _forward(
    block: Any, exchange: TokenExchange, enter: Region, leave: Region, hidden_states: torch.Tensor
) -> torch.Tensor:
    """Return the output [B, S, H] of the block, as the forward of transformers does."""
    hidden = hidden_states.reshape(-1, hidden_states.shape[-1])
    _, weights, chosen = block.gate(hidden)
    exchange.meanwhile = shared = _SharedExpert(block.shared_expert, enter(hidden), leave)
    routed = block.experts(hidden, chosen, weights)
    output = routed + torch.sigmoid(block.shared_expert_gate(hidden)) * shared.result
    result: torch.Tensor = output.view_as(hidden_states)
    return result
