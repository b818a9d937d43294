"""`compact_log`: compaction of a store by hand, while its server is stopped; what `LogCompactor` does in a running one.

Other servers on the same PostgreSQL database may run: they take the new base at their next read.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.server.backup_file import open_stored_log
from isthmus.control.server.log_archive import archive_events
from isthmus.control.server.log_end_file import AuditEndFile, LogEndFile
from isthmus.control.server.server_config import DATABASE_FILE, ServerConfig, open_store
from isthmus.control.server.stored_log import check_log
from isthmus.control.service.access.audit_log import make_line
from isthmus.control.store.log_base import LogBase
from isthmus.control.store.log_chain import LogEnd
from isthmus.control.store.snapshot_codec import restore_base, serialize_state
from isthmus.control.store.sql_queries import SqlQueries
from isthmus.core.errors import ConflictError, IsthmusError
from isthmus.core.process.gc_pause import collection_paused
from isthmus.core.process.state_folder_lock import lock_state_folder

PROGRESS_EVENTS = 5000
"""Events between two calls of `progress`."""

Progress = Callable[[str, int], None]
"""Receives a step (`replayed`, `archived`, `dropped`) and its number of events so far."""


@dataclass(frozen=True, kw_only=True)
class CompactionReport:
    """What a compaction did. Bytes are those of the database file, None for PostgreSQL."""

    # Number of the last event that the base replaces.
    base: int
    num_dropped: int
    num_kept: int
    archive: str | None
    before_bytes: int | None
    after_bytes: int | None

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form that the command prints."""
        found = {"base": self.base, "dropped": self.num_dropped, "kept": self.num_kept, "archive": self.archive}
        return {**found, "before_bytes": self.before_bytes, "after_bytes": self.after_bytes}


def compact_log(
    config: ServerConfig, now_s: float, progress: Progress = lambda _step, _count: None
) -> CompactionReport:
    """Replace the events that are older than the policy keeps by a base, and free their place on disk.

    The base is the state that a replay of these events makes. An interrupted compaction is completed by the next one.
    Raises `UnavailableError` if a server uses the state folder, and `ConflictError` if the log is damaged.
    """
    with lock_state_folder(config.state, "server"):
        before_bytes = _file_bytes(config)
        log_end, audit_end = LogEndFile(config.state), AuditEndFile(config.state)
        with open_stored_log(config) as log:
            report = check_log(log, log_end.store_id, log_end.end)
        if report.problems:
            raise ConflictError(
                f"the log of {report.name} is not compacted: {report.problems[0]}",
                hint="a damaged log keeps its events: see docs/guide/backup.md",
            )
        store = open_store(config)
        try:
            if not isinstance(store, SqlQueries):
                raise IsthmusError("this store cannot be compacted", hint="this is a bug: please report it")
            log_end.follow(store)
            audit_end.follow(store)
            last = log_end.end.number
            base, archive = _make_base(store, now_s - config.compaction.keep_s, now_s, progress), None
            if base is not None:
                store.bases.stage(base)
                if config.archive is not None:
                    with open_stored_log(config) as log:
                        archive = str(archive_events(log, base.end, config.archive, config.archive_bytes))
                    progress("archived", base.end.number)
                with store.exclusive_access():
                    line = make_line("log-compacted", None, now_s, detail=f"events up to {base.end.number}")
                    last = store.append([base.event(now_s)], audit=[line])
                log_end.flush()
                store.bases.activate(base)
            num_dropped = 0
            while count := store.bases.drop_events():
                num_dropped += count
                progress("dropped", num_dropped)
            end = store.bases.active_end()
        finally:
            log_end.close()
            audit_end.close()
            store.close()
        _shrink(config)
    number = 0 if end is None else end.number
    return CompactionReport(
        base=number, num_dropped=num_dropped, num_kept=last - number, archive=archive, before_bytes=before_bytes,
        after_bytes=_file_bytes(config),
    )  # fmt: skip


def _make_base(store: SqlQueries[Any], before_s: float, now_s: float, progress: Progress) -> LogBase | None:
    """Return the base after the last event from before `before_s`, None if the present one replaces all of them."""
    active = store.bases.active()
    coordinator = Coordinator() if active is None else Coordinator.from_state(restore_base(active))
    first = number = 0 if active is None else active.end.number
    with collection_paused():
        for found, event in store.events(first):
            if event.now_s >= before_s:
                break
            coordinator.handle(event)
            number = found
            if (number - first) % PROGRESS_EVENTS == 0:
                progress("replayed", number - first)
    digest = store.digest_at(number)
    if number == first or digest is None:
        return None
    progress("replayed", number - first)
    return LogBase.of(serialize_state(coordinator.state), LogEnd(number, digest), now_s)


def _file_bytes(config: ServerConfig) -> int | None:
    file: Path = config.state / DATABASE_FILE
    return file.stat().st_size if config.database is None and file.exists() else None


def _shrink(config: ServerConfig) -> None:
    """Return the place of deleted rows to the file system; PostgreSQL's autovacuum reuses it."""
    if config.database is None:
        with closing(sqlite3.connect(config.state / DATABASE_FILE, isolation_level=None)) as db:
            db.execute("VACUUM")
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
