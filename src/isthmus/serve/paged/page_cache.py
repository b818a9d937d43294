"""`PageCache`: keys and values of all layers, in pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class PageCache:
    """Keys and values, each [layers, pages, page tokens, KV heads, head size]."""

    def __init__(
        self, *, num_layers: int, num_pages: int, page_tokens: int, kv_heads: int, head_size: int,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        shape = (num_layers, num_pages, page_tokens, kv_heads, head_size)
        self.page_tokens = page_tokens
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def read(self, pages: Sequence[int], num_rows: int) -> torch.Tensor:
        """Return a copy in host memory of the first rows in `pages`, [2, layers, rows, KV heads, head size]."""
        return torch.stack([self._rows(part, pages)[:, :num_rows] for part in (self.keys, self.values)]).cpu()

    def write(self, pages: Sequence[int], rows: torch.Tensor) -> None:
        """Put `rows` [2, layers, rows, KV heads, head size] into `pages` from the first slot on."""
        num_rows = rows.shape[2]
        places = torch.arange(num_rows, device=self.keys.device)
        page = torch.tensor(pages, device=self.keys.device)[places // self.page_tokens]
        for part, new in zip((self.keys, self.values), rows.to(self.keys.device), strict=True):
            part[:, page, places % self.page_tokens] = new

    @staticmethod
    def _rows(part: torch.Tensor, pages: Sequence[int]) -> torch.Tensor:
        return part[:, torch.tensor(pages, device=part.device)].flatten(1, 2)
