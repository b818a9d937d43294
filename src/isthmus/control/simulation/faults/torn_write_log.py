"""`SqliteEventLog`: the SQLite store as the simulated server's log, with torn writes on crashes."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from isthmus.control.state.events import Event
from isthmus.control.store.sqlite_store import SqliteStore


class SqliteEventLog:
    """A store in `folder`; an interrupted append truncates the write-ahead log after the flushed bytes."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._num_copies = folder, 0
        self._store = SqliteStore(folder / "0.db")

    def append(self, events: Sequence[Event]) -> None:
        """Append events; see `EventLog`."""
        self._store.append(events)

    def append_torn(self, events: Sequence[Event], rng: random.Random) -> None:
        """Continue on a copy whose write-ahead log ends at a random byte after the flushed ones."""
        wal = Path(f"{self._store.path}-wal")
        flushed_bytes = wal.stat().st_size
        self._store.append(events)
        self._num_copies += 1
        copy = self._folder / f"{self._num_copies}.db"
        shutil.copy(self._store.path, copy)
        written = wal.read_bytes()
        cut = rng.randint(min(flushed_bytes, len(written)), len(written))
        Path(f"{copy}-wal").write_bytes(written[:cut])
        self._store.close()
        self._store = SqliteStore(copy)

    def events(self) -> Iterable[Event]:
        """Return the stored events as a new process reads them; see `EventLog`."""
        path = self._store.path
        self._store.close()
        self._store = SqliteStore(path)
        return [event for _, event in self._store.events()]

    def close(self) -> None:
        """Close the file."""
        self._store.close()
