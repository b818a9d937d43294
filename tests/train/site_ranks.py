"""Ranks of sites without a shared disk as threads of one process: one folder per site, joined in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from isthmus.comm.group.isthmus_group import IsthmusGroup
from isthmus.comm.transport.memory_transport import MemoryTransport, memory_transports
from isthmus.comm.transport.transport import Transport
from isthmus.train.checkpoint.layout.tensor_shard import TensorShard
from isthmus.train.checkpoint.objects.object_copies import ObjectCopies
from isthmus.train.checkpoint.sites.fetch_shards import FetchedBytes, fetch_shards
from isthmus.train.checkpoint.sites.kept_pieces import KeptPieces
from isthmus.train.checkpoint.sites.peer_channel import PeerChannel
from isthmus.train.checkpoint.sites.site_publisher import SitePublisher
from isthmus.train.checkpoint.sites.site_recovery import complete_unfinished, find_checkpoint
from isthmus.train.checkpoint.sites.site_stores import SiteStores, find_stores
from isthmus.train.checkpoint.write_checkpoint import write_rank_part
from isthmus.train.communication.communicator import Communicator

Value = TypeVar("Value")
LIMIT_S = 20.0
Meet = Callable[..., "Sites"]


class ThreadCommunicator(Communicator):
    """Collectives over a group that is not torch's default one, of which a process has only one."""

    def __init__(self, clusters: Sequence[str], transport: MemoryTransport) -> None:
        super().__init__(clusters, transport.rank)
        self.group = IsthmusGroup(transport, list(clusters))

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.group.size())]
        self.group.allgather([parts], [tensor]).wait()
        return parts

    def broadcast_from_first(self, numbers: Sequence[int]) -> list[int]:
        values = torch.tensor(numbers, dtype=torch.int64)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self.group.broadcast([values], options).wait()
        return [int(one) for one in values.tolist()]


class Rank:
    """A rank at a site: its folder, which ranks share it, and how it reaches the others."""

    def __init__(self, folder: Path, clusters: Sequence[str], transport: MemoryTransport) -> None:
        self.rank, self.folder, self.transport = transport.rank, folder, transport
        self.communicator = ThreadCommunicator(clusters, transport)
        self.pass_files_over(transport)
        self.stores = SiteStores((), ())

    def pass_files_over(self, transport: Transport) -> None:
        """Send files of checkpoints over `transport` from now on."""
        self.channel = PeerChannel(transport, chunk_bytes=1 << 12, sleep=lambda _: None)

    def save(self, step: int, shards: Sequence[TensorShard], **options: Any) -> None:
        """Write this rank's part and complete the checkpoint with the other ranks."""
        write_id = options.pop("write_id", "a1")
        publisher = SitePublisher(
            self.folder, self.rank, self.stores, self.channel,
            **({"write_id": write_id, "copies": 1, "keep": 2} | options),
        )  # fmt: skip
        write_rank_part(self.folder, shards, step=step, rank=self.rank, write_id=write_id)
        publisher.complete(step, step * 8)


class Sites:
    """The ranks of one attempt; rank r is at the site `clusters[r]`, whose folder is below `root`."""

    def __init__(self, root: Path, clusters: Sequence[str]) -> None:
        self.transports = memory_transports(len(clusters))
        self.ranks = [Rank(root / site, clusters, one) for site, one in zip(clusters, self.transports, strict=True)]
        self._pool = ThreadPoolExecutor(len(clusters))

        def meet(one: Rank) -> None:
            one.folder.mkdir(parents=True, exist_ok=True)
            one.stores = find_stores(one.folder, one.rank, clusters, one.communicator)

        self.each(meet)

    def each(self, work: Callable[[Rank], Value]) -> list[Value]:
        """Let all ranks do `work` at once; return what they return, by rank."""
        futures = [self._pool.submit(work, one) for one in self.ranks]
        return [one.result(LIMIT_S) for one in futures]

    def close(self) -> None:
        for one in self.transports:
            one.close()
        self._pool.shutdown(wait=False, cancel_futures=True)


ROWS = 6
ROW_BYTES = 16
"""A row of the tensor, which is a piece here."""


def state(step: int) -> torch.Tensor:
    """The whole tensor after `step` steps."""
    return torch.arange(ROWS * 4.0).view(ROWS, 4) + 100 * step


def part_of(rank: int, size: int, step: int) -> TensorShard:
    """The rows of a rank."""
    begin, end = ROWS * rank // size, ROWS * (rank + 1) // size
    return TensorShard("weight/a", (ROWS, 4), (begin, 0), state(step)[begin:end].clone())


def save(sites: Sites, step: int, **options: Any) -> None:
    """Let all ranks save their rows."""
    size = len(sites.ranks)
    sites.each(lambda one: one.save(step, [part_of(one.rank, size, step)], **options))


def restore(sites: Sites, objects: ObjectCopies | None = None) -> list[tuple[int, FetchedBytes]]:
    """Let all ranks restore their rows; check them; return step and bytes of each."""
    size = len(sites.ranks)

    def load(one: Rank) -> tuple[int, FetchedBytes]:
        complete_unfinished(one.folder, one.rank, one.stores, one.communicator, objects)
        found = find_checkpoint(one.folder, one.rank, one.stores, one.communicator, objects)
        if found is None:
            return 0, FetchedBytes(0, 0)
        step = found.manifest.step
        shard = part_of(one.rank, size, 0)
        place = one.folder / f"step-{step:08d}"
        with KeptPieces(one.folder, found.manifest, found.layout, one.rank) as kept:
            fetched = fetch_shards(
                place, found.layout, found.holders, [shard],
                rank=one.rank, stores=one.stores, channel=one.channel, kept=kept, piece_bytes=ROW_BYTES,
                objects=objects.reader(found.manifest) if objects else None,
            )  # fmt: skip
        assert torch.equal(shard.tensor, part_of(one.rank, size, step).tensor)
        return step, fetched

    return sites.each(load)
