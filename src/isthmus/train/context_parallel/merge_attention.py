"""`merge_attention`: the attention over two disjoint sets of keys, from that over each."""

from __future__ import annotations

import torch


def merge_attention(
    one: torch.Tensor, one_log_sum: torch.Tensor, other: torch.Tensor, other_log_sum: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return result [..., D] and log-sum-exp [...] of attention over the keys of both.

    `one` and `other` [..., D] are results over disjoint keys, their log-sum-exps [...] those of the scaled products.
    Source: T. Dao et al., "FlashAttention" (2022), section 3.1.
    """
    log_sum = torch.logaddexp(one_log_sum, other_log_sum)
    weight = (one_log_sum - log_sum).exp().unsqueeze(-1)
    return torch.lerp(other.to(log_sum.dtype), one.to(log_sum.dtype), weight), log_sum
