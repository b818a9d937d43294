"""`gather_attention`: keys and values of the whole sequence at each rank, then one pass over them.

Only a rank's own keys and values are kept: the backward pass gathers again, and each rank sums what all add to the
gradient of its own. Source: A. Dubey et al., "The Llama 3 Herd of Models" (2024), section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from isthmus.train.context_parallel.context_parallel_group import (
    ContextParallelGroup,
    GroupMessage,
    whole_sequence,
)
from isthmus.train.context_parallel.tiled_attention import AttentionRule, TiledAttention, order_blocks, take_share


def gather_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: ContextParallelGroup,
    rule: AttentionRule,
) -> torch.Tensor:
    """Return the attention [B, N, Q, D] of this rank's `query` over the keys of all ranks.

    `query` is [B, N, Q, D]; `key` and `value` [B, K, Q, D] are those of this rank's tokens.
    """
    result: torch.Tensor = _GatherAttention.apply(query, key, value, group, rule)
    return result


class _GatherAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        group: ContextParallelGroup,
        rule: AttentionRule,
    ) -> torch.Tensor:
        own = torch.stack((key, value))
        attention = TiledAttention(query, group.share, rule)
        attention.add(_gather(own, group), whole_sequence(group.num_tokens))
        result, log_sum = attention.merged()
        ctx.group, ctx.rule = group, rule
        ctx.save_for_backward(query, own, result, log_sum)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        query, own, result, log_sum = ctx.saved_tensors
        group: ContextParallelGroup = ctx.group
        attention = TiledAttention(query, group.share, ctx.rule)
        query_gradient = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
        whole = whole_sequence(group.num_tokens)
        found = attention.add_gradients(gradients[0], result, log_sum, _gather(own, group), whole, query_gradient)
        parts = exchange_parts([take_share(found, share).to(own.dtype) for share in group.shares], group)
        total = sum(parts[1:], start=parts[0].float()).to(own.dtype)
        return query_gradient.to(query.dtype), total[0], total[1], None, None


def _gather(own: torch.Tensor, group: ContextParallelGroup) -> torch.Tensor:
    """Return the blocks of all ranks in the order of the sequence: `own` [2, B, K, S, D] -> [2, B, K, T, D]."""
    sizes = [share.num_tokens for share in group.shares]
    blocks = exchange_parts([own] * group.size, group, [(*own.shape[:3], size, own.shape[4]) for size in sizes])
    return order_blocks(blocks, group.shares)


def exchange_parts(
    parts: Sequence[torch.Tensor], group: ContextParallelGroup, shapes: Sequence[Sequence[int]] | None = None
) -> list[torch.Tensor]:
    """Send `parts[r]` to each rank r; return what each rank has sent here, by rank.

    Rank r sends a tensor of `shapes[r]` (default: that of this rank's own part).
    """
    own, messages = group.cp_rank, []
    shapes = shapes or [parts[own].shape] * group.size
    arriving = [parts[own] if rank == own else parts[own].new_empty(shapes[rank]) for rank in range(group.size)]
    for turn in range(1, group.size):
        to, source = (own + turn) % group.size, (own - turn) % group.size
        messages.append(GroupMessage(tensor=parts[to].contiguous(), peer=to, is_send=True))
        messages.append(GroupMessage(tensor=arriving[source], peer=source, is_send=False))
    group.start(messages).wait()
    return arriving
