"""`write_backup`: a store as one SQLite file, with its log verified; `isthmus server restore` reads it into any store.

SQLite is copied by its online backup, PostgreSQL read in one transaction; both while servers append.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from isthmus.control.server.log_end_file import AuditEndFile, LogEndFile
from isthmus.control.server.server_config import DATABASE_FILE, ServerConfig, read_database_address
from isthmus.control.server.stored_log import (
    LogReport,
    SqliteLog,
    StoredLog,
    check_log,
    open_postgres_log,
    open_sqlite_log,
    store_identity,
)
from isthmus.control.store.sql_queries import TOKEN_FIELDS
from isthmus.control.store.sqlite_store import SqliteStore
from isthmus.control.store.tables.audit_queries import AUDIT_FIELDS, chain_lines
from isthmus.core.errors import ConflictError
from isthmus.core.process.state_folder_lock import fsync_path, unwritable_folder_error


@dataclass(frozen=True)
class CopiedTable:
    """A table of a store by its columns; rows are read in the order of the first one, which is the key."""

    name: str
    # Sorts before every key of the table.
    before_first: int | str
    columns: tuple[str, ...]
    page_size: int = 1000
    # PostgreSQL numbers the rows itself, and takes the numbers of a backup on demand.
    is_numbered: bool = False

    def select(self, columns: Sequence[str]) -> str:
        """Return the query of the next page of rows; its value is the key of the row before."""
        key = self.columns[0]
        return f"SELECT {', '.join(columns)} FROM {self.name} WHERE {key} > ? ORDER BY {key} LIMIT {self.page_size}"  # noqa: S608 - names of this module

    def insert(self, columns: Sequence[str], mark: str = "?", words: str = "") -> str:
        """Return the statement that inserts a row, each value marked with `mark`; `words` stand before the values."""
        marks = ", ".join([mark] * len(columns))
        return f"INSERT INTO {self.name} ({', '.join(columns)}) {words}VALUES ({marks})"


COPIED_TABLES = (
    CopiedTable("events", -1, ("number", "body", "hash")),
    CopiedTable("bases", -1, ("number", "hash", "made_s", "active", "body"), page_size=10),
    CopiedTable("metrics", -1, ("number", "job", "attempt", "rank", "step", "body"), is_numbered=True),
    CopiedTable("logs", -1, ("number", "job", "attempt", "rank", "start", "stop", "body"), is_numbered=True),
    CopiedTable("tokens", "", TOKEN_FIELDS),
    CopiedTable("audit", -1, AUDIT_FIELDS),
    CopiedTable("notices", -1, ("number", "batch", "body"), is_numbered=True),
    CopiedTable("secrets", "", ("name", "value")),
)
"""What a backup holds beside the identity; leadership is not part of it."""


@contextmanager
def open_stored_log(config: ServerConfig) -> Iterator[StoredLog]:
    """Open the tables of a server's store for reading, while servers may be running."""
    if config.database is not None:
        with open_postgres_log(read_database_address(config.database)) as log:
            yield log
    else:
        with open_sqlite_log(config.state / DATABASE_FILE) as log:
            yield log


def check_store_of(config: ServerConfig) -> LogReport:
    """Verify the log of a server's store, against what its state folder knows."""
    known, known_audit = LogEndFile(config.state), AuditEndFile(config.state)
    with open_stored_log(config) as log:
        return check_log(log, known.store_id, known.end, known_audit.end)


def write_backup(config: ServerConfig, file: Path) -> LogReport:
    """Copy the store of `config` to `file`, verify the copy, and return the report.

    The copy holds the hashes of tokens and is readable by its owner alone. Raises `ConflictError` if `file` exists or
    the log has a problem, and `UnavailableError` if it cannot be written.
    """
    if file.exists():
        raise ConflictError(f"{file} exists already", hint="name another file: a backup overwrites nothing")
    draft = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        with open_stored_log(config) as log:
            _copy(log, draft)
        report = replace(verify_file(draft), name=str(file))
        fsync_path(draft)
        os.link(draft, file)
        fsync_path(file.parent)
    except FileExistsError as error:
        raise ConflictError(f"{file} exists already", hint="name another file") from error
    except OSError as error:
        raise unwritable_folder_error(file.parent, error) from error
    finally:
        for suffix in ("", "-wal", "-shm", ".lock"):
            draft.with_name(draft.name + suffix).unlink(missing_ok=True)
    return report


def verify_file(file: Path) -> LogReport:
    """Verify the log of a backup; raise `ConflictError` with the first problem, if there is one."""
    with open_sqlite_log(file) as log:
        report = check_log(log)
    if report.problems:
        raise ConflictError(
            f"the log of {file} is not complete: {report.problems[0]}", hint="isthmus server check lists the problems"
        )
    return report


def copied_pages(log: StoredLog, table: CopiedTable) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
    """Yield pages of rows of a table in the order of its key, each with the columns that its rows have.

    A store of an earlier version lacks the tables and columns that later migrations add; a copy gets their defaults.
    """
    present = log.columns(table.name)
    columns = tuple(name for name in table.columns if name in present)
    if not columns:
        return
    if table.name == "audit" and "hash" not in present:  # as the migration would, since the copy has no migration left
        rows = [row for page in _pages(log, table, columns) for row in page]
        hashes = chain_lines(store_identity(log) or "", rows)
        yield table.columns, [[*row, digest] for row, (digest, _) in zip(rows, hashes, strict=True)]
        return
    for page in _pages(log, table, columns):
        yield columns, page


def _pages(log: StoredLog, table: CopiedTable, columns: tuple[str, ...]) -> Iterator[list[Any]]:
    query, after = table.select(columns), table.before_first
    while rows := log.rows(query, after):
        yield rows
        after = rows[-1][0]


def _copy(log: StoredLog, draft: Path) -> None:
    if isinstance(log, SqliteLog):
        with closing(sqlite3.connect(draft)) as copy:
            log.db.backup(copy)
            copy.execute("PRAGMA journal_mode = DELETE")
        return
    SqliteStore(draft, new_id=store_identity(log)).close()
    with closing(sqlite3.connect(draft)) as copy:
        copy.execute("PRAGMA journal_mode = DELETE")
        with copy:
            for table in COPIED_TABLES:
                for columns, rows in copied_pages(log, table):
                    copy.executemany(table.insert(columns), [_as_sqlite(table, row) for row in rows])


def _as_sqlite(table: CopiedTable, row: Sequence[Any]) -> list[Any]:
    """Return a row as SQLite stores it: PostgreSQL has the text of logs as bytes."""
    return [bytes(one).decode() if table.name == "logs" and isinstance(one, bytes | memoryview) else one for one in row]
