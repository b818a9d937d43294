"""`MemoryLease`: owns a rank's snapshots in shared memory and removes them when it ends.

Snapshots outlive the process that made them, so the lease holder must remove them. If another rank is lost
for good, they stay for the run's next attempt, which must begin within `ORPHAN_LIFETIME_S`. The next lease on the
machine removes snapshots that are orphaned for longer. An exclusive `flock` on `isthmus-RUN/lease` marks a
held lease.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from isthmus.core.messages.worker_folder import WorkerSpec
from isthmus.train.checkpoint.memory_checkpoint import shared_memory_folder

ORPHAN_LIFETIME_S = 600.0
"""How long orphaned snapshots stay for the next attempt."""

_LOCK_FILE = "lease"
_LAYOUT_FIELDS = {"stages", "dp", "chunks", "schedule", "zero", "local_steps", "optimizer_on_host", "rank_order"}
"""Fields of a plan that decide which state each rank holds."""


class MemoryLease:
    """Context manager that holds a lease below `folder`; pass its `run` to `MemoryCheckpoint`.

    A forked child process also holds the lease until it exits.
    """

    def __init__(self, spec: WorkerSpec, folder: Path | None = None) -> None:
        self._folder = folder or shared_memory_folder()
        self.run = f"{spec.run}-{spec.attempt}-{spec.rank}-{uuid4().hex[:12]}"
        self._digest = compatibility_digest(spec)
        self._lock: int | None = None
        self._is_kept = False

    def keep_for_next_attempt(self) -> None:
        """Keep the snapshots for the next attempt when the lease ends."""
        self._is_kept = True

    def __enter__(self) -> MemoryLease:
        with suppress(OSError):
            _remove_expired(self._folder)
            place = self._folder / f"isthmus-{self.run}"
            place.mkdir(mode=0o700)
            self._lock = os.open(place / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            os.write(self._lock, self._digest.encode())
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_kept:
            shutil.rmtree(self._folder / f"isthmus-{self.run}", ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)


def compatibility_digest(spec: WorkerSpec) -> str:
    """Return a digest of run, checkpoint folder and state layout; equal digests can share snapshots."""
    layout = spec.plan.model_dump_json(include=_LAYOUT_FIELDS)
    where = Path(spec.job.checkpoints.folder).absolute()
    return hashlib.sha256(f"{spec.run} {where} {layout}".encode()).hexdigest()


def orphaned_runs(digest: str, folder: Path | None = None) -> Iterator[str]:
    """Yield the `run` of each lease that has this digest and no holder."""
    for lock in (folder or shared_memory_folder()).glob(f"isthmus-*/{_LOCK_FILE}"):
        with suppress(OSError):
            if not _is_held(lock) and lock.read_text(encoding="utf-8") == digest:
                yield lock.parent.name.removeprefix("isthmus-")


def remove_orphan(run: str, folder: Path | None = None) -> None:
    """Remove the snapshots of a lease without a holder."""
    shutil.rmtree((folder or shared_memory_folder()) / f"isthmus-{run}", ignore_errors=True)


def _remove_expired(folder: Path) -> None:
    """Remove snapshots that have had no holder and no write for `ORPHAN_LIFETIME_S`."""
    for lock in folder.glob(f"isthmus-*/{_LOCK_FILE}"):
        with suppress(OSError):
            if time.time() - _last_use_s(lock) > ORPHAN_LIFETIME_S and not _is_held(lock):
                shutil.rmtree(lock.parent, ignore_errors=True)


def _last_use_s(lock: Path) -> float:
    return max(file.stat().st_mtime for file in lock.parent.iterdir())


def _is_held(lock: Path) -> bool:
    descriptor = os.open(lock, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
