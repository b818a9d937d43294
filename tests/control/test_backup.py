"""Backups: a verified copy of either store in one file, made while a server appends."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from isthmus.control.server.backup_file import COPIED_TABLES, check_store_of, write_backup
from isthmus.control.server.log_end_file import LogEndFile
from isthmus.control.server.restore_store import accept_log, restore_backup
from isthmus.control.server.server_config import ServerConfig, open_store
from isthmus.control.state.events import JobCancelled, LogRestored, encode_event
from isthmus.control.store.log_chain import chain_start, link_rows
from isthmus.control.store.postgres_schema import MIGRATIONS as POSTGRES_MIGRATIONS
from isthmus.control.store.sql_queries import SqlQueries
from isthmus.control.store.sqlite_store import MIGRATIONS as SQLITE_MIGRATIONS
from isthmus.control.store.sqlite_store import SqliteStore
from isthmus.control.store.store_interface import Store, StoredToken
from isthmus.core.errors import ConflictError, NotFoundError
from isthmus.core.messages.agent_messages import LogChunk, StepMetrics
from tests.cli.fake_server import FakeServer, run

pytestmark = pytest.mark.integration

OLD_KEY = StoredToken(role="owner", name="hz", digest="d2", created_s=2.0, site="east")
"""The key of a site, which `fill` replaces by another one."""
NOT_COPIED = {"migrations", "identity", "sqlite_sequence"}


def fill(store: Store, num_events: int = 5) -> None:
    store.append([JobCancelled(now_s=float(number), job_id=f"job-{number}") for number in range(num_events)])
    store.append_metrics([StepMetrics(job="a", attempt=1, rank=0, step=3, values={"loss": 1.5})])
    store.append_logs([LogChunk(job="a", attempt=1, rank=0, offset=0, text="añb")])
    store.put_token(StoredToken(role="user", name="ann", digest="d1", created_s=1.0))
    store.put_token(OLD_KEY)
    store.put_token(
        StoredToken(
            role="owner", name="hz", digest="d3", created_s=3.0, expires_s=9.5, revoked_s=8.5, created_by="root",
            high=True, site="east", replaces=OLD_KEY.id,
        )
    )  # fmt: skip


def content(store: Store) -> object:
    return list(store.events()), store.metrics("a"), store.logs("a"), store.tokens()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> ServerConfig:
    """A server's configuration on an empty store of each kind."""
    if request.param == "sqlite":
        return ServerConfig(state=tmp_path)
    address = tmp_path / "address"
    address.write_text(request.getfixturevalue("postgres"))
    return ServerConfig(state=tmp_path, database=address)


def test_a_backup_has_all_that_the_store_had_while_it_is_in_use(config: ServerConfig, tmp_path: Path) -> None:
    """Events with their hashes, metrics, logs and tokens; the file is the owner's alone and a store by itself."""
    store = open_store(config)
    fill(store)
    report = write_backup(config, tmp_path / "backup.db")
    assert (report.num_events, report.problems, report.name) == (5, (), str(tmp_path / "backup.db"))
    assert (tmp_path / "backup.db").stat().st_mode & 0o777 == 0o600
    assert not list(tmp_path.glob(".backup*"))
    copy = SqliteStore(tmp_path / "backup.db", expected_id=report.store)
    assert content(copy) == content(store)
    copy.close()
    store.close()


def test_every_column_of_every_table_is_copied(tmp_path: Path) -> None:
    """A column that a later migration adds has to be added to the copy, or named here."""
    SqliteStore(tmp_path / "a.db").close()
    with closing(sqlite3.connect(tmp_path / "a.db")) as db:
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        assert tables - NOT_COPIED == {table.name for table in COPIED_TABLES}
        for table in COPIED_TABLES:
            columns = [row[1] for row in db.execute(f"PRAGMA table_info({table.name})")]
            assert sorted(columns) == sorted(table.columns)


def test_a_backup_overwrites_nothing_and_a_damaged_log_makes_none(tmp_path: Path) -> None:
    """The file must be new, and a log with a problem is not copied under the name of a backup."""
    store = open_store(ServerConfig(state=tmp_path))
    fill(store)
    store.close()
    (tmp_path / "old.db").write_text("old")
    with pytest.raises(ConflictError, match=r"old\.db exists already"):
        write_backup(ServerConfig(state=tmp_path), tmp_path / "old.db")
    with closing(sqlite3.connect(tmp_path / "isthmus.db")) as db, db:
        db.execute("UPDATE events SET body = body || ' ' WHERE number = 2")
    with pytest.raises(ConflictError, match="is not complete: event 2: its hash does not fit"):
        write_backup(ServerConfig(state=tmp_path), tmp_path / "new.db")
    assert not (tmp_path / "new.db").exists()
    assert not list(tmp_path.glob(".new*"))


def test_a_store_of_an_earlier_version_is_said_to_have_no_hashes(tmp_path: Path) -> None:
    """`check` says what adds them, and a folder without a database names itself."""
    with closing(sqlite3.connect(tmp_path / "isthmus.db")) as db:
        db.executescript((Path(__file__).parent / "data" / "sqlite-v1.sql").read_text(encoding="utf-8"))
    assert check_store_of(ServerConfig(state=tmp_path)).problems == (
        "the log has no hashes yet: start a server of this version on it once",
    )
    with pytest.raises(NotFoundError, match="there is no database"):
        check_store_of(ServerConfig(state=tmp_path / "none"))
    (tmp_path / "isthmus.db").write_bytes(b"")
    with pytest.raises(NotFoundError, match="holds no store of isthmus"):
        check_store_of(ServerConfig(state=tmp_path))


def damage_nothing(_: Path) -> None:
    """Leave the log as it is."""


def damage(database: Path) -> None:
    with closing(sqlite3.connect(database)) as db, db:
        db.execute("DELETE FROM events WHERE number = 3")


@pytest.mark.parametrize(("change", "status"), [(damage_nothing, 0), (damage, 6)])
def test_the_command_says_what_it_found(tmp_path: Path, change: Callable[[Path], None], status: int) -> None:
    """`isthmus server check`: text and JSON, and status 6 with a problem; `backup` names its file."""
    store = open_store(ServerConfig(state=tmp_path))
    assert isinstance(store, SqliteStore)
    fill(store)
    LogEndFile(tmp_path).follow(store)
    store.close()
    change(tmp_path / "isthmus.db")
    done = run(FakeServer(), "server", "check", "--state", str(tmp_path))
    assert done.status == status
    assert ("5 events, all in order" in done.out) == (status == 0)
    found = run(FakeServer(), "server", "check", "--state", str(tmp_path), "--json")
    assert found.status == status
    if status:
        assert "event 3: it is missing, the next one is 4" in done.out
        return
    assert (found.json["last_event"], found.json["problems"]) == (5, [])
    made = run(FakeServer(), "server", "backup", str(tmp_path / "b.db"), "--state", str(tmp_path), "--json")
    assert (made.json["file"], made.json["events"]) == (str(tmp_path / "b.db"), 5)


def test_a_backup_is_restored_into_either_store(config: ServerConfig, tmp_path: Path) -> None:
    """The same events, metrics, logs and tokens, the identity, and the event that says so; then the log goes on."""
    source = ServerConfig(state=tmp_path / "source")
    source.state.mkdir()
    store = open_store(source)
    fill(store)
    (events, *rest), report = content(store), write_backup(source, tmp_path / "backup.db")
    store.close()
    found = restore_backup(config, tmp_path / "backup.db", 9.0, ["gone"], replaces=False)
    assert found.store == report.store
    again = open_store(config)
    assert isinstance(again, SqlQueries)
    LogEndFile(config.state).follow(again)
    restored, *others = content(again)
    assert restored == [*events, (6, LogRestored(now_s=9.0, gone=("gone",)))]
    assert others == rest
    assert again.append([JobCancelled(now_s=1.0, job_id="next")], expected_last=6) == 7
    again.append_metrics([StepMetrics(job="a", attempt=1, rank=0, step=4, values={"loss": 1.0})])
    again.append_logs([LogChunk(job="a", attempt=1, rank=0, offset=4, text="c")])
    assert [chunk.text for chunk in again.logs("a").chunks] == ["añb", "c"]
    again.close()
    with pytest.raises(ConflictError, match=r"exists already|has a store already"):
        restore_backup(config, tmp_path / "backup.db", 9.0, [], replaces=False)


def older_store(config: ServerConfig, version: int, store_id: str = "0" * 32) -> None:
    """Write the store of `config` as a server with an earlier schema version did: one event, and one token of ann."""
    body = encode_event(JobCancelled(now_s=1.0, job_id="job-1"))
    ((number, _, digest),) = link_rows(chain_start(store_id), [body])
    if config.database is None:
        with closing(sqlite3.connect(config.state / "isthmus.db")) as db, db:
            db.execute("CREATE TABLE migrations (version INTEGER PRIMARY KEY, applied TEXT DEFAULT CURRENT_TIMESTAMP)")
            for done, script in enumerate(SQLITE_MIGRATIONS[:version], start=1):
                db.executescript(script)
                db.execute("INSERT INTO migrations (version) VALUES (?)", (done,))
            db.execute("INSERT INTO identity (one, store) VALUES (1, ?)", (store_id,))
            db.execute("INSERT INTO events (number, body, hash) VALUES (?, ?, ?)", (number, body, digest))
            db.execute("INSERT INTO tokens (digest, role, name, created_s) VALUES ('d', 'owner', 'ann', 1.5)")
        return
    with psycopg.connect(config.database.read_text()) as postgres:
        postgres.execute("CREATE TABLE migrations (version INTEGER PRIMARY KEY, applied TIMESTAMPTZ DEFAULT now())")
        for done, script in enumerate(POSTGRES_MIGRATIONS[:version], start=1):
            postgres.execute(script.encode())
            postgres.execute("INSERT INTO migrations (version) VALUES (%s)", (done,))
        postgres.execute("INSERT INTO identity (store) VALUES (%s)", (store_id,))
        postgres.execute("INSERT INTO events (number, body, hash) VALUES (%s, %s, %s)", (number, body, digest))
        postgres.execute("INSERT INTO tokens (digest, role, name, created_s) VALUES ('d', 'owner', 'ann', 1.5)")


def earlier_versions(config: ServerConfig) -> range:
    """The earlier schema versions that have an identity, for a backup needs hashes."""
    scripts = SQLITE_MIGRATIONS if config.database is None else POSTGRES_MIGRATIONS
    first = next(number for number, script in enumerate(scripts, start=1) if "TABLE identity" in script)
    return range(first, len(scripts))


ANN = StoredToken(role="owner", name="ann", digest="d", created_s=1.5)


@pytest.mark.parametrize("age", range(1, 6))
def test_a_store_of_each_earlier_version_is_backed_up_before_the_new_server_starts(
    config: ServerConfig, tmp_path: Path, age: int
) -> None:
    """The copy of a store that lacks the newest `age` migrations has its events and tokens, without a site."""
    version = earlier_versions(config).stop - age
    assert version in earlier_versions(config)
    older_store(config, version)
    assert write_backup(config, tmp_path / "backup.db").num_events == 1
    copy = SqliteStore(tmp_path / "backup.db")
    assert copy.tokens() == (ANN,)
    copy.close()


@pytest.mark.parametrize("age", range(1, 6))
def test_a_backup_of_each_earlier_version_is_restored_into_either_store(
    config: ServerConfig, tmp_path: Path, age: int
) -> None:
    """Beside the upgrade of a server that goes on: its database is lost, and the backup is older than the program."""
    old = ServerConfig(state=tmp_path / "old")
    old.state.mkdir()
    version = earlier_versions(old).stop - age
    assert version in earlier_versions(old)
    older_store(old, version)
    write_backup(old, tmp_path / "backup.db")
    restore_backup(config, tmp_path / "backup.db", 9.0, [], replaces=False)
    store = open_store(config)
    assert store.tokens() == (ANN,)
    assert [number for number, _ in store.events()] == [1, 2]
    store.put_token(OLD_KEY)
    assert store.find_token("d2") == OLD_KEY
    store.close()


@pytest.mark.parametrize("age", range(1, 6))
def test_a_store_of_each_earlier_version_is_brought_up_to_date(config: ServerConfig, age: int) -> None:
    """Tokens made before sites had keys belong to no site; a key that a site gets then is kept with it."""
    version = earlier_versions(config).stop - age
    assert version in earlier_versions(config)
    older_store(config, version)
    store = open_store(config)
    assert store.tokens() == (ANN,)
    store.put_token(OLD_KEY)
    store.close()
    again = open_store(config)
    assert again.tokens() == (ANN, OLD_KEY)
    again.close()


def test_a_database_that_came_back_short_is_accepted_on_demand_only(config: ServerConfig) -> None:
    """The log that is left is whole: an operator accepts it, and the loss is an event."""
    store = open_store(config)
    assert isinstance(store, SqlQueries)
    fill(store)
    log_end = LogEndFile(config.state)
    log_end.follow(store)
    log_end.close()
    store.close()
    shorten(config)
    assert check_store_of(config).problems == (
        "event 5, which this server has acknowledged, is missing or another one",
    )
    report = accept_log(config, 9.0, [])
    assert (report.num_events, report.problems) == (3, ())
    assert check_store_of(config).problems == ()
    again = open_store(config)
    assert [number for number, _ in again.events()] == [1, 2, 3, 4]
    again.close()


def shorten(config: ServerConfig) -> None:
    """Delete the events above 3, as a database without the newest commits."""
    statement = "DELETE FROM events WHERE number > 3"
    if config.database is None:
        with closing(sqlite3.connect(config.state / "isthmus.db")) as db, db:
            db.execute(statement)
    else:
        with psycopg.connect(config.database.read_text()) as postgres:
            postgres.execute(statement)


def test_the_restore_command_says_what_it_did_and_what_is_next(tmp_path: Path) -> None:
    """FILE or --as-is, never both; another folder's database is kept; the answer names store and events."""
    store = open_store(ServerConfig(state=tmp_path))
    fill(store)
    store.close()
    write_backup(ServerConfig(state=tmp_path), tmp_path / "b.db")
    new = str(tmp_path / "new")
    assert run(FakeServer(), "server", "restore", "--state", new).status == 2
    assert run(FakeServer(), "server", "restore", str(tmp_path / "b.db"), "--as-is", "--state", new).status == 2
    done = run(FakeServer(), "server", "restore", str(tmp_path / "b.db"), "--state", new, "--gone", "east")
    assert done.status == 0, done.err
    assert "start the server, then see `isthmus pool`" in done.out
    again = run(FakeServer(), "server", "restore", str(tmp_path / "b.db"), "--state", new)
    assert (again.status, "exists already" in again.err) == (6, True)
    replaced = run(FakeServer(), "server", "restore", str(tmp_path / "b.db"), "--state", new, "--replace", "--json")
    assert replaced.json["events"] == 5
    assert (tmp_path / "new" / "isthmus.db.replaced-1").exists()
    accepted = run(FakeServer(), "server", "restore", "--as-is", "--state", new, "--json")
    assert accepted.json["events"] == 6
