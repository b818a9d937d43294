"""`all_to_all_attention`: ranks exchange tokens for heads, and each attends over whole sequences of its heads.

Source: S. Jacobs et al., "DeepSpeed Ulysses" (2023), section 3.1.
"""

from __future__ import annotations

from typing import Any

import torch

from isthmus.train.context_parallel.context_parallel_group import ContextParallelGroup, whole_sequence
from isthmus.train.context_parallel.gather_attention import exchange_parts
from isthmus.train.context_parallel.ring_attention import ring_attention
from isthmus.train.context_parallel.tiled_attention import AttentionRule, order_blocks, take_share


def all_to_all_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: ContextParallelGroup,
    rule: AttentionRule,
) -> torch.Tensor:
    """Return the attention [B, N, Q, D] of this rank's `query` over the keys of all ranks.

    `query` is [B, N, Q, D]; `key` and `value` [B, K, Q, D] are those of this rank's tokens. The number of ranks divides
    N and K.
    """
    heads = [_to_heads(one, group) for one in (query, key, value)]
    alone = ContextParallelGroup(0, [whole_sequence(group.num_tokens)])
    result: torch.Tensor = _Exchange.apply(ring_attention(heads[0], heads[1], heads[2], alone, rule), group, False)
    return result


def _to_heads(x: torch.Tensor, group: ContextParallelGroup) -> torch.Tensor:
    """Return all tokens of this rank's heads: [B, N, S, D] -> [B, N / size, T, D]."""
    result: torch.Tensor = _Exchange.apply(x, group, True)
    return result


class _Exchange(torch.autograd.Function):
    """Tokens for heads, or heads for tokens; each is the backward of the other."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ContextParallelGroup, to_heads: bool) -> torch.Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return _tokens_to_heads(x, group) if to_heads else _heads_to_tokens(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        back = _heads_to_tokens if ctx.to_heads else _tokens_to_heads
        return back(gradients[0], ctx.group), None, None


def _tokens_to_heads(x: torch.Tensor, group: ContextParallelGroup) -> torch.Tensor:
    parts = [part.contiguous() for part in x.chunk(group.size, 1)]
    shapes = [(*parts[0].shape[:2], share.num_tokens, x.shape[3]) for share in group.shares]
    return order_blocks(exchange_parts(parts, group, shapes), group.shares)


def _heads_to_tokens(x: torch.Tensor, group: ContextParallelGroup) -> torch.Tensor:
    return torch.cat(exchange_parts([take_share(x, share) for share in group.shares], group), 1)
