"""The queue file of the `local` adapter: one waiting job per line, `NAME` or, for pool jobs, `JOB/ATTEMPT`.

Local users may edit the file. Malformed lines and duplicates are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from isthmus.agent.adapters.adapter import Move
from isthmus.core.messages.agent_messages import QueueEntry
from isthmus.core.messages.worker_folder import write_atomically


class LocalQueue:
    """The queue stored in the file `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: tuple[bytes, tuple[QueueEntry, ...]] = b"", ()

    def entries(self) -> tuple[QueueEntry, ...]:
        """Return the queue in start order."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            data = b""
        if data != self._known[0]:
            self._known = data, tuple(dict.fromkeys(_parse(data.decode(errors="replace"))))
        return self._known[1]

    def order(self, moves: Sequence[Move], gone: Sequence[QueueEntry]) -> None:
        """Remove `gone`, apply the moves in order, and write the file."""
        linked = _Chain(self.entries())
        for entry in gone:
            linked.take_out(entry)
        for move in moves:
            linked.put(move.entry, move.after)
        write_atomically(self._path, "".join(f"{_line(entry)}\n" for entry in linked.entries()))


class _Chain:
    """A doubly linked list of entries: insertion and removal in O(1). The key None is both ends."""

    def __init__(self, entries: Iterable[QueueEntry]) -> None:
        self._next: dict[QueueEntry | None, QueueEntry | None] = {None: None}
        self._before: dict[QueueEntry | None, QueueEntry | None] = {None: None}
        for entry in entries:
            self.put(entry, self._before[None])

    def take_out(self, entry: QueueEntry) -> None:
        if entry in self._next:
            previous, following = self._before.pop(entry), self._next.pop(entry)
            self._next[previous], self._before[following] = following, previous

    def put(self, entry: QueueEntry, after: QueueEntry | None) -> None:
        self.take_out(entry)
        previous = after if after in self._next else self._before[None]
        following = self._next[previous]
        self._next[previous], self._before[entry] = entry, previous
        self._next[entry], self._before[following] = following, entry

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


def _line(entry: QueueEntry) -> str:
    return f"{entry.job}/{entry.attempt}" if entry.attempt else entry.job
