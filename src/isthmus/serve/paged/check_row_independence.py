"""`check_row_independence`: a row's logits have the same bits at every place of a tile, whatever the other rows are."""

from __future__ import annotations

import torch

from isthmus.core.errors import InputError
from isthmus.serve.paged.page_cache import PageCache
from isthmus.serve.paged.row_model import RowModel
from isthmus.serve.paged.row_tile import RowTile

PROBE_TOKENS = (0, 1, 2)
"""Tokens that are computed at each place; those of the vocabulary's end are their neighbours."""


def check_row_independence(model: RowModel, num_rows: int) -> None:
    """Raise `InputError` unless tiles of `num_rows` rows are computed row by row alike on this machine.

    Kernels may compute the ends of a tensor by other instructions than its middle, so that the same row has other bits
    at another place; nothing can be promised then.
    """
    cache = model.make_cache(num_pages=num_rows, page_tokens=1)
    for probe in PROBE_TOKENS:
        token = min(probe, model.num_tokens - 1)
        alike = _logits(model, cache, [token] * num_rows)
        if not bool((alike == alike[:1]).all()):
            _refuse(num_rows)
        for place in {0, num_rows // 2, num_rows - 1}:
            tokens = [(model.num_tokens - 1 - at) % model.num_tokens for at in range(num_rows)]
            tokens[place] = token
            if not bool((_logits(model, cache, tokens)[place] == alike[0]).all()):
                _refuse(num_rows)


def _logits(model: RowModel, cache: PageCache, tokens: list[int]) -> torch.Tensor:
    """Return the logits [R, V] of these tokens, each at position 0 of a page of its own."""
    pages = torch.arange(len(tokens), device=model.device)
    tile = RowTile(
        tokens=torch.tensor(tokens, device=model.device), positions=torch.zeros_like(pages), write_pages=pages,
        write_slots=torch.zeros_like(pages), pages=pages[:, None], decodes=(),
    )  # fmt: skip
    return model.logits(model.forward(tile, cache))


def _refuse(num_rows: int) -> None:
    raise InputError(
        f"in tiles of {num_rows} rows this model's logits depend on a row's place",
        hint="use tile_rows: 1, or sizes of the model that are multiples of 32",
    )
