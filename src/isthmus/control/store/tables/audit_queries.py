"""`AuditQueries`: the audit log of an SQL store; its lines are chained and join the transaction of their act.

Like the event log, it remembers the last line that it has appended: a log that no longer ends with it, or with a later
one, has lost something, and takes no further line.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from isthmus.control.store.log_chain import LogEnd
from isthmus.control.store.tables.table_queries import TableQueries
from isthmus.core.errors import UnavailableError
from isthmus.core.views.access_views import AuditFilter, AuditRecord
from isthmus.core.views.audit_chain import (
    PRUNED,
    AuditEnd,
    audit_start,
    line_digest,
    line_end,
    next_line,
    pruned_end,
)

AUDIT_FIELDS = ("number", "at_s", "action", "actor", "role", "token", "address", "subject", "detail", "hash")
"""Columns of the audit log, which `AuditRecord` names alike."""
_COLUMNS = ", ".join(AUDIT_FIELDS)
_LAST = f"SELECT {_COLUMNS} FROM audit ORDER BY number DESC LIMIT 1"  # noqa: S608 - names of this module
_INSERT = f"INSERT INTO audit ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"  # noqa: S608 - names of this module
_PAGE_SIZE = 1000

Session = TypeVar("Session")


class AuditDamagedError(UnavailableError):
    """The audit log lacks a line that was acknowledged, or has another one."""

    def __init__(self, known: AuditEnd) -> None:
        super().__init__(
            f"the audit log is damaged: line {known.number}, which was written, is missing or another one",
            hint="stop the servers, keep their state folders, run `isthmus server check`, and see docs/guide/backup.md",
        )


class AuditQueries(TableQueries[Session]):
    """The part of a `Store` that keeps the audit log; a subclass runs the statements and sets `store_id`."""

    store_id: str

    def _initialize_audit(self) -> None:
        self._audit_end, self._audit_lock = AuditEnd(0, b""), threading.Lock()
        self._on_audit_durable: Callable[[LogEnd], None] = lambda _: None

    @abstractmethod
    def _lock_audit(self, session: Session) -> None:
        """Keep other writers of the audit log out until the transaction ends."""

    def follow_audit(self, known: LogEnd, on_durable: Callable[[LogEnd], None]) -> None:
        """Require that the audit log contains the line `known`, or that it was removed for its age.

        `on_durable` is then called with the end of the audit log, now and whenever this store makes it longer. Raises
        `AuditDamagedError` if the line is missing or another one.
        """
        if known.number:
            rows = self._read("SELECT hash FROM audit WHERE number = ?", known.number)
            if not (rows and rows[0][0] == known.digest.hex()) and not self._is_pruned(known.number):
                raise AuditDamagedError(AuditEnd(*known))
        self._on_audit_durable = on_durable
        rows = self._read(_LAST)
        end = line_end(_line(rows[0])) if rows else audit_start(self.store_id)
        self._remember_audit(end)
        on_durable(LogEnd(*end))

    def append_audit(self, records: Sequence[AuditRecord]) -> None:
        """Append records; see `Store`."""
        self._remember_audit(self._write(lambda session: self._append_lines(session, records)))

    def audit(
        self, wanted: AuditFilter, after: int = 0, limit: int = 1000, *, oldest: bool = False
    ) -> tuple[AuditRecord, ...]:
        """Return records; see `Store`."""
        sql = f"SELECT {_COLUMNS} FROM audit "  # noqa: S608 - names of this module
        sql += "WHERE number > ? AND at_s >= ? AND (CAST(? AS text) IS NULL OR actor = ? OR subject = ?) "
        sql += "ORDER BY number LIMIT ?" if after or oldest else "ORDER BY number DESC LIMIT ?"
        user = wanted.user
        rows = sorted(self._read(sql, after, wanted.since_s or 0.0, user, user, user, limit))
        return tuple(_line(row) for row in rows)

    def prune_audit(self, before_s: float, now_s: float) -> None:
        """Delete old records, and append which one was the last of them; see `Store`."""

        def write(session: Session) -> AuditEnd | None:
            self._lock_audit(session)
            kept = "SELECT min(number) FROM audit WHERE at_s >= ?"
            (first_kept,) = self._execute(session, kept, before_s).fetchone()
            last_old = f"SELECT {_COLUMNS} FROM audit WHERE at_s < ? AND number < ? ORDER BY number DESC LIMIT 1"  # noqa: S608 - names of this module
            limit = first_kept if first_kept is not None else 2**63 - 1
            row = self._execute(session, last_old, before_s, limit).fetchone()
            if row is None:
                return None
            cut = line_end(_line(row))
            record = AuditRecord(
                at_s=now_s, action=PRUNED, actor="server", subject=str(cut.number), detail=cut.digest.hex()
            )
            end = self._append_lines(session, [record])
            self._execute(session, "DELETE FROM audit WHERE number <= ?", cut.number)
            return end

        self._remember_audit(self._write(write))

    def _append_lines(self, session: Session, records: Sequence[AuditRecord]) -> AuditEnd | None:
        """Append records in the transaction of `session`; return the end of the log, None without a record."""
        if not records:
            return None
        self._lock_audit(session)
        row = self._execute(session, _LAST).fetchone()
        end = line_end(_line(row)) if row is not None else audit_start(self.store_id)
        known = self._audit_end
        if end.number < known.number or (end.number == known.number and known.number and end != known):
            raise AuditDamagedError(known)
        lines = []
        for record in records:
            lines.append(next_line(end, record))
            end = line_end(lines[-1])
        self._execute_many(session, _INSERT, [[getattr(one, name) for name in AUDIT_FIELDS] for one in lines])
        return end

    def _remember_audit(self, end: AuditEnd | None) -> None:
        """Remember the durable end of the audit log, unless a later one is known already."""
        with self._audit_lock:
            if end is not None and end.number > self._audit_end.number:
                self._audit_end = end
                self._on_audit_durable(LogEnd(*end))

    def _is_pruned(self, number: int) -> bool:
        """Return whether a line says that the one of a number was removed for its age."""
        sql = f"SELECT {_COLUMNS} FROM audit WHERE action = ?"  # noqa: S608 - names of this module
        cuts = (pruned_end(_line(row)) for row in self._read(sql, PRUNED))
        return any(cut is not None and cut.number >= number for cut in cuts)


def read_lines(read: Callable[..., list[Any]]) -> Iterator[AuditRecord]:
    """Yield all lines in the order of their numbers; `read` returns the rows of a query."""
    page = f"SELECT {_COLUMNS} FROM audit WHERE number > ? ORDER BY number LIMIT ?"  # noqa: S608 - names of this module
    after = -1
    while rows := read(page, after, _PAGE_SIZE):
        yield from map(_line, rows)
        after = rows[-1][0]


def chain_lines(store_id: str, rows: Iterable[Sequence[Any]]) -> list[tuple[str, int]]:
    """Return (hash, number) for the rows of an audit log without hashes, in order."""
    before, found = audit_start(store_id).digest, list[tuple[str, int]]()
    for row in rows:
        line = _line([*row, ""])
        before = line_digest(before, line)
        found.append((before.hex(), line.number))
    return found


def _line(row: Sequence[Any]) -> AuditRecord:
    return AuditRecord.model_construct(**dict(zip(AUDIT_FIELDS, row, strict=True)))
