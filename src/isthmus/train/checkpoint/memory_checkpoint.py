"""`MemoryCheckpoint`: snapshots of a rank's last two states in shared memory, copied during the next step.

They survive the process, so a replacement process can resume from them. Two slots are written alternately, so
that one is always valid; together they take twice the size of a state. The memory of the older one can be released
once all ranks have the newer.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch

from isthmus.core.errors import UnavailableError
from isthmus.core.units import format_bytes
from isthmus.train.checkpoint.memory_slot import MemorySlot, SlotIndex, Snapshot, view_tensor
from isthmus.train.update.host_copy import ReadyEvent, copy_to_host, record_ready_event

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - it is the memory that is meant


def shared_memory_folder() -> Path:
    """Return `/dev/shm`, or the temporary folder where that does not exist."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


class MemoryCheckpoint:
    """The snapshots of `rank` of the run `run`, below `folder`; used by one thread.

    `run` must be unique on the machine. The next call raises an error that occurs while a snapshot is copied.
    """

    def __init__(self, run: str, rank: int, folder: Path | None = None) -> None:
        self._run, self.root = run, folder or shared_memory_folder()
        self._folder = self.root / f"isthmus-{run}"
        self._slots = [MemorySlot(self._folder / f"rank-{rank:05d}.{number}") for number in (0, 1)]
        self._steps: list[int | None] | None = None
        self._verified: list[Snapshot | None] = [None, None]
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="isthmus-memory")
        self._pending_copy: Future[Snapshot] | None = None
        self.last_snapshot: Future[Snapshot] | None = None
        """The latest result of `begin_snapshot`."""

    def for_rank(self, rank: int) -> MemoryCheckpoint:
        """Return the snapshots of another rank in the same folder, which share its lifetime."""
        return MemoryCheckpoint(self._run, rank, self.root)

    def begin_snapshot(self, step: int, samples: int, tensors: Mapping[str, torch.Tensor]) -> Future[Snapshot]:
        """Begin to copy the state after `step` steps over the older snapshot; return its future.

        The tensors (of any shape) must not change until `wait` returns. Raises `UnavailableError` if two states
        do not fit.
        """
        self.wait()
        steps = self._valid_steps()
        index = SlotIndex.from_tensors(step, samples, tensors)
        self._check_space(index.num_bytes)
        older = _older_slot(steps)
        steps[older] = self._verified[older] = None
        ready = record_ready_event(tensors.values())
        self.last_snapshot = self._pending_copy = self._pool.submit(self._copy, older, index, dict(tensors), ready)
        return self._pending_copy

    def wait(self) -> None:
        """Wait until the current snapshot is copied and checksummed; call it before a tensor changes."""
        copying, self._pending_copy = self._pending_copy, None
        if copying is not None:
            copying.result()

    def steps(self) -> tuple[int, ...]:
        """Return the steps of the valid snapshots, newest last."""
        self.wait()
        return tuple(sorted({step for step in self._valid_steps() if step is not None}))

    def newest(self) -> Snapshot | None:
        """Return the newest valid snapshot; None if there is none."""
        for step in reversed(self.steps()):
            with suppress(UnavailableError):
                return self.load(step)
        return None

    def load(self, step: int) -> Snapshot:
        """Return the snapshot after `step` steps, its checksum verified.

        Its tensors are views of the slot: copy them before the next `begin_snapshot`. Raises `UnavailableError` if the
        snapshot is missing or damaged.
        """
        self.wait()
        for number, known in enumerate(steps := self._valid_steps()):
            if known == step:
                found, self._verified[number] = self._verified[number] or self._slots[number].read(), None
                if found is not None and found.step == step:
                    return found
                steps[number] = None
        raise UnavailableError(f"{self._folder} has no valid snapshot of step {step}")

    def drop_after(self, step: int) -> None:
        """Drop the snapshots of steps after `step`."""
        self.wait()
        for number, known in enumerate(steps := self._valid_steps()):
            if known is not None and known > step:
                self._slots[number].invalidate()
                steps[number] = None

    def release_older(self) -> None:
        """Give the memory of the older of two snapshots back, once all ranks have the newer one.

        Call it after `wait`; while a snapshot is copied, both stay.
        """
        steps = self._valid_steps()
        if self._pending_copy is None and None not in steps:
            older = _older_slot(steps)
            steps[older] = self._verified[older] = None
            self._slots[older].remove()

    def slot(self, step: int) -> MemorySlot | None:
        """Return the slot of the snapshot after `step` steps; None if there is none."""
        known = self._valid_steps()
        return self._slots[known.index(step)] if step in known else None

    def reserve_slot(self) -> MemorySlot:
        """Invalidate the older slot and return it, to be filled by the caller and passed to `commit_slot`."""
        self.wait()
        older = _older_slot(steps := self._valid_steps())
        steps[older] = self._verified[older] = None
        return self._slots[older]

    def commit_slot(self, slot: MemorySlot, step: int | None) -> None:
        """Record that `slot` now holds the snapshot after `step` steps; None: it is invalid."""
        self._valid_steps()[self._slots.index(slot)] = step

    def clear(self) -> None:
        """Remove all snapshots and stop the copy thread."""
        with suppress(UnavailableError):
            self.wait()
        self._pool.shutdown()
        for slot in self._slots:
            slot.remove()
        with suppress(OSError):
            self._folder.rmdir()

    def _valid_steps(self) -> list[int | None]:
        """Return the step of each slot, None if invalid; the first call verifies both in parallel."""
        if self._steps is None:
            with ThreadPoolExecutor(len(self._slots)) as pool:
                self._verified = list(pool.map(MemorySlot.read, self._slots))
            self._steps = [None if one is None else one.step for one in self._verified]
        return self._steps

    def _check_space(self, num_bytes: int) -> None:
        """Raise `UnavailableError` if two snapshots of `num_bytes` do not fit."""
        allocated = [slot.allocated_bytes for slot in self._slots]
        more = sum(max(num_bytes - one, 0) for one in allocated)
        if more == 0:
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            stats = os.statvfs(self._folder)
        except OSError as error:
            raise UnavailableError(f"cannot keep snapshots in {self._folder}: {error}") from error
        free_bytes = stats.f_bavail * stats.f_frsize
        if more > free_bytes:
            raise UnavailableError(
                f"two snapshots of {format_bytes(num_bytes)} need {format_bytes(more)} more in "
                f"{self._folder.parent}, which has {format_bytes(free_bytes)} free",
                hint="enlarge it (shared memory of a container: --shm-size)",
            )

    def _copy(
        self,
        number: int,
        index: SlotIndex,
        tensors: Mapping[str, torch.Tensor],
        ready: ReadyEvent,
    ) -> Snapshot:
        """Fill slot `number`; runs on the copy thread."""
        memory = self._slots[number].open_for_write(index.num_bytes)
        copy_to_host(((tensors[one.name], view_tensor(memory, one)) for one in index.tensors), ready)
        snapshot = self._slots[number].seal(index)
        if self._steps is not None:
            self._steps[number] = index.step
        return snapshot


def _older_slot(steps: Sequence[int | None]) -> int:
    """Return the index of the slot to overwrite next: an invalid one, else the one of the older step."""
    return min((0, 1), key=lambda number: -1 if (step := steps[number]) is None else step)
