"""`attend` and `attend_backward`: torch's fused attention with its log-sum-exp, which merged attention needs.

Shapes: B samples, N query heads, K key and value heads (K divides N), Q queries, S keys, D head width. Products are
computed in the inputs' type, the log-sum-exp in fp32. A CPU uses aten's flash kernel, a CUDA device the flash kernel in
16 bits, and the memory-efficient one in fp32 and under a mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

_aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """How one product of queries and keys is computed."""

    scale: float
    # Query i sees keys up to i; Q equals S.
    is_causal: bool = False
    # [Q, S], True where a query sees a key; None: everywhere.
    mask: torch.Tensor | None = None


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention [B, N, Q, D] and its log-sum-exp [B, N, Q] in fp32.

    `query` is [B, N, Q, D], `key` and `value` are [B, K, S, D]. A query that sees no key has a log-sum-exp of about
    -3e38, by which its result weighs nothing in a merge.
    """
    bias = _bias(call.mask, query)
    is_causal = call.is_causal and bias is None
    if query.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
            query, key, value, 0.0, is_causal, attn_mask=bias, scale=call.scale
        )
    key, value = _expand_heads(key, query), _expand_heads(value, query)
    if _is_flash(query, bias):
        result, log_sum, *_ = _aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, False, scale=call.scale
        )
        return result, log_sum[..., : query.shape[2]]
    result, log_sum, *_ = _aten._scaled_dot_product_efficient_attention(
        query, key, value, _expand_bias(bias, query), True, 0.0, is_causal, scale=call.scale
    )
    return result, log_sum[..., : query.shape[2]]


def attend_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    result: torch.Tensor,
    log_sum: torch.Tensor,
    call: AttentionCall,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of `query`, `key` and `value` (their shapes) that these keys contribute.

    `gradient` and `result` [B, N, Q, D] and `log_sum` [B, N, Q] are those of the attention over all keys.
    """
    bias = _bias(call.mask, query)
    is_causal = call.is_causal and bias is None
    if query.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
            gradient, query, key, value, result, log_sum, 0.0, is_causal, attn_mask=bias, scale=call.scale
        )
    wide_key, wide_value = _expand_heads(key, query), _expand_heads(value, query)
    seed = torch.zeros((), dtype=torch.int64, device=query.device)
    if _is_flash(query, bias):
        found: Any = _aten._scaled_dot_product_flash_attention_backward(
            gradient, query, wide_key, wide_value, result, log_sum, None, None, query.shape[2], key.shape[2],
            0.0, is_causal, seed, seed, scale=call.scale,
        )  # fmt: skip
    else:
        aligned = _align_rows(log_sum)
        found = _aten._scaled_dot_product_efficient_attention_backward(
            gradient, query, wide_key, wide_value, _expand_bias(bias, query), result, aligned, seed, seed,
            0.0, [True, True, True, False], is_causal, scale=call.scale,
        )  # fmt: skip
    return found[0], _sum_heads(found[1], key), _sum_heads(found[2], value)


def _bias(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """Return `mask` [Q, S] as addends: finite ones, so that a row without keys has no NaN."""
    if mask is None:
        return None
    hidden = torch.finfo(query.dtype).min
    return torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(~mask, hidden)


def _is_flash(query: torch.Tensor, bias: torch.Tensor | None) -> bool:
    return bias is None and query.dtype in (torch.bfloat16, torch.float16)


def _expand_bias(bias: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    return None if bias is None else bias.expand(*query.shape[:2], *bias.shape)


def _align_rows(log_sum: torch.Tensor) -> torch.Tensor:
    """Return `log_sum` [B, N, Q] with rows padded to 32 values, as the memory-efficient kernel returns it."""
    missing = -log_sum.shape[-1] % 32
    return torch.nn.functional.pad(log_sum, (0, missing), value=float("inf")).contiguous()


def _expand_heads(x: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Return [B, K, S, D] repeated to the query's heads [B, N, S, D]."""
    return x if x.shape[1] == query.shape[1] else x.repeat_interleave(query.shape[1] // x.shape[1], 1)


def _sum_heads(gradient: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return [B, N, S, D] summed over the query heads of each head of `like` [B, K, S, D]."""
    if gradient.shape[1] == like.shape[1]:
        return gradient
    batch, heads, tokens, width = like.shape
    return gradient.view(batch, heads, -1, tokens, width).sum(2)
