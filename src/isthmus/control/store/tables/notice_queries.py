"""`NoticeQueries`: the notices of an SQL store that wait for their delivery, appended with their events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from pydantic import ValidationError

from isthmus.control.state.events import NoticeDue
from isthmus.control.store.store_interface import StoredNotice
from isthmus.control.store.tables.table_queries import TableQueries

Session = TypeVar("Session")


class NoticeQueries(TableQueries[Session]):
    """The part of a `Store` that keeps notices; a subclass runs the statements."""

    def notices(self, after: int = 0, limit: int = 1000) -> tuple[StoredNotice, ...]:
        """Return notices; see `Store`. One that this version cannot read is left out."""
        rows = self._read(
            "SELECT number, batch, body FROM notices WHERE number > ? ORDER BY number LIMIT ?", after, limit
        )
        found = []
        for number, batch, body in rows:
            try:
                found.append(StoredNotice(number, NoticeDue.model_validate_json(body), batch))
            except ValidationError:
                continue
        return tuple(found)

    def batch_notices(self, batch: int, numbers: Sequence[int]) -> None:
        """Put notices into one message; see `Store`."""
        sql, rows = "UPDATE notices SET batch = ? WHERE number = ?", [(batch, number) for number in numbers]
        self._write(lambda session: self._execute_many(session, sql, rows))

    def delete_notices(self, numbers: Sequence[int]) -> None:
        """Delete notices; see `Store`."""
        sql, rows = "DELETE FROM notices WHERE number = ?", [(number,) for number in numbers]
        self._write(lambda session: self._execute_many(session, sql, rows))

    def _append_notices(self, session: Session, notices: Sequence[NoticeDue]) -> None:
        """Append notices in the transaction of `session`."""
        if notices:
            rows = [(due.model_dump_json(),) for due in notices]
            self._execute_many(session, "INSERT INTO notices (batch, body) VALUES (0, ?)", rows)
