"""`attention_tiles`: the products of queries and keys that causal attention needs between two shares of a sequence.

Shares are made of segments of positions, so the needed products form rectangles; a kernel computes each of them whole,
as a causal square, or under a mask where a sliding window cuts it. Products that no query needs are left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from isthmus.train.context_parallel.sequence_shares import SequenceShare


@dataclass(frozen=True, kw_only=True)
class AttentionTile:
    """Rows `queries` (first, end) of a rank's queries times rows `keys` of a block of keys."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    # Whether query i sees keys up to i: queries and keys are the same positions.
    is_causal: bool = False
    # Whether a sliding window excludes some products.
    is_masked: bool = False


def attention_tiles(
    queries: SequenceShare, keys: SequenceShare, documents: Sequence[int], window: int | None = None
) -> tuple[AttentionTile, ...]:
    """Return the tiles of causal attention of `queries` on `keys`, in a fixed order.

    `documents` are the ends of the sequence's documents, 0 first: attention stays inside a document. With `window` a
    query sees that number of tokens, its own included.
    """
    found: list[AttentionTile] = []
    for first, end in itertools.pairwise(documents):
        asked, offered = _rows_of(queries, first, end), _rows_of(keys, first, end)
        if asked and asked == offered:
            rows = asked[0][0], asked[-1][0] + asked[-1][2] - asked[-1][1]
            found.append(AttentionTile(queries=rows, keys=rows, is_causal=True))
        elif asked and offered:
            found += _merge(_segment_tiles(asked, offered))
    if window is None:
        return tuple(found)
    return tuple(_cut_by_window(found, queries.positions, keys.positions, window))


_Piece = tuple[int, int, int]
"""(row, first position, end position) of a segment."""


def _rows_of(share: SequenceShare, first: int, end: int) -> list[_Piece]:
    """Return the pieces of `share` inside the positions [first, end)."""
    found, row = [], 0
    for start, stop in share.segments:
        low, high = max(start, first), min(stop, end)
        if low < high:
            found.append((row + low - start, low, high))
        row += stop - start
    return found


def _segment_tiles(asked: Iterable[_Piece], offered: Sequence[_Piece]) -> Iterator[AttentionTile]:
    """Yield the tiles of each query segment: all earlier keys, a causal square, and the queries behind it."""
    for row, start, stop in asked:
        earlier = [(at, low, min(high, start)) for at, low, high in offered if low < start]
        if earlier:
            at, low, high = earlier[-1]
            yield AttentionTile(queries=(row, row + stop - start), keys=(earlier[0][0], at + high - low))
        for at, low, high in offered:
            first, last = max(low, start), min(high, stop)
            if first < last:
                rows, columns = row + first - start, at + first - low
                size = last - first
                yield AttentionTile(queries=(rows, rows + size), keys=(columns, columns + size), is_causal=True)
                if last < stop:
                    yield AttentionTile(queries=(rows + size, row + stop - start), keys=(columns, columns + size))


def _merge(tiles: Iterable[AttentionTile]) -> Iterator[AttentionTile]:
    """Yield `tiles`, neighbouring queries of the same whole keys in one."""
    last: AttentionTile | None = None
    for tile in tiles:
        is_same = last is not None and last.keys == tile.keys and last.queries[1] == tile.queries[0]
        if last is not None and is_same and not (last.is_causal or tile.is_causal):
            last = replace(last, queries=(last.queries[0], tile.queries[1]))
            continue
        if last is not None:
            yield last
        last = tile
    if last is not None:
        yield last


def _cut_by_window(
    tiles: Iterable[AttentionTile], queries: Sequence[int], keys: Sequence[int], window: int
) -> Iterator[AttentionTile]:
    """Yield the tiles that a window leaves, marked where it cuts them; `queries` and `keys` are positions by row."""
    for tile in tiles:
        first_query, last_query = queries[tile.queries[0]], queries[tile.queries[1] - 1]
        first_key, last_key = keys[tile.keys[0]], keys[tile.keys[1] - 1]
        if tile.is_causal or first_query - last_key < window:
            yield replace(tile, is_masked=last_query - first_key >= window)
