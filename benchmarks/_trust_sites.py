"""Checkpoints over three sites without a shared disk: what a save costs training, and what a restore moves.

Three sites are threads of this process with folders of their own, joined in memory; a further thread multiplies
matrices as training does. The stall of a checkpoint is the time in the calls of that thread for the first site: to
begin it, and to wait until the state is copied. All sites share one interpreter here, so their threads also wait for
each other; the same ranks with one shared folder take turns with them for comparison.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch

from benchmarks.table import Row, compared
from isthmus.comm.transport.memory_transport import MemoryTransport, memory_transports
from isthmus.core.errors import PeerError
from isthmus.train.checkpoint.async_checkpoint_writer import AsyncCheckpointWriter
from isthmus.train.checkpoint.checkpoint_folder import checkpoint_name, read_layout, read_manifests
from isthmus.train.checkpoint.layout.tensor_shard import TensorShard
from isthmus.train.checkpoint.sites.fetch_shards import FetchedBytes, fetch_shards
from isthmus.train.checkpoint.sites.kept_pieces import KeptPieces, remove_kept_pieces
from isthmus.train.checkpoint.sites.peer_channel import PeerChannel
from isthmus.train.checkpoint.sites.site_publisher import SitePublisher
from isthmus.train.checkpoint.sites.site_stores import SiteStores

STALL_MS, MOVED = 10.0, 1.05
SITES = ("north", "south", "west")
COLUMNS = 2048
ROWS = 3 * 2048


def measure(quick: bool) -> list[Row]:
    """Return the rows: stall per GB saved, its CPU, and bytes moved over bytes needed at two other sites."""
    torch.set_num_threads(1)
    tensors, rounds = (16, 3) if quick else (32, 6)
    with tempfile.TemporaryDirectory(prefix="isthmus-sites-") as root:
        both: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for step in range(rounds + 1):  # the first one warms up
            for apart, found in both.items():
                found.append(_save(Path(root), tensors, step + 1, apart=apart))
        stalls, cpu = zip(*both[True][1:], strict=True)
        shared, shared_cpu = zip(*both[False][1:], strict=True)
        fetched = _restore(Path(root), tensors)
        cut = _restore(Path(root), tensors, num_sent=fetched.needed // 4)
        again = _restore(Path(root), tensors)
    stall_ms = statistics.median(stalls) * 1e3
    ratio, cut_ratio = fetched.moved / fetched.needed, (cut.moved + again.moved) / again.needed
    share = cut.moved / again.needed
    spread = f"{min(stalls) * 1e3:.3g} to {max(stalls) * 1e3:.3g} ms in {rounds}"
    return [
        compared(
            "checkpoint over three sites without shared storage: stall per GB of a site", stall_ms, "ms",
            "one shared folder, no copies", statistics.median(shared) * 1e3,
            target=f"at most {STALL_MS:g}; here {spread}", met=stall_ms <= STALL_MS,
        ),
        compared(
            "the same, CPU of all threads per GB, with one copy", statistics.median(cpu), "s",
            "one shared folder, no copies", statistics.median(shared_cpu),
        ),
        Row(
            what="restore on two other sites: bytes moved over bytes needed",
            ours=ratio, unit="", target=f"at most {MOVED:g}", met=ratio <= MOVED,
        ),
        Row(
            what=f"the same, sending sites lost after {share:.0%} of the bytes, and a second attempt: both together",
            ours=cut_ratio, unit="", target=f"at most {MOVED:g}", met=cut_ratio <= MOVED,
        ),
    ]  # fmt: skip


def _rows(rank: int, size: int, tensors: int) -> list[TensorShard]:
    """Return the rows of each tensor that a rank holds."""
    begin, end = ROWS * rank // size, ROWS * (rank + 1) // size
    return [
        TensorShard(f"weight/{number}", (ROWS, COLUMNS), (begin, 0), torch.full((end - begin, COLUMNS), float(number)))
        for number in range(tensors)
    ]


def _save(root: Path, tensors: int, step: int, *, apart: bool) -> tuple[float, float]:
    """Save at three sites, or in one folder if not `apart`; return stall and CPU in seconds per GB."""
    transports = memory_transports(len(SITES))
    stores = SiteStores((0, 1, 2), SITES)
    shards = [_rows(rank, len(SITES), tensors) for rank in range(len(SITES))]
    writers = []
    for rank, site in enumerate(SITES):
        folder, channel = root / (site if apart else "shared"), PeerChannel(transports[rank])
        publisher = SitePublisher(folder, rank, stores, channel, write_id=f"{step:x}", copies=1, keep=1)
        writers.append(
            AsyncCheckpointWriter(
                folder,
                rank=rank,
                num_ranks=len(SITES),
                write_id=f"{step:x}",
                keep=1,
                site_publisher=publisher if apart else None,
            )
        )
    gigabytes = sum(one.tensor.nbytes for one in shards[0]) / 1e9
    left, right = torch.randn(1024, 1024), torch.randn(1024, 1024)
    cpu_s, stall_s = time.process_time(), 0.0
    for rank, writer in enumerate(writers):
        start_s = time.perf_counter()
        writer.begin(step, step, shards[rank], lambda: None)
        stall_s += time.perf_counter() - start_s if rank == 0 else 0.0
    compute_s = time.thread_time()
    for _ in range(40):
        torch.mm(left, right)
    compute_s = time.thread_time() - compute_s
    start_s = time.perf_counter()
    writers[0].wait_copied()
    stall_s += time.perf_counter() - start_s
    for writer in writers:
        writer.wait()
        writer.close()
    for transport in transports:
        transport.close()
    return stall_s / gigabytes, (time.process_time() - cpu_s - compute_s) / (gigabytes * len(SITES))


class _Cut:
    """A transport whose site is lost once it has sent `num_sent` bytes."""

    def __init__(self, inner: MemoryTransport, num_sent: int) -> None:
        self._inner, self._left_bytes = inner, num_sent
        self.receive = inner.receive

    def send(self, peer: int, tag: int, label: str, payload: memoryview) -> Future[None]:
        self._left_bytes -= len(payload)
        if self._left_bytes < 0:
            self._inner.kill()
            self._inner.close()
        return self._inner.send(peer, tag, label, payload)


def _restore(root: Path, tensors: int, num_sent: int | None = None) -> FetchedBytes:
    """Restore at two new sites beside one that has stayed and keeps a copy of another; return the bytes of the new.

    With `num_sent` each old site is lost after so many bytes; what has arrived is kept for the next attempt, which
    removes it. The bytes moved are those that the transports of the new sites count.
    """
    manifest = next(read_manifests(root / SITES[0]))
    layout = read_layout(root / SITES[0] / checkpoint_name(manifest.step), manifest)
    transports = memory_transports(4)
    clusters = ("east", "centre", SITES[0], SITES[1])
    stores = SiteStores((0, 1, 2, 3), clusters)
    places = [root / site / checkpoint_name(manifest.step) for site in clusters]
    holders = {
        one.name: tuple(store for store in (2, 3) if (places[store] / one.name).is_file()) for one in manifest.files
    }

    def fetch(rank: int) -> int:
        shards = _rows(rank, 2, tensors) if rank < 2 else []
        for one in shards:
            one.tensor.zero_()
        cut = num_sent is not None and rank > 1
        channel = PeerChannel(_Cut(transports[rank], num_sent) if cut else transports[rank])  # type: ignore[arg-type]
        with suppress(PeerError), KeptPieces(root / clusters[rank], manifest, layout, rank) as kept:
            fetched = fetch_shards(
                places[rank], layout, holders, shards, rank=rank, stores=stores, channel=channel, kept=kept
            )
            assert all(bool((one.tensor == float(number)).all()) for number, one in enumerate(shards))
            return fetched.needed
        assert num_sent is not None
        return 0

    with ThreadPoolExecutor(4) as pool:
        needed = sum(pool.map(fetch, range(4)))
    for transport in transports:
        transport.close()
    for site in clusters[:2] if num_sent is None else ():
        remove_kept_pieces(root / site)
    return FetchedBytes(
        needed, sum(one.received_bytes for rank in (0, 1) for one in transports[rank].traffic().values())
    )
