"""A database and a log as the first version wrote them are opened, brought up to date, and folded.

The files in `data/` are what that version wrote. They never change: a later format gets files of its own.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

import psycopg
import pytest

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.state.events import decode_event, encode_event
from isthmus.control.store import postgres_schema, sqlite_store
from isthmus.control.store.postgres_store import PostgresStore
from isthmus.control.store.sqlite_store import SqliteStore
from isthmus.control.store.store_interface import Store

DATA = Path(__file__).parent / "data"
LOG = (DATA / "log-v1.jsonl").read_text(encoding="utf-8").splitlines()


def check(store: Store) -> None:
    """What the old server had acknowledged is there, and the log goes on behind it."""
    events = [event for _, event in store.events()]
    assert len(events) == len(LOG)
    states = {job.id: (job.user, job.state) for job in Coordinator.replay(events).list_jobs()}
    assert states["tiny-00000002"] == ("bob", "cancelled")
    assert states["tiny-00000001"][0] == "ann"
    assert store.metrics("tiny-00000001").metrics[0].values == {"loss": 5.5}
    assert store.logs("tiny-00000001").chunks[0].text == "hello"
    assert [token.name for token in store.tokens()] == ["ann"]
    assert store.append([events[-1]], expected_last=len(LOG)) == len(LOG) + 1
    store.close()


def test_a_sqlite_file_of_the_first_version_is_brought_up_to_date(tmp_path: Path) -> None:
    """Every migration since is applied once, and noted."""
    path = tmp_path / "pool.db"
    with sqlite3.connect(path) as db:
        db.executescript((DATA / "sqlite-v1.sql").read_text(encoding="utf-8"))
        db.executemany("INSERT INTO events (body) VALUES (?)", [(text,) for text in LOG])
    db.close()
    check(SqliteStore(path))
    with sqlite3.connect(path) as db:
        versions = [version for (version,) in db.execute("SELECT version FROM migrations ORDER BY version")]
    db.close()
    assert versions == list(range(1, len(sqlite_store.MIGRATIONS) + 1))


@pytest.mark.slow
def test_a_postgres_database_of_the_first_version_is_brought_up_to_date(postgres: str) -> None:
    """The same, for the store that servers share."""
    with psycopg.connect(postgres) as db:
        db.execute((DATA / "postgres-v1.sql").read_bytes())
        for number, text in enumerate(LOG, start=1):
            db.execute("INSERT INTO events VALUES (%s, %s)", (number, text))
    check(PostgresStore(postgres))
    with psycopg.connect(postgres) as db:
        versions = [row[0] for row in db.execute("SELECT version FROM migrations ORDER BY version")]
    assert versions == list(range(1, len(postgres_schema.MIGRATIONS) + 1))


def test_old_events_are_written_again_as_they_are_read() -> None:
    """What this version makes of an old event means the same: read, written and read again."""
    for text in LOG:
        assert decode_event(encode_event(decode_event(text))) == decode_event(text)
