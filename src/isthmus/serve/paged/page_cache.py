"""`PageCache`: keys and values of all layers, in pages, and the experts of each row where they are recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from isthmus.core.model_parts.routing_shape import RoutingShape


class CopiedRows(NamedTuple):
    """The first rows of a sequence in host memory: keys and values [2, layers, rows, KV heads, head size].

    `experts` [rows, layers with a router, experts of a token] are those that the rows chose, None if not recorded.
    """

    rows: torch.Tensor
    experts: torch.Tensor | None = None


class PageCache:
    """Keys and values, each [layers, pages, page tokens, KV heads, head size].

    With `routing` also `experts` [pages, page tokens, layers with a router, experts of a token].
    """

    def __init__(
        self, *, num_layers: int, num_pages: int, page_tokens: int, kv_heads: int, head_size: int,
        dtype: torch.dtype, device: torch.device, routing: RoutingShape | None = None,
    ) -> None:  # fmt: skip
        shape = (num_layers, num_pages, page_tokens, kv_heads, head_size)
        self.page_tokens = page_tokens
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.experts: torch.Tensor | None = None
        if routing is not None:
            kind = torch.uint8 if routing.num_experts <= 256 else torch.int16
            chosen = num_pages, page_tokens, routing.num_layers, routing.num_chosen
            self.experts = torch.zeros(chosen, dtype=kind, device=device)

    def read(self, pages: Sequence[int], num_rows: int) -> CopiedRows:
        """Return a copy of the first rows in `pages`."""
        rows = torch.stack([self._rows(part, pages)[:, :num_rows] for part in (self.keys, self.values)]).cpu()
        return CopiedRows(rows, None if self.experts is None else self.read_experts(pages, range(num_rows)))

    def read_experts(self, pages: Sequence[int], rows: range) -> torch.Tensor:
        """Return a copy in host memory of the experts of `rows` of a sequence in `pages`."""
        if self.experts is None:
            raise RuntimeError("this cache has no experts")
        page, slot = self._places(pages, torch.arange(rows.start, rows.stop, device=self.experts.device))
        return self.experts[page, slot].cpu()

    def write(self, pages: Sequence[int], copied: CopiedRows) -> None:
        """Put rows into `pages` from the first slot on."""
        page, slot = self._places(pages, torch.arange(copied.rows.shape[2], device=self.keys.device))
        for part, new in zip((self.keys, self.values), copied.rows.to(self.keys.device), strict=True):
            part[:, page, slot] = new
        if self.experts is not None and copied.experts is not None:
            self.experts[page, slot] = copied.experts.to(self.experts.device)

    def _places(self, pages: Sequence[int], rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return page and slot of each of `rows` of a sequence in `pages`."""
        return torch.tensor(pages, device=rows.device)[rows // self.page_tokens], rows % self.page_tokens

    @staticmethod
    def _rows(part: torch.Tensor, pages: Sequence[int]) -> torch.Tensor:
        return part[:, torch.tensor(pages, device=part.device)].flatten(1, 2)
