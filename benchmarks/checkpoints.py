"""What a checkpoint costs training: `python -m benchmarks.checkpoints [--json] [--quick]`.

One thread computes: matrix products, then an update of every tensor of a 1 GB state. The ways to save that
state take turns. The peer is the better of two: `async_save` as it is, and staging in a thread that the update
waits for. `lost` is how much longer three steps with checkpoints take than three plain ones; `inside` is the
time in calls and waits. The time that the system takes to write a new file, whatever the program, has a row of
its own, because the peer overwrites its previous file. A round counts if the computing thread had a core for
97 % of its plain steps; the rows give the median and the extremes of the rounds that count.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from benchmarks.table import Row, compared, print_rows
from isthmus.train.checkpoint.async_checkpoint_writer import AsyncCheckpointWriter
from isthmus.train.checkpoint.checkpoint_folder import load_shards, newest_valid
from isthmus.train.checkpoint.layout.tensor_shard import TensorShard
from isthmus.train.checkpoint.memory_checkpoint import MemoryCheckpoint

PEER = "torch.distributed.checkpoint"
NUM_STEPS = 3
COMPUTE_S = 1.0
HAD_A_CORE = 0.97
STALL_MS, RESTORE_S = 10.0, 2.0

Tensors = dict[str, torch.Tensor]


def state_of(gigabytes: float) -> Tensors:
    """Weights and two moments, in tensors of 16.8 MB."""
    num = max(round(gigabytes * 1e9 / 2048**2 / 4), 1)
    return {f"weight/{number}": torch.full((2048, 2048), float(number)) for number in range(num)}


class Training:
    """A thread that computes as training does: products from operands of its own, then an in-place update."""

    def __init__(self, state: Tensors) -> None:
        self.state = state
        self.gigabytes = sum(one.nbytes for one in state.values()) / 1e9
        self._left = self._right = torch.randn(1024, 1024)
        self._num_products = 1
        self._products()
        start_s = time.perf_counter()
        self._products()
        self._num_products = max(round(COMPUTE_S / (time.perf_counter() - start_s)), 1)

    def step(self, settle: Callable[[], None] = lambda: None) -> float:
        """Compute one step; return what `settle`, called before the update, took, in seconds."""
        self._products()
        start_s = time.perf_counter()
        settle()
        waited_s = time.perf_counter() - start_s
        torch._foreach_add_(list(self.state.values()), 1.0)
        return waited_s

    def _products(self) -> None:
        for _ in range(self._num_products):
            torch.mm(self._left, self._right)


@dataclass
class Cost:
    """What was measured of one way to save: seconds per GB of one checkpoint, a value per round."""

    lost_s: list[float] = field(default_factory=list)
    inside_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Measured:
    """Three steps: wall time, CPU time of all other threads, time in calls and waits, all in seconds."""

    wall_s: float
    other_cpu_s: float
    inside_s: float
    had_a_core: float


def measured(training: Training, begin: Callable[[int], None], settle: Callable[[], None]) -> Measured:
    """Run three steps; `begin` is called before each with its number, `settle` before each update."""
    wall_s, thread_s, process_s = time.perf_counter(), time.thread_time(), time.process_time()
    inside_s = 0.0
    for number in range(NUM_STEPS):
        start_s = time.perf_counter()
        begin(number)
        inside_s += time.perf_counter() - start_s + training.step(settle)
    wall_s, thread_s = time.perf_counter() - wall_s, time.thread_time() - thread_s
    return Measured(wall_s, time.process_time() - process_s - thread_s, inside_s, thread_s / wall_s)


def cpu_of(work: Callable[[], object]) -> float:
    """Return the CPU seconds that this process spends until `work` returns."""
    cpu_s = time.process_time()
    work()
    return time.process_time() - cpu_s


def nothing(*_: object) -> None:
    """Neither saved nor waited for."""


class Ways:
    """The ways to save, each with its files below `folder`."""

    def __init__(self, training: Training, folder: Path) -> None:
        self.training, self.folder = training, folder
        self.memory = MemoryCheckpoint(f"benchmark-{os.getpid()}", 0)
        self.writer = AsyncCheckpointWriter(folder / "ours", rank=0, num_ranks=1, write_id="1", keep=1)
        self._stager = DefaultStager(StagingOptions(False, False, True, False))
        self._step = 0

    def into_memory(self) -> tuple[Measured, float, int]:
        """A snapshot at every step."""
        one = measured(self.training, self._take, self.memory.wait)
        return one, cpu_of(self.memory.wait), NUM_STEPS

    def onto_disk(self) -> tuple[Measured, float, int]:
        """A checkpoint at the first of the steps."""
        one = measured(self.training, self._begin, self.writer.wait_copied)
        return one, cpu_of(self.writer.wait), 1

    def by_peer(self) -> tuple[Measured, float, int]:
        """`async_save` at the first of the steps."""
        under_way: list[Future[Any]] = []

        def begin(number: int) -> None:
            if number == 0:
                under_way.append(dcp.async_save(self.training.state, storage_writer=self._peer_writer()))

        one = measured(self.training, begin, nothing)
        return one, cpu_of(under_way[0].result), 1

    def by_peer_in_thread(self) -> tuple[Measured, float, int]:
        """`async_save` with asynchronous staging, which must have ended before the update."""
        under_way: list[Any] = []

        def begin(number: int) -> None:
            if number == 0:
                writer = self._peer_writer()
                under_way.append(dcp.async_save(self.training.state, storage_writer=writer, async_stager=self._stager))

        one = measured(self.training, begin, lambda: under_way[0].staging_completion.result())
        return one, cpu_of(under_way[0].upload_completion.result), 1

    def plainly(self) -> float:
        """Write as many bytes into a new file and nothing else; return the CPU seconds per GB."""
        file = self.folder / "plain"

        def write() -> None:
            with file.open("wb", buffering=0) as stream:
                for tensor in self.training.state.values():
                    stream.write(tensor.numpy())
                os.fsync(stream.fileno())

        cpu_s = cpu_of(write)
        file.unlink()
        return cpu_s / self.training.gigabytes

    def close(self) -> None:
        """Remove what is left in shared memory, and end all threads."""
        self.memory.clear()
        self.writer.close()
        self._stager.close()

    def _peer_writer(self) -> FileSystemWriter:
        return FileSystemWriter(self.folder / "peer")

    def _take(self, _: int) -> None:
        self._step += 1
        self.memory.begin_snapshot(self._step, self._step, self.training.state)

    def _begin(self, number: int) -> None:
        if number == 0:
            self._step += 1
            pieces = [TensorShard.full(name, tensor) for name, tensor in self.training.state.items()]
            self.writer.begin(self._step, self._step, pieces, nothing)


NAMES = {
    "memory": "into shared memory, at every step",
    "disk": "onto disk",
    "peer": "`async_save`",
    "thread": "`async_save`, staged in a thread",
}


def costs(ways: Ways, rounds: int) -> tuple[dict[str, Cost], int]:
    """Return what each way costs, and how many rounds were discarded; half as many more are tried."""
    found, discarded = {name: Cost() for name in (*NAMES, "plain")}, 0
    measure: dict[str, Callable[[], tuple[Measured, float, int]]] = {
        "memory": ways.into_memory,
        "disk": ways.onto_disk,
        "peer": ways.by_peer,
        "thread": ways.by_peer_in_thread,
    }
    for way in measure.values():  # files, mappings and buffers are there from then on
        way()
    size = ways.training.gigabytes
    for number in range(rounds + rounds // 2):
        print(f"round {number + 1}: {discarded} discarded", file=sys.stderr, flush=True)
        found["plain"].cpu_s.append(ways.plainly())
        before = measured(ways.training, nothing, nothing)
        of_round = {name: way() for name, way in measure.items()}
        after = measured(ways.training, nothing, nothing)
        if min(before.had_a_core, after.had_a_core) < HAD_A_CORE:
            discarded += 1
            continue
        plain_s = (before.wall_s + after.wall_s) / 2
        for name, (one, later_cpu_s, num) in of_round.items():
            found[name].lost_s.append((one.wall_s - plain_s) / num / size)
            found[name].inside_s.append(one.inside_s / num / size)
            found[name].cpu_s.append((one.other_cpu_s + later_cpu_s) / num / size)
        if number + 1 - discarded == rounds:
            break
    return found, discarded


def forget_cached(folder: Path) -> None:
    """Have the next reader read from the disk."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def restore(way: str, run: str, folder: str, gigabytes: float) -> tuple[float, float]:
    """Fill a state in this fresh process; return wall and CPU seconds per GB."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    state = state_of(gigabytes)
    size = sum(one.nbytes for one in state.values()) / 1e9
    for one in state.values():
        one.zero_()
    place = Path(folder)
    if way != "memory":
        forget_cached(place)
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    if way == "memory":
        found = MemoryCheckpoint(run, 0).newest()
        assert found is not None
        for name, tensor in state.items():
            tensor.copy_(found.tensors[name])
    elif way == "disk":
        manifest = newest_valid(place)
        assert manifest is not None
        load_shards(place, manifest.step, [TensorShard.full(name, tensor) for name, tensor in state.items()])
    else:
        dcp.load(state, checkpoint_id=place)
    return (time.perf_counter() - wall_s) / size, (time.process_time() - cpu_s) / size


def restores(ways: Ways, gigabytes: float, times: int) -> dict[str, list[tuple[float, float]]]:
    """Return wall and CPU seconds per GB of each way to restore, each time in a process of its own."""
    places = {"memory": "", "disk": str(ways.folder / "ours"), "peer": str(ways.folder / "peer")}
    run = f"benchmark-{os.getpid()}"
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        return {
            way: [pool.apply(restore, (way, run, place, gigabytes)) for _ in range(times)]
            for way, place in places.items()
        }


def spread(values: list[float], unit: str, scale: float = 1.0) -> str:
    """Return the extremes, for people."""
    return f"{min(values) * scale:.3g} to {max(values) * scale:.3g} {unit} in {len(values)}"


def rows(found: dict[str, Cost], discarded: int, restored: dict[str, list[tuple[float, float]]]) -> Iterator[Row]:
    """Yield the table."""
    yield Row(what="rounds that were discarded", ours=float(discarded), unit="rounds")
    if found["memory"].lost_s:
        yield from cost_rows(found)
    for way, what in (("memory", "from shared memory"), ("disk", "from disk, all checksums verified")):
        ours, peers = ([wall_s for wall_s, _ in restored[one]] for one in (way, "peer"))
        value = statistics.median(ours)
        yield compared(
            f"restore per GB, {what}", value, "s", f"{PEER}: `load`", statistics.median(peers),
            target=f"at most {RESTORE_S:g}; here {spread(ours, 's')}", met=value <= RESTORE_S,
        )  # fmt: skip
        cpu_s, peer_s = (statistics.median(one for _, one in restored[way]) for way in (way, "peer"))
        yield compared(f"CPU of a restore per GB, {what}", cpu_s, "s", f"{PEER}: `load`", peer_s)


def cost_rows(found: dict[str, Cost]) -> Iterator[Row]:
    """Yield what each of our ways costs, beside the better of the peer's."""
    better = min(("peer", "thread"), key=lambda way: statistics.median(found[way].lost_s))
    peer = f"{PEER}: {NAMES[better]}"
    for way in ("memory", "disk"):
        for what in ("lost", "inside"):
            ours, peers = (getattr(found[one], f"{what}_s") for one in (way, better))
            value = statistics.median(ours) * 1e3
            target = f"at most {STALL_MS:g}; here {spread(ours, 'ms', 1e3)}, there {spread(peers, 'ms', 1e3)}"
            yield compared(
                f"{what} per GB, {NAMES[way]}", value, "ms", peer, statistics.median(peers) * 1e3,
                target=target, met=value <= STALL_MS,
            )  # fmt: skip
        cpu_s, peer_s = (statistics.median(found[one].cpu_s) for one in (way, better))
        yield compared(f"CPU of other threads per GB, {NAMES[way]}", cpu_s, "s", peer, peer_s)
    plain = found["plain"].cpu_s
    yield Row(
        what=f"CPU of a plain write of a new file, per GB ({spread(plain, 's')})",
        ours=statistics.median(plain), unit="s",
    )  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--quick", action="store_true", help="a quarter of the state, two rounds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    gigabytes, rounds = (0.25, 2) if options.quick else (1.0, 6)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(prefix="isthmus-checkpoints-") as folder:
        ways = Ways(Training(state_of(gigabytes)), Path(folder))
        try:
            found, discarded = costs(ways, rounds)
            ways.training.state.clear()
            gc.collect()
            restored = restores(ways, gigabytes, 2 if options.quick else 5)
        finally:
            ways.close()
            dist.destroy_process_group()
        print_rows(list(rows(found, discarded, restored)), options.json)


if __name__ == "__main__":
    main()
