"""`paged_attention`: attention of a tile of rows over their pages, with bits that do not depend on the other rows.

Source: attention with a running maximum (arXiv 2205.14135, algorithm 1), one page at a time, so that each product has
one shape and a row's sum has an order that follows from its position alone. A page that a row does not need adds exact
zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from isthmus.serve.paged.page_cache import PageCache
from isthmus.serve.paged.row_tile import RowTile

PAGED_ATTENTION = "isthmus_paged"
"""The name of `paged_attention` in a model's configuration."""

_LOWEST = -1e30
"""Below every score; finite, so that the difference of two is a number."""


def paged_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: None,
    *, scaling: float, tile: RowTile, cache: PageCache, sliding_window: int | None = None, **_other: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Store a tile's keys and values, and return its attention [R, 1, heads, head size].

    query [R, heads, 1, head size]; key and value [R, KV heads, 1, head size]; a causal mask is implied, and with
    `sliding_window` a row sees that many positions, its own included.
    """
    layer, num_rows, kv_heads, head_size = module.layer_idx, key.shape[0], key.shape[1], key.shape[3]
    keys, values = cache.keys[layer], cache.values[layer]
    keys[tile.write_pages, tile.write_slots] = key[:, :, 0].to(keys.dtype)
    values[tile.write_pages, tile.write_slots] = value[:, :, 0].to(values.dtype)
    # [R, KV heads, heads of each, head size]
    rows = query.float().reshape(num_rows, kv_heads, -1, head_size) * scaling
    highest = rows.new_full((*rows.shape[:3], 1), _LOWEST)
    total, out = torch.zeros_like(highest), torch.zeros_like(rows)
    slots = torch.arange(cache.page_tokens, device=rows.device)
    for number in range(tile.pages.shape[1]):
        page = tile.pages[:, number]
        at = number * cache.page_tokens + slots
        seen = at <= tile.positions[:, None]
        if sliding_window is not None:
            seen = seen & (at > tile.positions[:, None] - sliding_window)
        seen = seen[:, None, None]
        # [R, KV heads, head size, page tokens] and [R, KV heads, page tokens, head size]
        page_keys = keys[page].float().permute(0, 2, 3, 1)
        page_values = torch.where(seen[:, 0, 0, :, None, None], values[page].float(), 0.0).transpose(1, 2)
        scores = torch.where(seen, rows @ page_keys, _LOWEST)
        higher = torch.maximum(highest, scores.amax(dim=-1, keepdim=True))
        weights = torch.where(seen, (scores - higher).exp(), 0.0)
        shrink = (highest - higher).exp()
        total = total * shrink + weights.sum(dim=-1, keepdim=True)
        out = out * shrink + weights @ page_values
        highest = higher
    attended = (out / total).reshape(num_rows, 1, -1, head_size)
    return attended.to(query.dtype), None


ALL_ATTENTION_FUNCTIONS.register(PAGED_ATTENTION, paged_attention)
