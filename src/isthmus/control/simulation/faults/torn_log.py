"""`SqliteLog`: the real store under a simulated server, torn where that dies between write and flush."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from isthmus.control.state.events import Event
from isthmus.control.store.sqlite import SqliteStore


class SqliteLog:
    """A store in `folder`; an interrupted append leaves its write-ahead log cut behind the last flush."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._copies = folder, 0
        self._store = SqliteStore(folder / "0.db")

    def append(self, events: Sequence[Event]) -> None:
        """Keep events; see `EventLog`."""
        self._store.append(events)

    def tear(self, events: Sequence[Event], rng: random.Random) -> None:
        """Go on with a copy of the file whose write-ahead log ends at any byte behind what was flushed."""
        wal = Path(f"{self._store.path}-wal")
        flushed_bytes = wal.stat().st_size
        self._store.append(events)
        self._copies += 1
        copy = self._folder / f"{self._copies}.db"
        shutil.copy(self._store.path, copy)
        written = wal.read_bytes()
        cut = rng.randint(min(flushed_bytes, len(written)), len(written))
        Path(f"{copy}-wal").write_bytes(written[:cut])
        self._store.close()
        self._store = SqliteStore(copy)

    def events(self) -> Iterable[Event]:
        """Return what was kept, as a new process reads it; see `EventLog`."""
        path = self._store.path
        self._store.close()
        self._store = SqliteStore(path)
        return [event for _, event in self._store.events()]

    def close(self) -> None:
        """Let go of the file."""
        self._store.close()
