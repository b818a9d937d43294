"""`restore_backup`: a backup becomes a server's store; `accept_log`: the log that a database has now becomes its log.

Both append `LogRestored`: the server then reconciles with the sites (`reconcile_log`) before it starts jobs.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from isthmus.control.server.backup_file import (
    COPIED_TABLES,
    CopiedTable,
    copied_pages,
    open_stored_log,
    verify_file,
)
from isthmus.control.server.log_end_file import AuditEndFile, LogEndFile
from isthmus.control.server.server_config import DATABASE_FILE, ServerConfig, open_store, read_database_address
from isthmus.control.server.stored_log import LogReport, check_log, open_sqlite_log
from isthmus.control.service.access.audit_log import make_line
from isthmus.control.state.events import LogRestored
from isthmus.control.store.log_chain import LogEnd
from isthmus.control.store.snapshot_file import SNAPSHOT_FILE_NAME
from isthmus.control.store.sql_queries import SqlQueries
from isthmus.core.errors import ConflictError, IsthmusError
from isthmus.core.process.state_folder_lock import fsync_path, lock_state_folder


def restore_backup(config: ServerConfig, file: Path, now_s: float, gone: Sequence[str], *, replaces: bool) -> LogReport:
    """Make the store of `file` that of the server, and record the restore; return the report of the file.

    An SQLite database that is there is only replaced with `replaces`, and kept beside the new one; a PostgreSQL
    database must be empty. Raises `ConflictError` otherwise, or if the log of the file has a problem.
    """
    with lock_state_folder(config.state, "server"):
        report = verify_file(file)
        if config.database is None:
            _restore_sqlite(config.state, file, replaces=replaces)
        else:
            _restore_postgres(read_database_address(config.database), file, report.store or "")
        _record_restore(config, report, now_s, gone)
    return report


def accept_log(config: ServerConfig, now_s: float, gone: Sequence[str]) -> LogReport:
    """Take the log that the database has now, although it lacks acknowledged events, and record the restore.

    Raises `ConflictError` if the log itself is damaged.
    """
    with lock_state_folder(config.state, "server"):
        known = LogEndFile(config.state).store_id
        with open_stored_log(config) as log:
            report = check_log(log, known)
        if report.problems:
            raise ConflictError(
                f"the log of {report.name} cannot be accepted: {report.problems[0]}",
                hint="restore a backup, or name the right database",
            )
        _record_restore(config, report, now_s, gone)
    return report


def _record_restore(config: ServerConfig, report: LogReport, now_s: float, gone: Sequence[str]) -> None:
    """Set the end that the state folder knows to that of the log, and append the event of the restore."""
    if report.store is None:
        raise IsthmusError(f"{report.name} has no identity", hint="this is a bug: please report it")
    log_end = LogEndFile(config.state)
    log_end.reset(report.store, report.end)
    audit_end = AuditEndFile(config.state)
    audit_end.reset(report.store, LogEnd(0, b""))
    (config.state / SNAPSHOT_FILE_NAME).unlink(missing_ok=True)
    store = open_store(config)
    try:
        if isinstance(store, SqlQueries):
            log_end.follow(store)
            audit_end.follow(store)
        detail = f"{report.name} up to event {report.end.number}" + (f"; gone: {', '.join(gone)}" if gone else "")
        line = make_line("store-restored", None, now_s, detail=detail)
        store.append([LogRestored(now_s=now_s, gone=tuple(gone))], audit=[line])
    finally:
        log_end.close()
        audit_end.close()
        store.close()


def _restore_sqlite(state: Path, file: Path, *, replaces: bool) -> None:
    database = state / DATABASE_FILE
    if database.exists():
        if not replaces:
            raise ConflictError(
                f"{database} exists already", hint="use another state folder, or --replace, which keeps it beside"
            )
        _move_aside(database)
    draft = state / f".{DATABASE_FILE}.restored"
    draft.unlink(missing_ok=True)
    with closing(sqlite3.connect(file)) as source, closing(sqlite3.connect(draft)) as copy:
        draft.chmod(0o600)
        source.backup(copy)
    fsync_path(draft)
    draft.replace(database)
    fsync_path(state)


def _move_aside(database: Path) -> None:
    """Rename a database, with its write-ahead log, to the first free name `...replaced-N`."""
    number = 1
    while (aside := database.with_name(f"{database.name}.replaced-{number}")).exists():
        number += 1
    for suffix in ("", "-wal", "-shm"):
        part = database.with_name(database.name + suffix)
        if part.exists():
            part.replace(aside.with_name(aside.name + suffix))


def _restore_postgres(address: str, file: Path, store_id: str) -> None:
    """Copy a backup into an empty database, in one transaction."""
    from isthmus.control.store.postgres_schema import migrate
    from isthmus.control.store.postgres_store import PostgresSession

    session = PostgresSession(address)
    try:
        with open_sqlite_log(file) as log, session.connection() as db, db.transaction():
            if db.execute("SELECT to_regclass('events')").fetchone() != (None,):
                raise ConflictError(
                    "the PostgreSQL database has a store already", hint="create an empty database and name that"
                )
            migrate(db, None, store_id)
            with db.cursor() as cursor:
                for table in COPIED_TABLES:
                    words = "OVERRIDING SYSTEM VALUE " if table.is_numbered else ""
                    for columns, rows in copied_pages(log, table):
                        insert = table.insert(columns, "%s", words)
                        cursor.executemany(insert.encode(), [_as_postgres(table, row) for row in rows])
            for statement in _POSTGRES_SEQUENCES:
                db.execute(statement)
    finally:
        session.close()


def _as_postgres(table: CopiedTable, row: Sequence[Any]) -> list[Any]:
    """Return a row as PostgreSQL stores it: the text of logs as bytes."""
    return [*row[:-1], row[-1].encode()] if table.name == "logs" else list(row)


_POSTGRES_SEQUENCES = (
    "SELECT setval(pg_get_serial_sequence('notices', 'number'), coalesce(max(number), 0) + 1, false) FROM notices",
    "SELECT setval(pg_get_serial_sequence('metrics', 'number'), coalesce(max(number), 0) + 1, false) FROM metrics",
    "SELECT setval(pg_get_serial_sequence('logs', 'number'), coalesce(max(number), 0) + 1, false) FROM logs",
)
