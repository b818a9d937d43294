"""Attacks on what a server keeps: its snapshot, its event log, and the database of another."""

from __future__ import annotations

import json
import pickle
import shutil
import sqlite3
import subprocess
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.server.backup_file import check_store_of
from isthmus.control.server.log_end_file import LogEndFile
from isthmus.control.server.server_config import ServerConfig, open_store
from isthmus.control.service.coordinator_actor import CoordinatorActor
from isthmus.control.state.events import AgentReported, JobCancelled, JobSubmitted
from isthmus.control.store.log_chain import LogDamagedError, chain_start, link_rows
from isthmus.control.store.snapshot_codec import serialize_state
from isthmus.control.store.snapshot_file import SnapshotFile
from isthmus.control.store.sqlite_store import SqliteStore
from isthmus.control.store.store_interface import MemoryStore
from isthmus.core.errors import IsthmusError
from tests.control.serving import EAST, report, submission

pytestmark = pytest.mark.attack


class Popen:
    """An object whose pickle calls `subprocess.Popen`."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return subprocess.Popen, (["touch", str(self.marker)],)


@pytest.fixture
def store() -> MemoryStore:
    """A log with a site and two jobs."""
    store = MemoryStore()
    store.append([AgentReported.from_report(report(EAST), 0.5)])
    store.append([JobSubmitted(now_s=1, job_id=f"j{i}", user="u", submission=submission()) for i in range(2)])
    return store


def start(store: MemoryStore, folder: Path) -> tuple[int, list[int]]:
    """Start on the log with the snapshot of `folder`; return the snapshot's event and the events replayed."""
    resumed, replayed = [0], list[int]()
    CoordinatorActor(
        store,
        lambda event: replayed.append(event.number),
        snapshot_file=SnapshotFile(folder),
        on_snapshot_loaded=lambda number, _: resumed.append(number),
    )
    return resumed[-1], replayed


@pytest.mark.parametrize("dotted", [True, False])
def test_a_pickle_in_place_of_a_snapshot_runs_nothing(
    store: MemoryStore, tmp_path: Path, caplog: pytest.LogCaptureFixture, dotted: bool
) -> None:
    """A valid head with a pickled body, also one that names a function behind a dot: ignored with a warning."""
    marker = tmp_path / "ran"
    body = pickle.dumps(Popen(marker), protocol=4)
    if dotted:  # the function as an attribute of a module of the package
        module, name = b"isthmus.control.service.planner_process", b"subprocess.Popen"
        body = body.replace(b"\x8c\nsubprocess", b"\x8c" + bytes([len(module)]) + module)
        body = body.replace(b"\x8c\x05Popen", b"\x8c" + bytes([len(name)]) + name)
        body = body[:3] + (len(body) - 11).to_bytes(8, "little") + body[11:]  # the length of the frame
    SnapshotFile(tmp_path).save(store, 3, body)
    assert start(store, tmp_path) == (0, [1, 2, 3])
    assert "ignoring snapshot" in caplog.text
    assert not marker.exists()


def lengthen(body: dict[str, Any]) -> None:
    body["state"]["jobs"][0][0] = 10**15


def mistype(body: dict[str, Any]) -> None:
    body["state"]["jobs"][1][1]["user"] = {"texts": [7], "at": [0, 0]}


def misplace(body: dict[str, Any]) -> None:
    body["state"]["jobs"][1][1]["user"] = {"texts": ["u"], "at": [0, 10**9]}


def rename(body: dict[str, Any]) -> None:
    body["state"]["__class__"] = "subprocess.Popen"


def misstate(body: dict[str, Any]) -> None:
    body["state"]["jobs"][1][1]["state"] = ["__reduce__", "running"]


def dangle(body: dict[str, Any]) -> None:
    body["parts_by_cluster"] = [[1], [["east"], [[1], [["j0"], [9]]]]]


@pytest.mark.parametrize("change", [lengthen, mistype, misplace, rename, misstate, dangle, dict.clear])
def test_a_crafted_body_is_ignored_in_bounded_memory(
    store: MemoryStore, tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Callable[[dict[str, Any]], None]
) -> None:
    """Every value is checked against the schema; a length without as many items costs nothing."""
    coordinator = Coordinator.replay(event for _, event in store.events())
    body = json.loads(serialize_state(coordinator.state))
    SnapshotFile(tmp_path).save(store, 3, json.dumps([body]).encode()[1:-1])
    assert start(store, tmp_path) == (3, [])
    change(body)
    SnapshotFile(tmp_path).save(store, 3, json.dumps(body).encode())
    tracemalloc.start()
    try:
        assert start(store, tmp_path) == (0, [1, 2, 3])
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert "ignoring snapshot" in caplog.text


def test_nesting_without_end_is_ignored(store: MemoryStore, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A body of a million brackets is refused; the process goes on."""
    SnapshotFile(tmp_path).save(store, 3, b"[" * 1_000_000)
    assert start(store, tmp_path) == (0, [1, 2, 3])
    assert "ignoring snapshot" in caplog.text


def test_a_snapshot_of_an_earlier_version_is_ignored(store: MemoryStore, tmp_path: Path) -> None:
    """It was a pickle under the same name: the log is replayed, and the next snapshot takes its place."""
    SnapshotFile(tmp_path, code="earlier").save(store, 3, pickle.dumps({"state": 1}))
    assert start(store, tmp_path) == (0, [1, 2, 3])


class Life:
    """The store of a server in `folder` and the file that remembers its end, as `run_server` opens them."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.store = open_store(ServerConfig(state=folder))
        self.log_end = LogEndFile(folder)
        try:
            assert isinstance(self.store, SqliteStore)
            self.log_end.follow(self.store)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.log_end.close()
        self.store.close()

    @classmethod
    def replay(cls, folder: Path) -> int:
        """Start, replay the log, stop; return the number of events."""
        life = cls(folder)
        try:
            return len(list(life.store.events()))
        finally:
            life.close()


def log_of(folder: Path, num_events: int = 40) -> Path:
    """Write a log as a server does and close it; return its database."""
    life = Life(folder)
    for number in range(num_events):
        life.store.append([JobCancelled(now_s=float(number), job_id=f"job-{number}")])
    life.close()
    return folder / "isthmus.db"


def change(database: Path, *statements: str) -> None:
    with closing(sqlite3.connect(database)) as db, db:
        for statement in statements:
            db.execute(statement)


def problems(folder: Path) -> tuple[str, ...]:
    found: tuple[str, ...] = check_store_of(ServerConfig(state=folder)).problems
    return found


def refuses(folder: Path, message: str) -> None:
    """The server neither starts nor replays the log."""
    with pytest.raises(IsthmusError, match=message):
        Life.replay(folder)


def test_a_flipped_byte_in_the_middle_of_the_log_is_named(tmp_path: Path) -> None:
    """Also where the event still parses: the hash names its number, in `check` and at a replay."""
    change(log_of(tmp_path), "UPDATE events SET body = replace(body, 'job-20', 'job-21') WHERE number = 21")
    assert problems(tmp_path) == ("event 21: its hash does not fit its content and the event before",)
    refuses(tmp_path, "damaged at event 21")


def test_a_forged_event_with_a_hash_of_its_own_breaks_the_next(tmp_path: Path) -> None:
    """A forger has to change all rows that follow, and then the last hash is not the one that the server knows."""
    database, store_id = log_of(tmp_path), LogEndFile(tmp_path).store_id or ""
    with closing(sqlite3.connect(database)) as db, db:
        bodies = [body.replace("job-20", "job-99") for (body,) in db.execute("SELECT body FROM events ORDER BY number")]
        rows = [(body, digest, number) for number, body, digest in link_rows(chain_start(store_id), bodies)]
        db.executemany("UPDATE events SET body = ?, hash = ? WHERE number = ?", rows[:30])
    assert problems(tmp_path) == ("event 31: its hash does not fit its content and the event before",)
    with closing(sqlite3.connect(database)) as db, db:
        db.executemany("UPDATE events SET body = ?, hash = ? WHERE number = ?", rows)
    assert problems(tmp_path) == ("event 40, which this server has acknowledged, is missing or another one",)
    refuses(tmp_path, "event 40: it is another one than was acknowledged")


def test_a_deleted_event_is_named(tmp_path: Path) -> None:
    """Numbers have no gap."""
    change(log_of(tmp_path), "DELETE FROM events WHERE number = 7")
    assert problems(tmp_path) == ("event 7: it is missing, the next one is 8",)
    refuses(tmp_path, "damaged at event 7: it is missing")


def test_acknowledged_events_at_the_end_that_are_gone_stop_the_server(tmp_path: Path) -> None:
    """The chain of the rest is whole: the state folder knows how far it went."""
    change(log_of(tmp_path), "DELETE FROM events WHERE number > 35")
    assert problems(tmp_path) == ("event 40, which this server has acknowledged, is missing or another one",)
    refuses(tmp_path, "damaged at event 36: the log ends with event 35, but event 40 was acknowledged")


def test_an_emptied_database_is_refused_and_stays_empty(tmp_path: Path) -> None:
    """Without its rows, without its tables, or without the file: the server makes no new store in its place."""
    database = log_of(tmp_path)
    change(database, "DELETE FROM events")
    refuses(tmp_path, "the log ends with event 0, but event 40 was acknowledged")
    for file in tmp_path.glob("isthmus.db*"):
        file.unlink()
    refuses(tmp_path, "holds no store: it is empty or was emptied")
    with closing(sqlite3.connect(database)) as db:
        assert db.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)


def test_the_database_of_another_server_is_refused(tmp_path: Path) -> None:
    """Its log is whole, but it is another store's: nothing is appended to it."""
    log_of(tmp_path / "mine", 3)
    other = log_of(tmp_path / "other", 9)
    shutil.copy(other, tmp_path / "mine" / "isthmus.db")
    refuses(tmp_path / "mine", "this state folder belongs to store [0-9a-f]{32}, but the database belongs to store")
    assert problems(tmp_path / "mine")[0].startswith("the state folder belongs to store")


def test_a_log_that_loses_events_under_a_running_server_takes_no_more(tmp_path: Path) -> None:
    """As a database that fails over to a copy without the newest commits: appends and reads fail, nothing is forked."""
    log_of(tmp_path, 5)
    life = Life(tmp_path)
    change(tmp_path / "isthmus.db", "DELETE FROM events WHERE number > 3")
    with pytest.raises(LogDamagedError, match="the log ends with event 3, but event 5 was acknowledged"):
        life.store.append([JobCancelled(now_s=1.0, job_id="fork")])
    with pytest.raises(LogDamagedError, match="event 5 was acknowledged"):
        list(life.store.events())
    life.close()


def test_a_remembered_end_that_was_tampered_with_is_not_trusted(tmp_path: Path) -> None:
    """The file has a checksum; one that does not fit stops the start and says what to do."""
    log_of(tmp_path, 3)
    file = tmp_path / "log-end"
    file.write_bytes(file.read_bytes().replace(b"0003 ", b"0001 "))
    refuses(tmp_path, "it does not say which event was acknowledged last")
