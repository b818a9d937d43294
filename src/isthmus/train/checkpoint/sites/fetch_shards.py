"""`fetch_shards`: fills a rank's tensors with exactly the boxes that it needs, from its own site and from others.

Each rank asks one rank of a store that holds a file for the boxes that its own store lacks; that rank reads and packs
them, and sends them in pieces of bounded size, each with a checksum. A verified piece goes to the receiver's disk
(`kept_pieces.py`), so a fetch that is cut goes on from there. All ranks of an attempt call it at once and serve each
other.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field

from isthmus.comm.group.group_work import tensor_bytes
from isthmus.comm.transport.transport import Arrival
from isthmus.core.base_model import FrozenModel
from isthmus.core.errors import UnavailableError
from isthmus.train.checkpoint.layout.checkpoint_layout import (
    DTYPE_BYTES,
    MAX_LAYOUT_BYTES,
    MAX_SHARDS,
    CheckpointLayout,
    parse_bounded,
)
from isthmus.train.checkpoint.layout.shard_files import OpenFiles, plan_reads, read_box
from isthmus.train.checkpoint.layout.tensor_shard import TensorShard
from isthmus.train.checkpoint.objects.object_copies import ObjectReader
from isthmus.train.checkpoint.sites.kept_pieces import KeptPieces
from isthmus.train.checkpoint.sites.peer_channel import PeerChannel
from isthmus.train.checkpoint.sites.pieces import MAX_PIECE_BYTES, Piece, check_piece, cut_pieces, piece_buffer
from isthmus.train.checkpoint.sites.site_stores import SiteStores

_REQUEST, _DATA = 16, 17
"""Topics of the messages."""

_CHECKSUM_BYTES = 4
_NUM_POSTED = 4
"""Pieces whose receives are posted at once."""

OBJECT_STORE = -1
"""Stands for the object store where ranks serve pieces."""

Wanted = tuple[Piece, torch.Tensor]
"""A piece, and where its elements go."""


class _Request(FrozenModel):
    """The boxes that a rank asks another for, in the order in which they are sent."""

    pieces: Annotated[tuple[Piece, ...], Field(max_length=4 * MAX_SHARDS)] = ()


@dataclass(frozen=True)
class FetchedBytes:
    """Bytes that a rank needed; of them those received from other sites, and those kept by an earlier attempt."""

    needed: int
    moved: int
    kept: int = 0


def choose_source(holders: Sequence[int], store: int, stores: SiteStores) -> int | None:
    """Return the store from which a rank of `store` reads a file: its own, else one of its cluster, else the first.

    None: only the object store has it.
    """
    if not holders:
        return None
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
    kept: KeptPieces,
    objects: ObjectReader | None = None,
    piece_bytes: int = MAX_PIECE_BYTES,
) -> FetchedBytes:
    """Fill the tensors of `shards` from the checkpoint in `place` at each site; all ranks call this.

    `layout` has been checked, `holders` are the stores of each file. Pieces from other sites are taken from `kept`, or
    added to it, and so are those that only the object store has, read by `objects`; they have at most `piece_bytes`, or
    one row. Raises `UnavailableError` if a tensor is missing or of another shape, or if data arrive damaged.
    """
    store = stores.of_rank[rank]
    numbers = {id(one): number for number, one in enumerate(layout.shards)}
    remote: dict[int, list[Wanted]] = {}
    needed = num_kept = 0
    peers = [one for one in range(len(stores.of_rank)) if stores.of_rank[one] != store]
    with OpenFiles(place) as files, ThreadPoolExecutor(2 * len(peers) + 1) as pool:
        serving = [pool.submit(_serve, place, layout, peer, channel) for peer in peers]
        try:
            for stored, box, target in plan_reads(layout, shards, place):
                needed += target.numel() * DTYPE_BYTES[stored.dtype]
                source = choose_source(holders.get(stored.file, ()), store, stores)
                if source == store:
                    read_box(files.read_at(stored), stored, box, target)
                    continue
                server = OBJECT_STORE if source is None else choose_server(source, rank, stores)
                for piece, part in cut_pieces(numbers[id(stored)], stored, box, target, piece_bytes):
                    if kept.fill(piece, part):
                        num_kept += part.numel() * DTYPE_BYTES[stored.dtype]
                    else:
                        remote.setdefault(server, []).append((piece, part))
        except UnavailableError:
            remote.clear()
            for peer in peers:
                channel.send_text(peer, _REQUEST, _Request().model_dump_json().encode())
            raise
        asking = [pool.submit(_ask, layout, peer, remote.get(peer, ()), channel, kept) for peer in peers]
        if objects is not None:
            asking.append(pool.submit(_read_objects, layout, remote.get(OBJECT_STORE, ()), objects, kept))
        moved = sum(future.result() for future in asking)
        for future in serving:
            future.result()
    return FetchedBytes(needed, moved, num_kept)


def _ask(layout: CheckpointLayout, peer: int, wanted: Sequence[Wanted], channel: PeerChannel, kept: KeptPieces) -> int:
    """Ask `peer` for pieces, copy them to their targets and keep them; return the bytes received."""
    posted: deque[tuple[torch.Tensor, memoryview, list[Future[Arrival]]]] = deque()

    def post(piece: Piece) -> None:
        packed, checksum = piece_buffer(piece, layout), memoryview(bytearray(_CHECKSUM_BYTES))
        futures = channel.post_chunks(peer, _DATA, tensor_bytes(packed)) + channel.post_chunks(peer, _DATA, checksum)
        posted.append((packed, checksum, futures))

    for piece, _ in wanted[:_NUM_POSTED]:
        post(piece)
    request = _Request(pieces=tuple(piece for piece, _ in wanted))
    channel.send_text(peer, _REQUEST, request.model_dump_json().encode())
    moved = 0
    for number, (piece, target) in enumerate(wanted):
        packed, checksum, futures = posted.popleft()
        for future in futures:
            future.result()
        data = tensor_bytes(packed)
        if zlib.crc32(data).to_bytes(_CHECKSUM_BYTES) != checksum:
            raise UnavailableError(
                f"the shards that rank {peer} sent have arrived damaged", hint="the job restarts automatically"
            )
        kept.keep(piece, data)
        moved += len(data)
        target.copy_(packed)
        if number + _NUM_POSTED < len(wanted):
            post(wanted[number + _NUM_POSTED][0])
    return moved


def _read_objects(layout: CheckpointLayout, wanted: Sequence[Wanted], objects: ObjectReader, kept: KeptPieces) -> int:
    """Read pieces from the object store, copy them to their targets and keep them; return the bytes read."""
    for piece, target in wanted:
        packed, stored = piece_buffer(piece, layout), layout.shards[piece.shard]
        read_box(objects.read_at(stored), stored, (piece.starts, piece.lengths), packed)
        kept.keep(piece, tensor_bytes(packed))
        target.copy_(packed)
    return objects.num_bytes


def _serve(place: Path, layout: CheckpointLayout, peer: int, channel: PeerChannel) -> None:
    """Send `peer` the pieces that it asks for; raise `UnavailableError` if one is outside its shard."""
    source = f"the request of rank {peer}"
    request = parse_bounded(_Request, channel.receive_text(peer, _REQUEST, MAX_LAYOUT_BYTES), source)

    def packed() -> Iterator[memoryview]:
        for piece in request.pieces:
            stored = check_piece(piece, layout, source)
            tensor = piece_buffer(piece, layout)
            read_box(files.read_at(stored), stored, (piece.starts, piece.lengths), tensor)
            data = tensor_bytes(tensor)
            yield data
            yield memoryview(zlib.crc32(data).to_bytes(_CHECKSUM_BYTES))

    with OpenFiles(place) as files:
        channel.send_chunks(peer, _DATA, packed())
