"""`Piece`: a box of a stored shard of bounded size, the unit in which sites send each other shards and keep them."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch

from isthmus.core.base_model import FrozenModel, NonNegativeInt
from isthmus.train.checkpoint.layout.checkpoint_layout import (
    DTYPE_BYTES,
    CheckpointLayout,
    Extents,
    StoredShard,
    refused,
)
from isthmus.train.checkpoint.layout.shard_files import Box

MAX_PIECE_BYTES = 8 << 20
"""Bytes of a box that are packed and sent at once: what a cut costs, and what memory both ends take."""


class Piece(FrozenModel):
    """A box of the stored shard `shard`, by its number in the layout."""

    shard: NonNegativeInt
    starts: Extents
    lengths: Extents

    def contains(self, other: Piece) -> bool:
        """Return whether `other` is a part of this box."""
        return self.shard == other.shard and all(
            start <= at and at + length <= start + size
            for start, size, at, length in zip(self.starts, self.lengths, other.starts, other.lengths, strict=True)
        )


def cut_pieces(
    shard: int, stored: StoredShard, box: Box, target: torch.Tensor, max_bytes: int
) -> Iterator[tuple[Piece, torch.Tensor]]:
    """Yield a box in pieces of at most `max_bytes` (one row at least), each with its view of the target."""
    starts, lengths = box
    if not lengths:
        yield Piece(shard=shard, starts=starts, lengths=lengths), target
        return
    row_bytes = prod(lengths[1:]) * DTYPE_BYTES[stored.dtype]
    step = max(max_bytes // row_bytes, 1)
    for begin in range(0, lengths[0], step):
        number = min(step, lengths[0] - begin)
        piece = Piece(shard=shard, starts=(starts[0] + begin, *starts[1:]), lengths=(number, *lengths[1:]))
        yield piece, target.narrow(0, begin, number)


def piece_buffer(piece: Piece, layout: CheckpointLayout) -> torch.Tensor:
    """Return an uninitialised tensor of a piece's shape and data type."""
    return torch.empty(piece.lengths, dtype=getattr(torch, layout.shards[piece.shard].dtype))


def check_piece(piece: Piece, layout: CheckpointLayout, source: str) -> StoredShard:
    """Return the shard of a piece; raise `UnavailableError` if the piece is not a part of it of bounded size."""
    if piece.shard >= len(layout.shards):
        raise refused(source, f"there is no shard {piece.shard}")
    stored = layout.shards[piece.shard]
    inside = len(piece.starts) == len(piece.lengths) == len(stored.sizes) and all(
        length > 0 and start + length <= size
        for start, length, size in zip(piece.starts, piece.lengths, stored.sizes, strict=True)
    )
    rows = piece.lengths[0] if piece.lengths else 1
    num_bytes = prod(piece.lengths) * DTYPE_BYTES[stored.dtype]
    if not inside or (rows > 1 and num_bytes > MAX_PIECE_BYTES):
        raise refused(source, f"the box at {piece.starts} of {piece.lengths} is no part of '{stored.name}' to send")
    return stored
