"""`BaseTable`: the bases of a store's log, and the deletion of the events that the active one replaces.

Each method is one transaction, or several of which any number may be lost: a server that ends between two of them, and
two servers that run them at one time, lose no event that no active base replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from isthmus.control.store.log_base import BaseMark, LogBase
from isthmus.control.store.log_chain import LogEnd

DROPPED_EVENTS = 2000
"""Events that one transaction deletes."""
_SAMPLES = 64
_SAMPLE = "SELECT length(body) FROM events WHERE number IN (?)".replace("?", ", ".join("?" * _SAMPLES))


class BaseTable(Protocol):
    """The bases of one store."""

    def active(self) -> LogBase | None:
        """Return the base that replays begin with, None for a log that begins with event 1."""

    def active_end(self) -> LogEnd | None:
        """Return the last event that the active base replaces, without its state."""

    def marks(self) -> tuple[BaseMark, ...]:
        """Return the stored bases without their states, the active one first."""

    def staged(self) -> LogBase | None:
        """Return the staged base, None without one."""

    def stage(self, base: LogBase) -> None:
        """Store a base that replaces no event yet, in place of another staged one."""

    def activate(self, base: LogBase) -> None:
        """Begin replays with a staged base, which the log must have recorded; forget those before it."""

    def drop_events(self) -> int:
        """Delete the oldest events that the active base replaces, at most `DROPPED_EVENTS`; return their number."""

    def num_bytes(self, after: int, last: int) -> float:
        """Return about how many bytes the events above `after` up to `last` have, from a sample of them."""


class MemoryBaseTable:
    """The bases of a `MemoryStore`, with its `events` by number."""

    def __init__(self, events: dict[int, str]) -> None:
        self._events = events
        self._active: LogBase | None = None
        self._staged: LogBase | None = None

    def active(self) -> LogBase | None:
        """Return the active base; see `BaseTable`."""
        return self._active

    def active_end(self) -> LogEnd | None:
        """Return the end of the active base; see `BaseTable`."""
        return None if self._active is None else self._active.end

    def marks(self) -> tuple[BaseMark, ...]:
        """Return the stored bases; see `BaseTable`."""
        stored = [(self._active, True), (self._staged, False)]
        return tuple(BaseMark(base.end, base.made_s, is_active) for base, is_active in stored if base is not None)

    def staged(self) -> LogBase | None:
        """Return the staged base; see `BaseTable`."""
        return self._staged

    def stage(self, base: LogBase) -> None:
        """Store a base; see `BaseTable`."""
        self._staged = base

    def activate(self, base: LogBase) -> None:
        """Begin replays with a base; see `BaseTable`."""
        if self._active is None or self._active.end.number < base.end.number:
            self._active, self._staged = base, None

    def drop_events(self) -> int:
        """Delete events; see `BaseTable`."""
        last = 0 if self._active is None else self._active.end.number
        dropped = [number for number in self._events if number <= last][:DROPPED_EVENTS]
        for number in dropped:
            del self._events[number]
        return len(dropped)

    def num_bytes(self, after: int, last: int) -> float:
        """Return the bytes of events; see `BaseTable`."""
        return sum(len(text) for number, text in self._events.items() if after < number <= last)


ReadRows = Callable[..., list[Any]]
"""Returns the rows of a query: a statement, which marks each value with `?`, and the values."""
ChangeRows = Callable[[Iterable[tuple[str, Sequence[Any]]]], list[int]]
"""Runs statements in one transaction; returns the number of rows that each has changed."""


class SqlBaseTable:
    """The table `bases` of an SQL database."""

    def __init__(self, read: ReadRows, change: ChangeRows) -> None:
        self._read, self._change = read, change

    def active(self) -> LogBase | None:
        """Return the active base; see `BaseTable`."""
        return self._base(1)

    def active_end(self) -> LogEnd | None:
        """Return the end of the active base; see `BaseTable`."""
        return next((mark.end for mark in self.marks() if mark.is_active), None)

    def marks(self) -> tuple[BaseMark, ...]:
        """Return the stored bases; see `BaseTable`."""
        rows = self._read("SELECT number, hash, made_s, active FROM bases ORDER BY active DESC, number DESC")
        return tuple(
            BaseMark(LogEnd(number, bytes(digest)), at_s, active == 1) for number, digest, at_s, active in rows
        )

    def staged(self) -> LogBase | None:
        """Return the staged base; see `BaseTable`."""
        return self._base(0)

    def stage(self, base: LogBase) -> None:
        """Store a base; see `BaseTable`."""
        insert = "INSERT INTO bases (number, hash, made_s, active, body) VALUES (?, ?, ?, 0, ?) ON CONFLICT DO NOTHING"
        row = (base.end.number, base.end.digest, base.made_s, base.body)
        self._change([("DELETE FROM bases WHERE active = 0", ()), (insert, row)])

    def activate(self, base: LogBase) -> None:
        """Begin replays with a base; see `BaseTable`."""
        self._change([
            ("UPDATE bases SET active = 1 WHERE number = ? AND hash = ?", (base.end.number, base.end.digest)),
            ("DELETE FROM bases WHERE number < (SELECT max(number) FROM bases WHERE active = 1)", ()),
        ])  # fmt: skip

    def drop_events(self) -> int:
        """Delete events; see `BaseTable`."""
        end = self.active_end()
        first = self._read("SELECT min(number) FROM events")[0][0]
        if end is None or first is None or first > end.number:
            return 0
        sql = "DELETE FROM events WHERE number <= ?"
        return self._change([(sql, (min(end.number, first + DROPPED_EVENTS - 1),))])[0]

    def num_bytes(self, after: int, last: int) -> float:
        """Return about how many bytes events have; see `BaseTable`."""
        count = max(0, last - after)
        if not count:
            return 0.0
        lengths = [row[0] for row in self._read(_SAMPLE, *(after + 1 + i * count // _SAMPLES for i in range(_SAMPLES)))]
        return float(count * sum(lengths) / max(1, len(lengths)))

    def _base(self, active: int) -> LogBase | None:
        sql = "SELECT number, hash, made_s, body FROM bases WHERE active = ? ORDER BY number DESC LIMIT 1"
        rows = self._read(sql, active)
        if not rows:
            return None
        number, digest, made_s, body = rows[0]
        return LogBase(end=LogEnd(number, bytes(digest)), made_s=made_s, body=bytes(body))
