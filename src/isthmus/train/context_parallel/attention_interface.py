"""`use_context_attention`: transformers' attention modules attend over the tokens of all ranks of a group.

Models call attention by a name in their configuration (`AttentionInterface`), so no model code changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PretrainedConfig

from isthmus.train.context_parallel.context_parallel_group import ContextKind, ContextParallelGroup
from isthmus.train.context_parallel.gather_attention import gather_attention
from isthmus.train.context_parallel.head_exchange import all_to_all_attention
from isthmus.train.context_parallel.ring_attention import ring_attention
from isthmus.train.context_parallel.tiled_attention import AttentionRule

_NAME = "isthmus_context_parallel"

ContextAttention = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, ContextParallelGroup, AttentionRule], torch.Tensor
]

_KINDS: dict[ContextKind, ContextAttention] = {
    "gather": gather_attention,
    "ring": ring_attention,
    "all_to_all": all_to_all_attention,
}


def use_context_attention(config: PretrainedConfig, attention: nn.Module, group: ContextParallelGroup) -> None:
    """Let the module `attention` of a model of `config` attend over the sequences that `group` shares."""
    config._attn_implementation = _NAME
    attention.context_parallel_group = group


def context_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention [B, Q, N, D] of `query` [B, N, Q, D] over the keys [B, K, Q, D] of all ranks.

    The signature is that of transformers; the mask follows from the shares of the group of `module`, so that
    `attention_mask` is None, and `dropout` is 0. Raises `ValueError` otherwise.
    """
    if attention_mask is not None or dropout:
        raise ValueError("context-parallel attention takes neither a mask nor dropout")
    group: Any = module.context_parallel_group
    rule = AttentionRule(scale=scaling, documents=(0, group.num_tokens), window=sliding_window)
    return _KINDS[group.kind](query, key, value, group, rule).transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, context_attention)
