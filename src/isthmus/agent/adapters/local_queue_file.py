"""The queue file of the `local` adapter: one waiting job per line, `NAME` or, for pool jobs, `JOB/ATTEMPT`.

Local users may edit the file. Malformed lines and duplicates are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from isthmus.agent.adapters.scheduler_adapter import QueueMove
from isthmus.core.messages.agent_messages import QueueEntry
from isthmus.core.messages.worker_folder import write_atomically


class LocalQueueFile:
    """The queue stored in the file `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._cached: tuple[bytes, tuple[QueueEntry, ...]] = b"", ()

    def entries(self) -> tuple[QueueEntry, ...]:
        """Return the queue in start order."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            data = b""
        if data != self._cached[0]:
            self._cached = data, tuple(dict.fromkeys(_parse(data.decode(errors="replace"))))
        return self._cached[1]

    def reorder(self, moves: Sequence[QueueMove], removed: Sequence[QueueEntry]) -> None:
        """Remove `removed`, apply the moves in order, and write the file."""
        linked = _LinkedQueue(self.entries())
        for entry in removed:
            linked.remove(entry)
        for move in moves:
            linked.insert_after(move.entry, move.after)
        write_atomically(self._path, "".join(f"{_format_line(entry)}\n" for entry in linked.entries()))


class _LinkedQueue:
    """A doubly linked list of entries: insertion and removal in O(1). The key None is both ends."""

    def __init__(self, entries: Iterable[QueueEntry]) -> None:
        self._next: dict[QueueEntry | None, QueueEntry | None] = {None: None}
        self._previous: dict[QueueEntry | None, QueueEntry | None] = {None: None}
        for entry in entries:
            self.insert_after(entry, self._previous[None])

    def remove(self, entry: QueueEntry) -> None:
        if entry in self._next:
            previous, following = self._previous.pop(entry), self._next.pop(entry)
            self._next[previous], self._previous[following] = following, previous

    def insert_after(self, entry: QueueEntry, after: QueueEntry | None) -> None:
        self.remove(entry)
        previous = after if after in self._next else self._previous[None]
        following = self._next[previous]
        self._next[previous], self._previous[entry] = entry, previous
        self._next[entry], self._previous[following] = following, entry

    def entries(self) -> Iterator[QueueEntry]:
        entry = self._next[None]
        while entry is not None:
            yield entry
            entry = self._next[entry]


def _parse(text: str) -> Iterator[QueueEntry]:
    for line in text.split():
        job, _, attempt = line.partition("/")
        try:
            yield QueueEntry(job=job, attempt=int(attempt or 0))
        except (ValidationError, ValueError):
            continue


def _format_line(entry: QueueEntry) -> str:
    return f"{entry.job}/{entry.attempt}" if entry.attempt else entry.job
