"""`fetch_shards`: fills a rank's tensors with exactly the boxes that it needs, from its own site and from others.

Each rank asks one rank of a store that holds a file for the boxes that its own store lacks; that rank reads and packs
them, and sends them with a checksum. Boxes are cut to pieces of bounded size, so memory is bounded at both ends. All
ranks of an attempt call it at once and serve each other.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field

from isthmus.comm.group.group_work import tensor_bytes
from isthmus.core.base_model import FrozenModel, NonNegativeInt
from isthmus.core.errors import UnavailableError
from isthmus.train.checkpoint.layout.checkpoint_layout import (
    DTYPE_BYTES,
    MAX_LAYOUT_BYTES,
    MAX_SHARDS,
    CheckpointLayout,
    Extents,
    StoredShard,
    parse_bounded,
    refused,
)
from isthmus.train.checkpoint.layout.shard_files import Box, OpenFiles, plan_reads, read_box
from isthmus.train.checkpoint.layout.tensor_shard import TensorShard
from isthmus.train.checkpoint.sites.peer_channel import PeerChannel
from isthmus.train.checkpoint.sites.site_stores import SiteStores

MAX_PIECE_BYTES = 64 << 20
"""Bytes of a box that are packed and sent at once."""

_REQUEST, _DATA, _CHECKSUM = range(16, 19)
"""Topics of the messages."""


class _Piece(FrozenModel):
    """A box of the stored shard `shard`, by its number in the layout."""

    shard: NonNegativeInt
    starts: Extents
    lengths: Extents


class _Request(FrozenModel):
    """The boxes that a rank asks another for, in the order in which they are sent."""

    pieces: Annotated[tuple[_Piece, ...], Field(max_length=4 * MAX_SHARDS)] = ()


@dataclass(frozen=True)
class FetchedBytes:
    """Bytes that a rank needed, and bytes of them that it received from other sites."""

    needed: int
    moved: int


def choose_source(holders: Sequence[int], store: int, stores: SiteStores) -> int:
    """Return the store from which a rank of `store` reads a file: its own, else one of its cluster, else the first."""
    near = stores.site(store)
    return min(holders, key=lambda one: (one != store, stores.site(one) != near, one))


def choose_server(store: int, rank: int, stores: SiteStores) -> int:
    """Return the rank of `store` that serves `rank`; the ranks of a store share the work."""
    ranks = stores.ranks_of(store)
    return ranks[rank % len(ranks)]


def fetch_shards(
    place: Path,
    layout: CheckpointLayout,
    holders: Mapping[str, tuple[int, ...]],
    shards: Sequence[TensorShard],
    *,
    rank: int,
    stores: SiteStores,
    channel: PeerChannel,
) -> FetchedBytes:
    """Fill the tensors of `shards` from the checkpoint in `place` at each site; all ranks call this.

    `layout` has been checked, `holders` are the stores of each file. Raises `UnavailableError` if a tensor is missing
    or of another shape, or if data arrive damaged.
    """
    store = stores.of_rank[rank]
    numbers = {id(one): number for number, one in enumerate(layout.shards)}
    remote: dict[int, list[tuple[_Piece, torch.Tensor]]] = {}
    needed = 0
    peers = [one for one in range(len(stores.of_rank)) if stores.of_rank[one] != store]
    with OpenFiles(place) as files, ThreadPoolExecutor(max(2 * len(peers), 1)) as pool:
        serving = [pool.submit(_serve, place, layout, peer, channel) for peer in peers]
        try:
            for stored, box, target in plan_reads(layout, shards, place):
                needed += target.numel() * DTYPE_BYTES[stored.dtype]
                source = choose_source(holders[stored.file], store, stores)
                if source == store:
                    read_box(files.read_at(stored), stored, box, target)
                    continue
                server = choose_server(source, rank, stores)
                for starts, lengths, part in cut(box, target, stored):
                    piece = _Piece(shard=numbers[id(stored)], starts=starts, lengths=lengths)
                    remote.setdefault(server, []).append((piece, part))
        except UnavailableError:
            remote.clear()
            for peer in peers:
                channel.send_text(peer, _REQUEST, _Request().model_dump_json().encode())
            raise
        asking = [pool.submit(_ask, layout, peer, remote.get(peer, ()), channel) for peer in peers]
        moved = sum(future.result() for future in asking)
        for future in serving:
            future.result()
    return FetchedBytes(needed, moved)


def cut(
    box: Box, target: torch.Tensor, stored: StoredShard
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]]:
    """Yield pieces of at most `MAX_PIECE_BYTES` (one row at least) of a box: start, lengths, view of the target."""
    starts, lengths = box
    if not lengths:
        yield starts, lengths, target
        return
    row_bytes = prod(lengths[1:]) * DTYPE_BYTES[stored.dtype]
    step = max(MAX_PIECE_BYTES // row_bytes, 1)
    for begin in range(0, lengths[0], step):
        number = min(step, lengths[0] - begin)
        yield (starts[0] + begin, *starts[1:]), (number, *lengths[1:]), target.narrow(0, begin, number)


def _ask(
    layout: CheckpointLayout, peer: int, pieces: Sequence[tuple[_Piece, torch.Tensor]], channel: PeerChannel
) -> int:
    """Ask `peer` for boxes and copy them to their targets; return the bytes received."""
    request = _Request(pieces=tuple(piece for piece, _ in pieces))
    channel.send_text(peer, _REQUEST, request.model_dump_json().encode())
    moved = checksum = 0
    for piece, target in pieces:
        dtype = getattr(torch, layout.shards[piece.shard].dtype)
        packed = torch.empty(piece.lengths, dtype=dtype)
        data = tensor_bytes(packed)
        channel.receive_chunks(peer, _DATA, data)
        checksum = zlib.crc32(data, checksum)
        moved += len(data)
        target.copy_(packed)
    if channel.receive_text(peer, _CHECKSUM, 16) != f"{checksum:08x}".encode():
        raise UnavailableError(
            f"the shards that rank {peer} sent have arrived damaged", hint="the job restarts automatically"
        )
    return moved


def _serve(place: Path, layout: CheckpointLayout, peer: int, channel: PeerChannel) -> None:
    """Send `peer` the boxes that it asks for; raise `UnavailableError` if a box is outside its shard."""
    source = f"the request of rank {peer}"
    request = parse_bounded(_Request, channel.receive_text(peer, _REQUEST, MAX_LAYOUT_BYTES), source)
    checksum = 0

    def packed() -> Iterator[memoryview]:
        nonlocal checksum
        for piece in request.pieces:
            stored = _checked(piece, layout, source)
            tensor = torch.empty(piece.lengths, dtype=getattr(torch, stored.dtype))
            read_box(files.read_at(stored), stored, (piece.starts, piece.lengths), tensor)
            data = tensor_bytes(tensor)
            checksum = zlib.crc32(data, checksum)
            yield data

    with OpenFiles(place) as files:
        channel.send_chunks(peer, _DATA, packed())
    channel.send_text(peer, _CHECKSUM, f"{checksum:08x}".encode())


def _checked(piece: _Piece, layout: CheckpointLayout, source: str) -> StoredShard:
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
