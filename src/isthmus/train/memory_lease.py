"""`MemoryLease`: a name for a rank's snapshots in shared memory that lasts as long as anybody needs them.

Snapshots outlive the process that made them, so something else must remove them in the end: whoever holds the
lease does, and where it was killed, the next one that takes a lease on this machine.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from uuid import uuid4

from isthmus.core.worker import WorkerSpec
from isthmus.train.memory_checkpoint import default_folder

_LOCK = "lease"


class MemoryLease:
    """A context manager. `run` is what `MemoryCheckpoint` is to call the run, below `folder`.

    A process that is forked holds the lease too, until it ends.
    """

    def __init__(self, spec: WorkerSpec, folder: Path | None = None) -> None:
        self._folder = folder or default_folder()
        self.run = f"{spec.run}-{spec.attempt}-{spec.rank}-{uuid4().hex[:12]}"
        self._lock: int | None = None

    def __enter__(self) -> MemoryLease:
        with suppress(OSError):
            _remove_left_behind(self._folder)
            place = self._folder / f"isthmus-{self.run}"
            place.mkdir(mode=0o700)
            self._lock = os.open(place / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._folder / f"isthmus-{self.run}", ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)


def _remove_left_behind(folder: Path) -> None:
    """Remove the snapshots of leases that no process holds any more."""
    for lock in folder.glob(f"isthmus-*/{_LOCK}"):
        with suppress(OSError):
            held = os.open(lock, os.O_RDWR)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(held)
