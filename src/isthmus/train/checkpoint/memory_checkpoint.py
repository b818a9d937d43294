"""`MemoryCheckpoint`: one rank's last two states in shared memory, copied while the next step computes.

A process that is killed leaves them behind, and the one that replaces it goes on from there. Two slots are
written in turn, so that one is whole at any time. The memory is that of two states.
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
from isthmus.train.checkpoint.memory_slot import MemorySlot, SlotIndex, Snapshot, view
from isthmus.train.update.host_copy import Ready, copy_ready, copy_to_host

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - it is the memory that is meant


def default_folder() -> Path:
    """Return where memory is shared by name: a file system in memory, or the nearest thing to one."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


class MemoryCheckpoint:
    """The snapshots of `rank` of the run named `run`, below `folder`; for use by one thread.

    `run` must tell apart all runs that ever share the machine. What goes wrong while a snapshot is copied is
    raised by the call after it.
    """

    def __init__(self, run: str, rank: int, folder: Path | None = None) -> None:
        self._run, self._root = run, folder or default_folder()
        self._folder = self._root / f"isthmus-{run}"
        self._slots = [MemorySlot(self._folder / f"rank-{rank:05d}.{number}") for number in (0, 1)]
        self._steps: list[int | None] | None = None
        self._verified: list[Snapshot | None] = [None, None]
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="isthmus-memory")
        self._copying: Future[Snapshot] | None = None
        self.last: Future[Snapshot] | None = None
        """What `take` has returned last."""

    def sibling(self, rank: int) -> MemoryCheckpoint:
        """Return the snapshots of another rank in the same place: they go when this rank's go."""
        return MemoryCheckpoint(self._run, rank, self._root)

    def take(self, step: int, samples: int, tensors: Mapping[str, torch.Tensor]) -> Future[Snapshot]:
        """Begin the snapshot of the state after `step` steps in place of the older one; return what comes.

        The tensors are read until `wait` returns. Raises `UnavailableError` where two states do not fit.
        """
        self.wait()
        steps = self._known()
        index = SlotIndex.of(step, samples, tensors)
        self._check_room(index.num_bytes)
        older = _older(steps)
        steps[older] = self._verified[older] = None
        ready = copy_ready(tensors.values())
        self.last = self._copying = self._pool.submit(self._copy, older, index, dict(tensors), ready)
        return self._copying

    def wait(self) -> None:
        """Return once the snapshot begun last is whole and checksummed; call it before a tensor changes."""
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.result()

    @property
    def busy(self) -> bool:
        """Whether `wait` would wait."""
        return self._copying is not None and not self._copying.done()

    def steps(self) -> tuple[int, ...]:
        """Return the steps of the whole snapshots, the newest last."""
        self.wait()
        return tuple(sorted({step for step in self._known() if step is not None}))

    def newest(self) -> Snapshot | None:
        """Return the newest whole snapshot, None where there is none."""
        for step in reversed(self.steps()):
            with suppress(UnavailableError):
                return self.load(step)
        return None

    def load(self, step: int) -> Snapshot:
        """Return the snapshot after `step` steps, its checksum verified.

        Its tensors are those of the slot: to be copied before the next `take`. Raises `UnavailableError`
        where there is none, or it is damaged.
        """
        self.wait()
        for number, known in enumerate(steps := self._known()):
            if known == step:
                found, self._verified[number] = self._verified[number] or self._slots[number].read(), None
                if found is not None and found.step == step:
                    return found
                steps[number] = None
        raise UnavailableError(f"{self._folder} has no whole snapshot of step {step}")

    def forget_after(self, step: int) -> None:
        """Drop the snapshots of later steps: the run goes on from `step`."""
        self.wait()
        for number, known in enumerate(steps := self._known()):
            if known is not None and known > step:
                self._slots[number].forget()
                steps[number] = None

    def slot(self, step: int) -> MemorySlot | None:
        """Return where the snapshot after `step` steps lies, None where there is none."""
        known = self._known()
        return self._slots[known.index(step)] if step in known else None

    def spare_slot(self) -> MemorySlot:
        """Return the slot that `take` would write next, to be filled by somebody else, and then `put`."""
        self.wait()
        older = _older(steps := self._known())
        steps[older] = self._verified[older] = None
        return self._slots[older]

    def put(self, slot: MemorySlot, step: int | None) -> None:
        """Take note that the `spare_slot` holds the snapshot after `step` steps; None: it holds nothing."""
        self._known()[self._slots.index(slot)] = step

    def clear(self) -> None:
        """Remove everything, and end the thread that copies."""
        with suppress(UnavailableError):
            self.wait()
        self._pool.shutdown()
        for slot in self._slots:
            slot.remove()
        with suppress(OSError):
            self._folder.rmdir()

    def _known(self) -> list[int | None]:
        """Return the step of each slot, None where it is not whole; both are verified once, side by side."""
        if self._steps is None:
            with ThreadPoolExecutor(len(self._slots)) as pool:
                self._verified = list(pool.map(MemorySlot.read, self._slots))
            self._steps = [None if one is None else one.step for one in self._verified]
        return self._steps

    def _check_room(self, num_bytes: int) -> None:
        allocated = [slot.allocated_bytes for slot in self._slots]
        more = sum(max(num_bytes - one, 0) for one in allocated)
        if more == 0:
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            room = os.statvfs(self._folder)
        except OSError as error:
            raise UnavailableError(f"cannot keep snapshots in {self._folder}: {error}") from error
        free = room.f_bavail * room.f_frsize
        if more > free:
            raise UnavailableError(
                f"two snapshots of {format_bytes(num_bytes)} need {format_bytes(more)} more in "
                f"{self._folder.parent}, which has {format_bytes(free)}",
                hint="give it more room (shared memory of a container: --shm-size)",
            )

    def _copy(
        self,
        number: int,
        index: SlotIndex,
        tensors: Mapping[str, torch.Tensor],
        ready: Ready,
    ) -> Snapshot:
        """Fill a slot, off the training thread."""
        memory = self._slots[number].begin(index.num_bytes)
        copy_to_host(((tensors[one.name], view(memory, one)) for one in index.tensors), ready)
        snapshot = self._slots[number].seal(index)
        if self._steps is not None:
            self._steps[number] = index.step
        return snapshot


def _older(steps: Sequence[int | None]) -> int:
    """Return which of two slots, holding these steps, is to be written next."""
    return min((0, 1), key=lambda number: -1 if (step := steps[number]) is None else step)
