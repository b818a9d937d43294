"""`ring_attention`: keys and values go from rank to rank while each computes with those that it has.

The next block is under way during the computation. In the backward pass the gradient of a block follows it round and
ends at its owner. Source: H. Liu et al., "Ring Attention with Blockwise Transformers" (2023).
"""

from __future__ import annotations

from typing import Any

import torch

from isthmus.train.context_parallel.context_parallel_group import ContextParallelGroup, GroupMessage, PendingExchange
from isthmus.train.context_parallel.tiled_attention import AttentionRule, TiledAttention

_BLOCK_TAG, _GRADIENT_TAG = 0, 1


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: ContextParallelGroup,
    rule: AttentionRule,
) -> torch.Tensor:
    """Return the attention [B, N, Q, D] of this rank's `query` over the keys of all ranks.

    `query` is [B, N, Q, D]; `key` and `value` [B, K, Q, D] are those of this rank's tokens.
    """
    result: torch.Tensor = _RingAttention.apply(query, key, value, group, rule)
    return result


class _RingAttention(torch.autograd.Function):
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
        for source, block in _Ring(group, own):
            attention.add(block, group.shares[source])
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
        pending: PendingExchange | None = None
        arriving = own.new_empty(0)
        for source, block in _Ring(group, own):
            found = attention.add_gradients(gradients[0], result, log_sum, block, group.shares[source], query_gradient)
            if pending is not None:  # what earlier ranks have added to the gradient of this block
                pending.wait()
                found += arriving
            sent = found.to(own.dtype)
            if group.size == 1:
                arriving = sent
                break
            owner_of_next = (source - 1) % group.size
            arriving = own.new_empty(*own.shape[:3], group.shares[owner_of_next].num_tokens, own.shape[4])
            pending = group.start(_to_next(group, sent, arriving, _GRADIENT_TAG))
        if pending is not None:
            pending.wait()
        return query_gradient.to(query.dtype), arriving[0], arriving[1], None, None


class _Ring:
    """Iterates over (source, block) of all ranks, its own first; the next block travels during the computation."""

    def __init__(self, group: ContextParallelGroup, own: torch.Tensor) -> None:
        self._group, self._own = group, own

    def __iter__(self) -> Any:
        group, block = self._group, self._own
        for turn in range(group.size):
            source, is_last = (group.cp_rank - turn) % group.size, turn == group.size - 1
            pending, arriving = None, block
            if not is_last:
                tokens = group.shares[(source - 1) % group.size].num_tokens
                arriving = block.new_empty(*block.shape[:3], tokens, block.shape[4])
                pending = group.start(_to_next(group, block, arriving, _BLOCK_TAG))
            yield source, block
            if pending is not None:
                pending.wait()
            block = arriving


def _to_next(group: ContextParallelGroup, sent: torch.Tensor, arriving: torch.Tensor, tag: int) -> list[GroupMessage]:
    """Return the messages of one turn: `sent` to the next rank, `arriving` from the previous one."""
    return [
        GroupMessage(tensor=sent, peer=(group.cp_rank + 1) % group.size, is_send=True, tag=tag),
        GroupMessage(tensor=arriving, peer=(group.cp_rank - 1) % group.size, is_send=False, tag=tag),
    ]
