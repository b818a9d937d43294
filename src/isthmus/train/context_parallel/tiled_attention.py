"""`TiledAttention`: attention of a rank's queries over blocks of keys that come one after the other.

Shapes: B samples, N query heads, K key and value heads, Q queries of the rank, S keys of a block, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from isthmus.train.context_parallel.attention_kernel import AttentionCall, attend, attend_backward
from isthmus.train.context_parallel.attention_tiles import AttentionTile, attention_tiles
from isthmus.train.context_parallel.merge_attention import merge_attention
from isthmus.train.context_parallel.sequence_shares import SequenceShare


@dataclass(frozen=True, kw_only=True)
class AttentionRule:
    """What a query sees: earlier tokens of its document, up to `window` of them."""

    scale: float
    # Ends of the sequence's documents, 0 first.
    documents: tuple[int, ...]
    window: int | None = None


class TiledAttention:
    """Attention of `query` [B, N, Q, D], whose tokens are `share`, by `rule`; blocks are `[2, B, K, S, D]`."""

    def __init__(self, query: torch.Tensor, share: SequenceShare, rule: AttentionRule) -> None:
        self._query, self._share, self._rule = query, share, rule
        self._result: torch.Tensor | None = None
        self._log_sum = query.new_empty(0)

    def add(self, block: torch.Tensor, share: SequenceShare) -> None:
        """Attend over keys and values `block` [2, B, K, S, D], whose tokens are `share`."""
        for tile in self._tiles(share):
            rows, columns = slice(*tile.queries), slice(*tile.keys)
            key, value = block[0, :, :, columns], block[1, :, :, columns]
            found, log_sum = attend(self._query[:, :, rows], key, value, self._call(tile, share))
            self._merge(rows, found, log_sum)

    def merged(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the attention [B, N, Q, D] in the query's type, and its log-sum-exp [B, N, Q] in fp32."""
        if self._result is None:
            raise RuntimeError("a query sees no key, not even its own")
        return self._result.to(self._query.dtype), self._log_sum

    def add_gradients(
        self,
        gradient: torch.Tensor,
        result: torch.Tensor,
        log_sum: torch.Tensor,
        block: torch.Tensor,
        share: SequenceShare,
        query_gradient: torch.Tensor,
    ) -> torch.Tensor:
        """Return the gradient [2, B, K, S, D] (fp32) of `block`; add that of the queries to `query_gradient`.

        `gradient` and `result` are [B, N, Q, D], `log_sum` is [B, N, Q], all of the attention over all keys;
        `query_gradient` [B, N, Q, D] is fp32.
        """
        found = torch.zeros(block.shape, dtype=torch.float32, device=block.device)
        for tile in self._tiles(share):
            rows, columns = slice(*tile.queries), slice(*tile.keys)
            parts = (gradient[:, :, rows], self._query[:, :, rows], block[0, :, :, columns], block[1, :, :, columns])
            of_query, of_key, of_value = attend_backward(
                *parts, result[:, :, rows], log_sum[:, :, rows].contiguous(), self._call(tile, share)
            )
            query_gradient[:, :, rows] += of_query
            found[0, :, :, columns] += of_key
            found[1, :, :, columns] += of_value
        return found

    def _tiles(self, share: SequenceShare) -> tuple[AttentionTile, ...]:
        return attention_tiles(self._share, share, self._rule.documents, self._rule.window)

    def _call(self, tile: AttentionTile, share: SequenceShare) -> AttentionCall:
        if not tile.is_masked:
            return AttentionCall(scale=self._rule.scale, is_causal=tile.is_causal)
        device = self._query.device
        asked = torch.tensor(self._share.positions[slice(*tile.queries)], device=device).unsqueeze(1)
        offered = torch.tensor(share.positions[slice(*tile.keys)], device=device)
        sees = (offered <= asked) & (asked - offered < (self._rule.window or 0))
        return AttentionCall(scale=self._rule.scale, mask=sees)

    def _merge(self, rows: slice, found: torch.Tensor, log_sum: torch.Tensor) -> None:
        """Merge the attention `found` of queries `rows` over one more set of keys."""
        if self._result is None:
            if found.shape[2] == self._query.shape[2]:
                self._result, self._log_sum = found, log_sum
                return
            samples, heads, queries, width = self._query.shape  # in memory by query, as the next product reads it
            by_query = torch.zeros(samples, queries, heads, width, dtype=torch.float32, device=found.device)
            self._result = by_query.transpose(1, 2)
            self._log_sum = torch.full(self._query.shape[:3], torch.finfo(torch.float32).min, device=found.device)
        if self._result.dtype != torch.float32:
            self._result = self._result.float()
        merged, merged_sum = merge_attention(self._result[:, :, rows], self._log_sum[:, :, rows], found, log_sum)
        self._result[:, :, rows], self._log_sum[:, :, rows] = merged, merged_sum


def order_blocks(blocks: Sequence[torch.Tensor], shares: Sequence[SequenceShare]) -> torch.Tensor:
    """Return the tokens of all `blocks` [..., S, D] (by rank, of `shares`) in the order of the sequence [..., T, D]."""
    pieces: list[tuple[int, torch.Tensor]] = []
    for block, share in zip(blocks, shares, strict=True):
        sizes = [end - first for first, end in share.segments]
        pieces += zip((first for first, _ in share.segments), block.split(sizes, -2), strict=True)
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda one: one[0])], -2)


def take_share(whole: torch.Tensor, share: SequenceShare) -> torch.Tensor:
    """Return the tokens of `share` of a whole sequence [..., T, D], contiguous: [..., S, D]."""
    return torch.cat([whole[..., first:end, :] for first, end in share.segments], -2)
