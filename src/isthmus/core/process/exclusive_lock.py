"""`exclusive_lock`: a file that one process, and one thread of it, holds at a time."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def exclusive_lock(file: Path) -> Iterator[None]:
    """Wait until no one else holds `file`, and hold it; the file and its folder are made if they are missing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
