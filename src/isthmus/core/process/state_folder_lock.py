"""Exclusive lock on the state folder of a server or agent, and errors for unwritable folders."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from isthmus.core.errors import UnavailableError


@contextmanager
def lock_state_folder(state: Path, role: str) -> Iterator[None]:
    """Lock `state` for this process; create the folder with mode 0700 if missing.

    Raises `UnavailableError` if another process (`role`: "agent", "server") holds the lock or the folder is
    not writable. The kernel releases the lock when the process ends.
    """
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(state / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise unwritable_folder_error(state, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise UnavailableError(
            f"another {role} uses the state folder {state}",
            hint="stop it first, or use a different state folder",
        ) from error
    finally:
        os.close(descriptor)


def unwritable_folder_error(folder: Path, error: OSError) -> UnavailableError:
    """Return the `UnavailableError` for a folder that cannot be written."""
    hint = "free space on that disk" if error.errno == errno.ENOSPC else "choose a writable folder"
    return UnavailableError(f"cannot write to {folder}: {error.strerror or error}", hint=hint)


def fsync_path(path: Path) -> None:
    """Flush a file, or a folder after a rename into it, to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
