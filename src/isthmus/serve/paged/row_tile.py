"""`RowTile`: a fixed number of rows that a model computes at once, and where their keys and values are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from isthmus.serve.batching.page_pool import SCRATCH_PAGE
from isthmus.serve.batching.step_plan import SequenceRows


@dataclass(frozen=True, kw_only=True)
class RowTile:
    """R rows, each a token of some sequence; rows that pad the tile are token 0 at position 0 of the scratch page.

    `tokens`, `positions` [R]; `write_pages`, `write_slots` [R]: where each row's key and value go; `pages` [R, n]: the
    pages of its sequence from the first on, up to the largest number that a row of the tile needs. `decodes`: the rows
    that decode, as (place in the tile, index of the sequence in the step).
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    write_pages: torch.Tensor
    write_slots: torch.Tensor
    pages: torch.Tensor
    decodes: tuple[tuple[int, int], ...]


def tile_rows(rows: Iterable[SequenceRows], num_rows: int, page_tokens: int, device: torch.device) -> Iterator[RowTile]:
    """Yield the rows of a step in tiles [`num_rows`]; later rows of a sequence are behind earlier ones."""
    tile: list[tuple[int, int, Sequence[int], int | None]] = []
    for index, part in enumerate(rows):
        for offset, token in enumerate(part.tokens):
            last = part.decodes and offset == len(part.tokens) - 1
            tile.append((token, part.begin + offset, part.pages, index if last else None))
            if len(tile) == num_rows:
                yield _make_tile(tile, num_rows, page_tokens, device)
                tile = []
    if tile:
        yield _make_tile(tile, num_rows, page_tokens, device)


def _make_tile(
    rows: list[tuple[int, int, Sequence[int], int | None]], num_rows: int, page_tokens: int, device: torch.device
) -> RowTile:
    rows = [*rows, *[(0, 0, (SCRATCH_PAGE,), None)] * (num_rows - len(rows))]
    width = max(position // page_tokens + 1 for _, position, _, _ in rows)
    pages = [[*one[:width], *[SCRATCH_PAGE] * (width - len(one))] for _, _, one, _ in rows]
    positions = torch.tensor([position for _, position, _, _ in rows])
    table = torch.tensor(pages)
    return RowTile(
        tokens=torch.tensor([token for token, _, _, _ in rows]).to(device),
        positions=positions.to(device),
        write_pages=table[torch.arange(num_rows), positions // page_tokens].to(device),
        write_slots=(positions % page_tokens).to(device),
        pages=table.to(device),
        decodes=tuple((place, index) for place, (_, _, _, index) in enumerate(rows) if index is not None),
    )
