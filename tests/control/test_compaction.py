"""Compaction of the event log: nothing is lost at any step, and no reader but the disk sees it."""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isthmus.control.algorithms.compaction_policy import CompactionPolicy
from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.queries.history_page import history_page
from isthmus.control.server.backup_file import check_store_of, write_backup
from isthmus.control.server.compact_log import compact_log
from isthmus.control.server.log_archive import archive_events, check_archive
from isthmus.control.server.log_end_file import LogEndFile
from isthmus.control.server.restore_store import restore_backup
from isthmus.control.server.server_config import ServerConfig, open_store
from isthmus.control.server.stored_log import open_sqlite_log
from isthmus.control.service.coordinator_actor import CoordinatorActor
from isthmus.control.state.events import (
    AgentReported,
    Event,
    JobCancelled,
    JobDeleted,
    JobSubmitted,
    PlansMade,
    encode_event,
)
from isthmus.control.store.base_table import BaseTable
from isthmus.control.store.log_base import LogBase
from isthmus.control.store.log_chain import LogEnd, chain_start, link_rows
from isthmus.control.store.log_compactor import CHECK_INTERVAL_S, LogCompactor
from isthmus.control.store.snapshot_codec import restore_base, serialize_state
from isthmus.control.store.sql_queries import SqlQueries
from isthmus.core.errors import ConflictError, FileError, IsthmusError, UnavailableError
from isthmus.core.plan import PlanSet
from tests.cli.fake_server import FakeServer, run
from tests.control.samples import plan
from tests.control.serving import EAST, WEST, report, submission

pytestmark = pytest.mark.integration

BASE_FILE = Path(__file__).parent / "data" / "base-v1.bin"
POLICY = CompactionPolicy(keep_s=100.0, keep_bytes=1 << 30)


class CrashError(Exception):
    """The server ends here."""


def some_events(random_number: random.Random, begin_s: float, first: int, count: int) -> list[Event]:
    """Return events that admit each other: sites, jobs, plans, cancellations and deletions."""
    found: list[Event] = (
        [AgentReported.from_report(report(site), begin_s) for site in (EAST, WEST)] if first == 0 else []
    )
    for number in range(first, first + count):
        now_s, job_id = begin_s + number, f"j{number}"
        found.append(JobSubmitted(now_s=now_s, job_id=job_id, user=f"u{number % 3}", submission=submission()))
        if random_number.random() < 0.5:
            plans = PlanSet(plans=(plan("east", "west"),))
            found.append(PlansMade(now_s=now_s, job_id=job_id, round=1, plans=plans))
        if random_number.random() < 0.3:
            found.append(JobCancelled(now_s=now_s, job_id=job_id))
            found += [JobDeleted(now_s=now_s, job_id=job_id)] if random_number.random() < 0.5 else []
    return found


class Server:
    """A store with its log end and its actor, as a server opens them; `log` is every event that was ever appended."""

    def __init__(self, config: ServerConfig, log: list[Event]) -> None:
        self.log = log
        store = open_store(config)
        assert isinstance(store, SqlQueries)
        self.store, self.log_end = store, LogEndFile(config.state)
        try:
            self.log_end.follow(store)
            self.actor = CoordinatorActor(store, lambda _: None)
        except BaseException:
            self.close()
            raise

    def propose(self, event: Event) -> None:
        self.actor.propose(lambda _: event, lambda _: None)
        if self.actor.last_event_number > len(self.log):
            self.log.append(event)

    def record(self, event: Event) -> bool:
        self.propose(event)
        return True

    def compactor(self, policy: CompactionPolicy = POLICY) -> LogCompactor:
        return LogCompactor(self.store, policy, self.actor.durable_state, self.record, lambda _: self.log_end.flush())

    def state(self) -> bytes:
        return self.actor.durable_state()[1]

    def close(self) -> None:
        self.log_end.close()
        self.store.close()


def replayed(log: list[Event]) -> bytes:
    """Return the state that a replay of the whole log makes."""
    return serialize_state(Coordinator.replay(log).state)


def compact(server: Server, now_s: float, policy: CompactionPolicy = POLICY) -> list[str]:
    """Stage a base, compact the log `keep_s` later, and drop all; return the steps."""
    compactor = server.compactor(policy)
    steps = list[str]()
    for at_s in (now_s, now_s + policy.keep_s + CHECK_INTERVAL_S):
        while step := compactor.step(at_s, server.actor.last_event_number):
            steps.append(step)
            if steps[-2:] == ["compacted", "dropped"]:
                return steps
    return steps


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> ServerConfig:
    """A server's configuration on an empty store of each kind."""
    if request.param == "sqlite":
        return ServerConfig(state=tmp_path)
    address = tmp_path / "address"
    address.write_text(request.getfixturevalue("postgres"))
    return ServerConfig(state=tmp_path, database=address)


@pytest.fixture
def server(config: ServerConfig) -> Any:
    """A server with some jobs."""
    made = Server(config, [])
    for event in some_events(random.Random(1), 0.0, 0, 30):
        made.propose(event)
    yield made
    made.close()


def test_a_compacted_log_replays_to_the_same_state_and_goes_on(server: Server, config: ServerConfig) -> None:
    """The state, and the history of every job, are those of a replay of every event; the check finds no problem."""
    before = {job_id: history_page(job, 0, 100) for job_id, job in jobs_of(server).items()}
    assert compact(server, 1000.0) == ["staged", "compacted", "dropped"]
    server.close()
    again = Server(config, server.log)
    assert again.state() == replayed(server.log)
    assert {job_id: history_page(job, 0, 100) for job_id, job in jobs_of(again).items()} == before
    for event in some_events(random.Random(2), 2000.0, 30, 10):
        again.propose(event)
    assert again.state() == replayed(server.log)
    found = check_store_of(config)
    assert (found.problems, found.base + found.num_events) == ((), len(server.log))
    assert found.base > 30
    again.close()


def jobs_of(server: Server) -> dict[str, Any]:
    return server.actor.query(lambda coordinator: dict(coordinator.state.jobs))


class CrashingBases:
    """The bases of a store; the server ends before or after the operation of a number."""

    def __init__(self, bases: BaseTable, at: int, *, after: bool) -> None:
        self._bases, self.left, self._after = bases, at, after

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._bases, name)

        def call(*values: Any) -> Any:
            return self.run(lambda: method(*values))

        return call if name in ("stage", "activate", "drop_events", "staged") else method  # type: ignore[no-any-return]

    def run(self, operation: Callable[[], Any]) -> Any:
        self.left -= 1
        if self.left == 0 and not self._after:
            raise CrashError
        found = operation()
        if self.left == 0:
            raise CrashError
        return found


@pytest.mark.parametrize("seed", range(24))
def test_a_server_that_ends_at_any_step_loses_nothing(seed: int, tmp_path: Path) -> None:
    """1. Some events. 2. The server ends at a step of the compaction. 3. Another one starts: the state is the same.

    4. It appends, compacts, and ends at another step, and so on.
    """
    chance, config, log = random.Random(seed), ServerConfig(state=tmp_path), list[Event]()
    now_s = 0.0
    for turn in range(4):
        server = Server(config, log)
        assert server.state() == (replayed(log) if log else server.state())
        for event in some_events(chance, now_s, 20 * turn, 20):
            server.propose(event)
        crashing = CrashingBases(server.store.bases, 1 + (seed + turn) % 6, after=chance.random() < 0.5)
        server.store.bases = crashing  # type: ignore[assignment]
        with suppress(CrashError):
            record = server.record
            server.record = lambda event: crashing.run(lambda: record(event))  # type: ignore[method-assign] # noqa: B023
            compact(server, now_s + 500.0)
        now_s += 1000.0
        server.close()
        assert check_store_of(config).problems == ()
    server = Server(config, log)
    assert server.state() == replayed(log)
    compact(server, now_s + 5000.0)
    compact(server, now_s + 9000.0)
    assert check_store_of(config).base > 60
    server.close()


def test_another_server_on_the_database_takes_the_new_base(
    config: ServerConfig, server: Server, tmp_path: Path
) -> None:
    """1. A second server has read half of the log. 2. The first compacts it. 3. The second goes on with the base."""
    if config.database is None:
        pytest.skip("SQLite has one server")
    (tmp_path / "second").mkdir()
    second = Server(replace(config, state=tmp_path / "second"), server.log)
    for event in some_events(random.Random(3), 2000.0, 30, 10):
        server.propose(event)
    compact(server, 3000.0)
    assert second.state() == replayed(server.log)
    second.propose(JobSubmitted(now_s=4000.0, job_id="late", user="u", submission=submission()))
    assert server.state() == replayed(server.log) == second.state()
    second.close()


@pytest.mark.parametrize(
    ("age_s", "num_bytes", "staged_age_s", "since_bytes", "step"),
    [
        (99.0, 999.0, None, 0.0, None),
        (100.0, 1.0, None, 0.0, "stage"),
        (1.0, 1000.0, None, 0.0, "stage"),
        (1e9, 0.0, None, 0.0, None),
        (200.0, 1500.0, 99.0, 999.0, None),
        (200.0, 1500.0, 100.0, 1.0, "compact"),
        (200.0, 2000.0, 1.0, 1000.0, "compact"),
    ],
)
def test_the_policy_bounds_age_and_size(
    age_s: float, num_bytes: float, staged_age_s: float | None, since_bytes: float, step: str | None
) -> None:
    """A base is staged when it may be needed one period later; it is used then, or when the log is too large."""
    policy = CompactionPolicy(keep_s=100.0, keep_bytes=1000)
    found = policy.next_step(age_s=age_s, num_bytes=num_bytes, staged_age_s=staged_age_s, staged_bytes=since_bytes)
    assert found == step


def test_the_log_of_a_busy_server_stays_within_twice_its_policy(tmp_path: Path) -> None:
    """However much is appended, the events take at most twice `keep_bytes` and one look's worth."""
    server = Server(ServerConfig(state=tmp_path), [])
    policy = CompactionPolicy(keep_s=1e9, keep_bytes=60_000)
    compactor, most = server.compactor(policy), 0.0
    for turn in range(40):
        for event in some_events(random.Random(turn), turn * 100.0, 4 * turn, 4):
            server.propose(event)
        for _ in range(3):
            compactor.step(turn * 100.0 + 99, server.actor.last_event_number)
        most = max(most, sum(len(event.model_dump_json()) for _, event in server.store.events()))
    assert 60_000 < most < 2.5 * policy.keep_bytes
    assert server.state() == replayed(server.log)
    server.close()


def test_a_server_that_no_longer_leads_compacts_nothing(server: Server) -> None:
    """Its event is not admitted, so the staged base stays one."""
    refused = LogCompactor(server.store, POLICY, server.actor.durable_state, lambda _: False)
    assert refused.step(1000.0, server.actor.last_event_number) == "staged"
    assert refused.step(2000.0, server.actor.last_event_number) is None
    assert [mark.is_active for mark in server.store.bases.marks()] == [False]
    assert len(list(server.store.events())) == len(server.log)


def test_a_backup_of_a_compacted_store_is_restored(server: Server, config: ServerConfig, tmp_path: Path) -> None:
    """The base and the events behind it are copied, verified and replayed."""
    compact(server, 1000.0)
    expected = jobs_of(server).keys()
    report = write_backup(config, tmp_path / "backup.db")
    assert (report.problems, report.base) == ((), check_store_of(config).base)
    (tmp_path / "new").mkdir()
    new = ServerConfig(state=tmp_path / "new")
    restore_backup(new, tmp_path / "backup.db", 5000.0, [], replaces=False)
    again = Server(new, list(server.log))
    assert jobs_of(again).keys() == expected
    again.close()


def test_compaction_by_hand_keeps_what_is_asked_for(tmp_path: Path) -> None:
    """Older events leave for the archive, the file shrinks, and a second run has nothing to do."""
    config = ServerConfig(state=tmp_path, compaction=CompactionPolicy(keep_s=50.0), archive=tmp_path / "archive")
    server = Server(config, [])
    for event in some_events(random.Random(4), 0.0, 0, 300):
        server.propose(event)
    with pytest.raises(UnavailableError, match="in use"):
        compact_log(config, 300.0)
    server.close()
    steps = list[str]()
    done = compact_log(config, 300.0, lambda step, count: steps.append(f"{step} {count}"))
    assert steps == [f"{step} {done.base}" for step in ("replayed", "archived", "dropped")]
    assert done.num_dropped == done.base > 200
    kept = [event for event in server.log if event.now_s >= 250.0]
    assert done.num_kept == len(kept) + 1
    assert done.after_bytes < 0.6 * done.before_bytes  # type: ignore[operator]
    (archive,) = (tmp_path / "archive").iterdir()
    assert str(archive) == done.archive
    assert archive.stat().st_mode & 0o777 == 0o600
    assert check_archive(archive).number == done.base
    again = Server(config, server.log)
    assert again.actor.last_event_number == len(server.log) + 1
    assert jobs_of(again).keys() == Coordinator.replay(server.log).state.jobs.keys()
    again.close()
    assert compact_log(config, 300.0).num_dropped == 0


def test_the_command_reports_its_progress_and_its_result(tmp_path: Path) -> None:
    """`isthmus server compact --json`: one object on standard output, the steps on standard error."""
    server = Server(ServerConfig(state=tmp_path), [])
    for event in some_events(random.Random(4), 0.0, 0, 30):
        server.propose(event)
    server.close()
    done = run(FakeServer(), "server", "compact", "--state", tmp_path, "--keep-days", "0", "--json")
    assert done.status == 0, done.err
    found = json.loads(done.out)
    assert (found["dropped"], found["kept"], found["archive"]) == (len(server.log), 1, None)
    assert f"replayed {len(server.log)} events" in done.err
    checked = run(FakeServer(), "server", "check", "--state", tmp_path)
    assert f"behind a base in place of {len(server.log)}" in checked.out
    nothing = run(FakeServer(), "server", "compact", "--state", tmp_path)
    assert nothing.status == 0


def test_an_archive_that_was_changed_or_cut_is_refused(tmp_path: Path) -> None:
    """It holds the hashes of the chain, from the start of its store or the base before."""
    config = ServerConfig(state=tmp_path)
    server = Server(config, [])
    for event in some_events(random.Random(4), 0.0, 0, 5):
        server.propose(event)
    last, digest = len(server.log), server.store.digest_at(len(server.log))
    server.close()
    with open_sqlite_log(tmp_path / "isthmus.db") as log:
        file = archive_events(log, LogEnd(last, digest or b""), tmp_path / "archive")
        with pytest.raises(IsthmusError, match="not complete"):
            archive_events(log, LogEnd(last, b"x" * 32), tmp_path / "other")
    data = file.read_bytes()
    assert not list((tmp_path / "other").iterdir())
    for wrong in (data[:-20], data[: len(data) // 2], b"", b"{}", data[:50] + b"\0" * 20 + data[70:]):
        file.write_bytes(wrong)
        with pytest.raises((FileError, IsthmusError)):
            assert check_archive(file).number == last


def test_an_archive_that_is_bounded_loses_its_oldest_files(tmp_path: Path) -> None:
    """The new file stays even if it exceeds the bound alone, and files of others in the folder stay."""
    folder, config = tmp_path / "archive", ServerConfig(state=tmp_path)
    server = Server(config, [])
    for event in some_events(random.Random(4), 0.0, 0, 5):
        server.propose(event)
    last = LogEnd(len(server.log), server.store.digest_at(len(server.log)) or b"")
    server.close()
    folder.mkdir()
    old = [f"events-{number:012}-{number:012}.jsonl.gz" for number in (0, 1, 2)]
    for name in (*old, "notes.txt"):
        (folder / name).write_bytes(b"x" * 1000)
    with open_sqlite_log(tmp_path / "isthmus.db") as log:
        new = archive_events(log, last, folder)
        bound = new.stat().st_size + 1500
        assert archive_events(log, last, folder, bound) == new
        assert {one.name for one in folder.iterdir()} == {old[2], "notes.txt", new.name}
        archive_events(log, last, folder, 1)
    assert {one.name for one in folder.iterdir()} == {"notes.txt", new.name}
    assert check_archive(new) == last


def test_a_base_that_an_earlier_version_wrote_is_read() -> None:
    """The state's classes may get fields with defaults; the base of a compacted log cannot be replayed otherwise."""
    base = LogBase(end=LogEnd(7, b"x"), made_s=0.0, body=BASE_FILE.read_bytes())
    state = restore_base(base)
    assert {job.id: job.state for job in state.jobs.values()} == {
        "j0": "preparing",
        "j1": "cancelled",
        "j2": "planning",
    }
    assert sorted(state.clusters) == ["east", "west"]
    assert state.jobs["j0"].plan is not None


# Attacks on a compacted log


def forge_state(db: sqlite3.Connection) -> None:
    """Put another state into the base."""
    base = LogBase.of(serialize_state(Coordinator().state), LogEnd(1, b""), 0.0)
    db.execute("UPDATE bases SET body = ?", (base.body,))


def forge_digest(db: sqlite3.Connection) -> None:
    """Give the base another hash."""
    db.execute("UPDATE bases SET hash = ?", (b"x" * 32,))


def empty(db: sqlite3.Connection) -> None:
    """Delete all events behind the base."""
    db.execute("DELETE FROM events")


def truncate(db: sqlite3.Connection) -> None:
    """Delete the last event, which records the base."""
    db.execute("DELETE FROM events WHERE number = (SELECT max(number) FROM events)")


def remove_base(db: sqlite3.Connection) -> None:
    """Delete the base."""
    db.execute("DELETE FROM bases")


def raise_base(db: sqlite3.Connection) -> None:
    """Let the base replace one event more, as its end says."""
    number, digest = db.execute("SELECT number, hash FROM events ORDER BY number LIMIT 1").fetchone()
    db.execute("UPDATE bases SET number = ?, hash = ?", (number, digest))


def bomb(db: sqlite3.Connection) -> None:
    """Put a base in place that is no JSON."""
    db.execute("UPDATE bases SET body = ?", (b"x" * 100,))


ATTACKS = [forge_state, forge_digest, empty, truncate, remove_base, raise_base, bomb]


@pytest.mark.attack
@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("knows_end", [True, False])
def test_a_compacted_log_that_was_changed_is_refused(
    attack: Callable[[sqlite3.Connection], None], knows_end: bool, tmp_path: Path
) -> None:
    """Also by a server whose state folder does not know the last event; the check names it, and nothing is adopted."""
    config = ServerConfig(state=tmp_path)
    server = Server(config, [])
    for event in some_events(random.Random(5), 0.0, 0, 10):
        server.propose(event)
    compact(server, 1000.0)
    server.close()
    with closing(sqlite3.connect(tmp_path / "isthmus.db")) as db, db:
        attack(db)
    if not knows_end:
        (tmp_path / "log-end").unlink()
    before = (tmp_path / "isthmus.db").read_bytes()
    assert check_store_of(config).problems
    with pytest.raises(IsthmusError):
        Server(config, [])
    with pytest.raises(ConflictError):
        compact_log(config, 9999.0)
    with pytest.raises(ConflictError):
        write_backup(config, tmp_path / "backup.db")
    assert check_store_of(config).problems
    assert (tmp_path / "isthmus.db").read_bytes() == before


@pytest.mark.attack
def test_a_forged_base_with_a_chain_that_fits_it_is_refused(tmp_path: Path) -> None:
    """Base, its event and a chain that fits them: the state folder knows the event that was acknowledged last."""
    config = ServerConfig(state=tmp_path)
    server = Server(config, [])
    for event in some_events(random.Random(5), 0.0, 0, 10):
        server.propose(event)
    store_id, number = server.store.store_id, len(server.log)
    server.close()
    forged = LogBase.of(serialize_state(Coordinator().state), LogEnd(number + 5, chain_start(store_id).digest), 0.0)
    with closing(sqlite3.connect(tmp_path / "isthmus.db")) as db, db:
        db.execute("DELETE FROM events")
        row = (forged.end.number, forged.end.digest, forged.body)
        db.execute("INSERT INTO bases (number, hash, made_s, active, body) VALUES (?, ?, 0, 1, ?)", row)
        rows = link_rows(forged.end, [encode_event(forged.event(1.0))])
        db.executemany("INSERT INTO events (number, body, hash) VALUES (?, ?, ?)", rows)
    assert check_store_of(config).problems
    with pytest.raises(IsthmusError, match="acknowledged"):
        Server(config, [])
