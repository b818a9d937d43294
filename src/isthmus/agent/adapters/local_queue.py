"""The queue of the `local` adapter: a file with a waiting job a line, `NAME` or, of the pool, `JOB/ATTEMPT`.

People at the site may edit it. Lines that name nothing are skipped; what stands there twice counts once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from isthmus.agent.adapters.adapter import Move
from isthmus.core.messages.agent_messages import QueueEntry
from isthmus.core.messages.worker_folder import write_atomically


class LocalQueue:
    """The queue that the file `path` holds."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: tuple[bytes, tuple[QueueEntry, ...]] = b"", ()

    def entries(self) -> tuple[QueueEntry, ...]:
        """Return the queue, first to start first."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            data = b""
        if data != self._known[0]:
            self._known = data, tuple(dict.fromkeys(_parse(data.decode(errors="replace"))))
        return self._known[1]

    def order(self, moves: Sequence[Move], gone: Sequence[QueueEntry]) -> None:
        """Take `gone` out, carry the moves out one after the other, and write the file."""
        chain = _Chain(self.entries())
        for entry in gone:
            chain.take_out(entry)
        for move in moves:
            chain.put(move.entry, move.after)
        write_atomically(self._path, "".join(f"{_line(entry)}\n" for entry in chain.entries()))


class _Chain:
    """A linked list of entries: to take one out or put one in costs the same wherever it stands."""

    def __init__(self, entries: Iterable[QueueEntry]) -> None:
        self._next: dict[QueueEntry | None, QueueEntry | None] = {None: None}
        self._before: dict[QueueEntry | None, QueueEntry | None] = {None: None}
        for entry in entries:
            self.put(entry, self._before[None])

    def take_out(self, entry: QueueEntry) -> None:
        if entry in self._next:
            before, behind = self._before.pop(entry), self._next.pop(entry)
            self._next[before], self._before[behind] = behind, before

    def put(self, entry: QueueEntry, after: QueueEntry | None) -> None:
        self.take_out(entry)
        before = after if after in self._next else self._before[None]
        behind = self._next[before]
        self._next[before], self._before[entry] = entry, before
        self._next[entry], self._before[behind] = behind, entry

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
