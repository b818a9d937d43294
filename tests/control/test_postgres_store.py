"""The store that several servers share, on a real PostgreSQL: its contract, and what sharing adds to it."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from isthmus.control.state.events import JobCancelled
from isthmus.control.store.check_store import check_store
from isthmus.control.store.log_chain import LogDamagedError, LogEnd, OtherStoreError
from isthmus.control.store.postgres_schema import MIGRATIONS
from isthmus.control.store.postgres_store import EVENT_LOG_LOCK, PostgresStore
from isthmus.control.store.store_interface import LogMovedError, Store
from isthmus.core.errors import InputError, ProtocolError, UnavailableError
from isthmus.core.messages.agent_messages import LogChunk, StepMetrics

pytestmark = pytest.mark.slow


def event(number: int) -> JobCancelled:
    return JobCancelled(now_s=float(number), job_id=f"job-{number}")


def test_it_keeps_the_contract(postgres: str) -> None:
    """The same contract as the embedded store, across a reopen too."""

    def reopen(store: Store) -> Store:
        store.close()
        return PostgresStore(postgres)

    check_store(PostgresStore(postgres), reopen).close()


def test_two_servers_append_in_turns(postgres: str) -> None:
    """Appends of two servers neither interleave nor get lost; each number is given once."""
    stores = [PostgresStore(postgres), PostgresStore(postgres)]
    with ThreadPoolExecutor(4) as pool:
        pairs = [[event(2 * i), event(2 * i + 1)] for i in range(40)]
        ends = sorted(pool.map(lambda i: stores[i % 2].append(pairs[i]), range(40)))
    assert ends == list(range(2, 81, 2))
    found = [one.now_s for _, one in stores[0].events()]
    assert all(found[i] + 1 == found[i + 1] for i in range(0, 80, 2))
    with pytest.raises(LogMovedError):
        stores[1].append([event(99)], expected_last=79)
    for store in stores:
        store.close()


def test_a_server_that_dies_in_its_turn_gives_it_up(postgres: str) -> None:
    """The script: 1. one takes the turn; 2. its connection ends; 3. the other appends at once."""
    dying = psycopg.connect(postgres)
    dying.execute("SELECT pg_advisory_xact_lock(%s)", (EVENT_LOG_LOCK,))
    store = PostgresStore(postgres)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.append, [event(1)])
        assert not waiting.done()
        dying.close()
        assert waiting.result(10) == 1
    store.close()


def test_a_lost_connection_fails_one_write_and_is_made_anew(postgres: str) -> None:
    """A restart of the database is one `UnavailableError`, then the store goes on."""
    store = PostgresStore(postgres)
    store.append([event(1)])
    with psycopg.connect(postgres, autocommit=True) as other:
        other.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
    with pytest.raises(UnavailableError, match="PostgreSQL"):
        store.append([event(2)])
    assert store.append([event(2)]) == 2
    store.close()


def test_a_newer_schema_is_refused(postgres: str) -> None:
    """A database written by a newer version is left as it is."""
    PostgresStore(postgres).close()
    with psycopg.connect(postgres, autocommit=True) as db:
        db.execute("INSERT INTO migrations (version) VALUES (%s)", (len(MIGRATIONS) + 1,))
    with pytest.raises(ProtocolError, match=f"schema version {len(MIGRATIONS) + 1}"):
        PostgresStore(postgres)


def test_an_older_schema_is_brought_up_to_date(postgres: str) -> None:
    """What the first version wrote is there after the later migrations."""
    with psycopg.connect(postgres, autocommit=True) as db:
        db.execute("CREATE TABLE migrations (version INTEGER PRIMARY KEY, applied TIMESTAMPTZ DEFAULT now())")
        db.execute(MIGRATIONS[0].encode())
        db.execute("INSERT INTO migrations (version) VALUES (1)")
        db.execute("INSERT INTO tokens VALUES ('d', 'user', 'ann', 1)")
    store = PostgresStore(postgres)
    assert [token.name for token in store.tokens()] == ["ann"]
    assert store.append([event(1)]) == 1
    store.close()


def test_bad_data_is_named_and_fails_nobody_elses_write(postgres: str) -> None:
    """A number that no column holds is its sender's mistake; text with a NUL byte is kept."""
    store = PostgresStore(postgres)
    with pytest.raises(InputError, match="cannot be stored"):
        store.append_metrics([StepMetrics.model_construct(job="j", attempt=1, rank=0, step=2**70, values={})])
    store.append_logs([LogChunk(job="j", attempt=1, rank=0, offset=0, text="a\0b")])
    assert store.logs("j").chunks[0].text == "a\0b"
    store.close()


@pytest.mark.parametrize("address", ["postgresql://u:hunter2@127.0.0.1:1/x", "password hunter2 = ="])
def test_the_password_is_in_no_message(address: str, caplog: pytest.LogCaptureFixture) -> None:
    """Neither an address that cannot be read nor a database that is away shows it."""
    with caplog.at_level(logging.DEBUG), pytest.raises((InputError, UnavailableError)) as caught:
        PostgresStore(address)
    assert "hunter2" not in str(caught.value) + repr(caught.value) + caplog.text


@pytest.mark.attack
def test_a_database_that_comes_back_short_or_empty_is_noticed(postgres: str) -> None:
    """Acknowledged events that are gone: under a running server, at a start, and with every table gone."""
    store = PostgresStore(postgres)
    store.append([event(number) for number in range(5)])
    ends = list[LogEnd]()
    store.follow_end(LogEnd(0, b""), ends.append)
    with psycopg.connect(postgres, autocommit=True) as db:
        db.execute("DELETE FROM events WHERE number > 3")
        with pytest.raises(LogDamagedError, match="ends with event 3, but event 5 was acknowledged"):
            store.append([event(9)], expected_last=5)
        with pytest.raises(LogDamagedError, match="event 5: it was read before, and is missing now"):
            list(store.events(after=5))
        store.close()
        again = PostgresStore(postgres, expected_id=store.store_id)
        with pytest.raises(LogDamagedError, match="event 5 was acknowledged"):
            again.follow_end(ends[-1], ends.append)
        again.close()
        db.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        with pytest.raises(OtherStoreError, match="holds no store: it is empty or was emptied"):
            PostgresStore(postgres, expected_id=store.store_id)
        assert db.execute("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'").fetchone() == (0,)
