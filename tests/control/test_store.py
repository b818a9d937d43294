"""The rules of the store: the contract both implementations keep, and what a file on a disk adds to it."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from isthmus.control.state.events import JobCancelled, decode_event, encode_event
from isthmus.control.store.check_store import check_store
from isthmus.control.store.sqlite_store import MIGRATIONS, SqliteStore
from isthmus.control.store.store_interface import MemoryStore, Store
from isthmus.core.errors import InputError, ProtocolError, UnavailableError
from isthmus.core.messages.agent_messages import StepMetrics


def event(number: int) -> JobCancelled:
    return JobCancelled(now_s=float(number), job_id=f"job-{number}")


def test_memory_store_keeps_the_contract() -> None:
    """The fake keeps the same contract as the real store."""
    check_store(MemoryStore()).close()


def test_sqlite_store_keeps_the_contract(tmp_path: Path) -> None:
    """The embedded store keeps the contract, across a reopen too."""

    def reopen(store: Store) -> Store:
        store.close()
        return SqliteStore(tmp_path / "pool.db")

    check_store(SqliteStore(tmp_path / "pool.db"), reopen).close()


def test_the_file_is_the_owners_alone(tmp_path: Path) -> None:
    """The database and everything beside it has mode 0600, whatever the umask and an earlier mode."""
    path = tmp_path / "pool.db"
    path.touch(mode=0o644)
    before = os.umask(0o000)
    try:
        store = SqliteStore(path)
        store.append([event(1)])
        modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
        store.close()
    finally:
        os.umask(before)
    assert set(modes.values()) == {0o600}, modes


def test_a_second_server_is_turned_away(tmp_path: Path) -> None:
    """One file has one server; once that is gone, the next may have it."""
    first = SqliteStore(tmp_path / "pool.db")
    with pytest.raises(UnavailableError, match=r"pool\.db is in use by another server"):
        SqliteStore(tmp_path / "pool.db")
    first.close()
    first.close()
    SqliteStore(tmp_path / "pool.db").close()


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    """A database written by a newer version is left as it is."""
    SqliteStore(tmp_path / "pool.db").close()
    with sqlite3.connect(tmp_path / "pool.db") as db:
        db.execute("INSERT INTO migrations (version) VALUES (?)", (len(MIGRATIONS) + 1,))
    db.close()
    with pytest.raises(ProtocolError, match=f"schema version {len(MIGRATIONS) + 1}"):
        SqliteStore(tmp_path / "pool.db")


@pytest.mark.parametrize("kind", ["missing folder", "folder", "not a database"])
def test_a_path_that_cannot_be_used_is_named(tmp_path: Path, kind: str) -> None:
    """Whatever is wrong with the path, the error is one sentence that names it."""
    path = tmp_path / "sub" / "pool.db" if kind == "missing folder" else tmp_path / "pool.db"
    if kind == "folder":
        path.mkdir()
    if kind == "not a database":
        path.write_text("not a database, but long enough to be looked at as one " * 50)
    with pytest.raises(UnavailableError, match=r"pool\.db"):
        SqliteStore(path)


def test_a_full_disk_fails_the_append_and_keeps_the_rest(tmp_path: Path) -> None:
    """An append that finds no space raises, is not half kept, and later ones succeed once there is space."""
    store = SqliteStore(tmp_path / "pool.db")
    store.append([event(1)])
    pages = store.writer.execute("PRAGMA page_count").fetchone()[0]
    store.writer.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(UnavailableError, match=r"pool\.db cannot be used: database or disk is full"):
        store.append([event(number) for number in range(2000)])
    store.writer.execute("PRAGMA max_page_count = 1000000")
    assert [one for _, one in store.events()] == [event(1)]
    assert store.append([event(2)]) == 2
    store.close()


def test_a_file_held_by_another_program_is_unavailable(tmp_path: Path) -> None:
    """A lock that another program keeps on the file is reported, and the store recovers when it goes."""
    store = SqliteStore(tmp_path / "pool.db", busy_timeout_s=0.0)
    other = sqlite3.connect(tmp_path / "pool.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(UnavailableError, match="locked"):
        store.append([event(1)])
    other.execute("ROLLBACK")
    other.close()
    assert store.append([event(1)]) == 1
    store.close()


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    """Using a store after `close` is an error of the tree, not of sqlite3."""
    store = SqliteStore(tmp_path / "pool.db")
    store.close()
    with pytest.raises(UnavailableError):
        store.append([event(1)])
    with pytest.raises(UnavailableError):
        store.tokens()


def test_an_interrupted_flush_keeps_what_was_acknowledged(tmp_path: Path) -> None:
    """The log cut anywhere behind the last acknowledged byte: all or none of the append is there."""
    path, wal = tmp_path / "pool.db", tmp_path / "pool.db-wal"
    store = SqliteStore(path)
    store.append([event(0)])
    acknowledged_bytes = wal.stat().st_size
    store.append([event(number) for number in range(1, 6)])
    flushed = wal.read_bytes()
    for cut in range(acknowledged_bytes, len(flushed) + 1, 512):
        copy = tmp_path / f"cut-{cut}.db"
        shutil.copy(path, copy)
        copy.with_name(copy.name + "-wal").write_bytes(flushed[:cut])
        again = SqliteStore(copy)
        found = [one for _, one in again.events()]
        assert found == [event(number) for number in range(6 if cut == len(flushed) else 1)]
        again.close()
    store.close()


def test_waiting_writers_share_a_flush(tmp_path: Path) -> None:
    """While one write is being flushed, all that arrive are committed together by the next (group commit)."""
    store = SqliteStore(tmp_path / "pool.db")
    commits: list[str] = []
    store.writer.set_trace_callback(lambda sql: commits.append(sql) if sql == "COMMIT" else None)
    store.group_commit.lock.acquire()
    with ThreadPoolExecutor(8) as pool:
        appends = [pool.submit(store.append, [event(number)]) for number in range(8)]
        while len(store.group_commit.queue) < 8:
            pass
        store.group_commit.lock.release()
    assert sorted(done.result() for done in appends)[-1] == 8
    assert len(commits) == 1
    store.close()


def test_bad_data_of_one_writer_fails_nobody_elses_write(tmp_path: Path) -> None:
    """Of writes that wait together only the one that cannot be stored fails, with an error about its data."""
    store = SqliteStore(tmp_path / "pool.db")
    huge = StepMetrics.model_construct(job="j", attempt=1, rank=0, step=2**70, values={})
    store.group_commit.lock.acquire()
    with ThreadPoolExecutor(3) as pool:
        good = [pool.submit(store.append, [event(number)]) for number in range(2)]
        bad = pool.submit(store.append_metrics, [huge])
        while len(store.group_commit.queue) < 3:
            pass
        store.group_commit.lock.release()
    assert sorted(done.result() for done in good) == [1, 2]
    with pytest.raises(InputError, match="too large to be stored"):
        bad.result()
    store.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"version": 1, "kind": "comet-sighted", "now_s": 0},
        {"version": 2, "kind": "job-cancelled", "now_s": 0, "job_id": "a"},
        {"kind": "job-cancelled", "now_s": 0, "job_id": "a"},
        {"version": 1, "kind": "job-cancelled", "now_s": 0, "job_id": "a", "more": 1},
    ],
)
def test_an_event_this_version_does_not_know_is_refused(fields: dict[str, object]) -> None:
    """A log that cannot be read whole is not read at all: no fact is dropped in silence."""
    with pytest.raises(ProtocolError, match="the event log contains"):
        decode_event(json.dumps(fields))


def test_the_written_form_of_an_event_is_pinned() -> None:
    """What version 1 wrote, every later version of this format reads."""
    text = '{"version":1,"now_s":3.0,"kind":"job-cancelled","job_id":"job-3"}'
    assert encode_event(event(3)) == text
    assert decode_event(text) == event(3)
    assert decode_event('{"version": 1, "now_s": 3.0, "kind": "job-cancelled", "job_id": "job-3"}') == event(3)
