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

from isthmus.control.server.log_end_file import LogEndFile
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
from isthmus.control.store.sqlite_store import SqliteStore
from isthmus.core.errors import ConflictError
from isthmus.core.process.state_folder_lock import fsync_path, unwritable_folder_error


@dataclass(frozen=True)
class CopiedTable:
    """A table of a store: the statements that read its next rows and that insert one."""

    name: str
    # Sorts before every key of the table.
    before_first: int | str
    select: str
    insert: str


COPIED_TABLES = (
    CopiedTable(
        "events",
        -1,
        "SELECT number, body, hash FROM events WHERE number > ? ORDER BY number LIMIT 1000",
        "INSERT INTO events (number, body, hash) VALUES (?, ?, ?)",
    ),
    CopiedTable(
        "bases",
        -1,
        "SELECT number, hash, made_s, active, body FROM bases WHERE number > ? ORDER BY number LIMIT 10",
        "INSERT INTO bases (number, hash, made_s, active, body) VALUES (?, ?, ?, ?, ?)",
    ),
    CopiedTable(
        "metrics",
        -1,
        "SELECT number, job, attempt, rank, step, body FROM metrics WHERE number > ? ORDER BY number LIMIT 1000",
        "INSERT INTO metrics (number, job, attempt, rank, step, body) VALUES (?, ?, ?, ?, ?, ?)",
    ),
    CopiedTable(
        "logs",
        -1,
        "SELECT number, job, attempt, rank, start, stop, body FROM logs WHERE number > ? ORDER BY number LIMIT 1000",
        "INSERT INTO logs (number, job, attempt, rank, start, stop, body) VALUES (?, ?, ?, ?, ?, ?, ?)",
    ),
    CopiedTable(
        "tokens",
        "",
        "SELECT digest, role, name, created_s, expires_s, revoked_s, created_by, site, replaces, high FROM tokens "
        "WHERE digest > ? ORDER BY digest LIMIT 1000",
        "INSERT INTO tokens (digest, role, name, created_s, expires_s, revoked_s, created_by, site, replaces, high) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    ),
    CopiedTable(
        "audit",
        -1,
        "SELECT number, at_s, action, actor, role, token, address, subject, detail FROM audit "
        "WHERE number > ? ORDER BY number LIMIT 1000",
        "INSERT INTO audit (number, at_s, action, actor, role, token, address, subject, detail) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
    ),
    CopiedTable(
        "secrets",
        "",
        "SELECT name, value FROM secrets WHERE name > ? ORDER BY name LIMIT 1000",
        "INSERT INTO secrets (name, value) VALUES (?, ?)",
    ),
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
    known = LogEndFile(config.state)
    with open_stored_log(config) as log:
        return check_log(log, known.store_id, known.end)


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


def copied_rows(log: StoredLog, table: CopiedTable) -> Iterator[list[Any]]:
    """Yield the rows of a table in pages, in the order of its statements."""
    after: Any = table.before_first
    if not log.has_table(table.name):  # a store of an earlier version
        return
    while rows := log.rows(table.select, after):
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
                for page in copied_rows(log, table):
                    copy.executemany(table.insert, [_as_sqlite(table, row) for row in page])


def _as_sqlite(table: CopiedTable, row: Sequence[Any]) -> list[Any]:
    """Return a row as SQLite stores it: PostgreSQL has the text of logs as bytes."""
    return [bytes(one).decode() if table.name == "logs" and isinstance(one, bytes | memoryview) else one for one in row]
