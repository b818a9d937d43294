"""The state folder of a server or an agent: one process at a time, plain words where it cannot be used."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from isthmus.core.errors import UnavailableError


@contextmanager
def locked(state: Path, what: str) -> Iterator[None]:
    """Hold `state` for this process, making it (mode 0700) where it is not there.

    Raises `UnavailableError` where another `what` ("agent", "server") has it, or where it takes no files.
    The system lets go of the lock when the process ends, however it ends.
    """
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(state / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise unwritable(state, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise UnavailableError(
            f"another {what} runs with the state folder {state}",
            hint="stop it first, or give this one a folder of its own",
        ) from error
    finally:
        os.close(descriptor)


def unwritable(folder: Path, error: OSError) -> UnavailableError:
    """Return the error of a folder that takes no files, with what to do about it."""
    hint = "free space on that disk" if error.errno == errno.ENOSPC else "choose a folder you may write to"
    return UnavailableError(f"cannot write to {folder}: {error.strerror or error}", hint=hint)


def sync_path(path: Path) -> None:
    """Make what is in a file durable, or the names in a folder after a file was renamed into it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
