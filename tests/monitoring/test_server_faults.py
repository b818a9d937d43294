"""Alerts on faults of the server itself: its store, its ledger, its certificate, its database."""

from __future__ import annotations

import datetime
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.server.server_config import DATABASE_FILE, open_store
from isthmus.control.server.tls import self_signed_certificate
from isthmus.control.store.postgres_leader_election import LEADER_LOCK
from isthmus.control.store.snapshot_codec import serialize_state
from isthmus.control.store.snapshot_file import SNAPSHOT_FILE_NAME, SnapshotFile
from tests.control import postgres
from tests.control.receivers import webhook_receiver
from tests.free_ports import free_ports
from tests.monitoring.watched_pool import (
    ALERTMANAGER,
    PROMETHEUS,
    RULES,
    Alerts,
    WatchedPool,
    monitoring,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PROMETHEUS is None or ALERTMANAGER is None,
        reason="Prometheus or Alertmanager is missing: apt-get install prometheus prometheus-alertmanager",
    ),
]


VALID_DAYS = 397
"""Of a certificate of `self_signed_certificate`."""


@pytest.fixture(autouse=True)
def _only_whole(whole: bool) -> None:
    if not whole:
        pytest.skip("two more runs of Prometheus and a server: python -m pytest --whole")


def certificate(folder: Path, days_left: float) -> dict[str, object]:
    """Return the fields of a configuration with a certificate that ends in `days_left` days."""
    now = datetime.datetime.now(datetime.UTC)
    made = self_signed_certificate(folder, ("127.0.0.1",), now - datetime.timedelta(days=VALID_DAYS - days_left))
    return {"tls_cert": made.cert, "tls_key": made.key, "self_signed": False}


@contextmanager
def locked_now_and_then(database: Path) -> Iterator[None]:
    """Hold the write lock of a store for 1.5 s at a time, as a backup or a failing disk would."""
    stop = threading.Event()

    def hold() -> None:
        with closing(sqlite3.connect(database, isolation_level=None, timeout=10)) as db:
            while not stop.is_set():
                db.execute("BEGIN IMMEDIATE")
                stop.wait(1.5)
                db.execute("ROLLBACK")
                stop.wait(0.05)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(20)


def falsify_ledger(pool: WatchedPool) -> None:
    """Write a snapshot of the stopped server whose ledger has one entry changed."""
    with closing(open_store(pool.config)) as store:
        events = list(store.events())
        state = Coordinator.replay((event for _, event in events), RULES).state
        transactions = state.meter.ledger.transactions
        account, amount = transactions[-1].entries[0]
        entries = ((account, amount + 1), *transactions[-1].entries[1:])
        transactions[-1] = replace(transactions[-1], entries=entries)
        SnapshotFile(pool.folder).save(store, events[-1][0], serialize_state(state))


def test_faults_of_store_ledger_and_certificate(tmp_path: Path) -> None:
    """A certificate ends in five days; writes wait for a lock; an entry of the ledger is changed on the disk.

    Each is made where it arises, and put right there: another certificate, no lock, the snapshot removed.
    """
    pool = WatchedPool(tmp_path / "server", port=free_ports(1)[0], **certificate(tmp_path / "old", 5))
    try:
        with webhook_receiver() as receiver, monitoring(tmp_path / "monitoring", pool, receiver):
            alerts = Alerts(receiver)
            alerts.fires("IsthmusCertificateExpiring")
            pool.close()
            pool.start(**certificate(tmp_path / "new", 300))
            alerts.ends("IsthmusCertificateExpiring")
            price = {"cluster": "east", "node_group": "h20", "per_chip_hour": "36"}
            tariff = {"currency": "EUR", "prices": [price]}
            owner = pool.call("POST", "/v1/tokens", {"role": "owner", "name": "owner-east"})["token"]
            pool.call("POST", "/v1/tariffs", tariff, owner)
            job = pool.run_job()
            with locked_now_and_then(tmp_path / "server" / DATABASE_FILE):
                alerts.fires("IsthmusStoreSlow")
            alerts.ends("IsthmusStoreSlow")
            pool.cancel(job)
            pool.until_state(job, "cancelled")
            assert alerts.states("IsthmusLedgerUnbalanced") == []
            pool.close()
            falsify_ledger(pool)
            pool.start()
            alerts.fires("IsthmusLedgerUnbalanced")
            pool.close()
            (tmp_path / "server" / SNAPSHOT_FILE_NAME).unlink()
            pool.start()
            alerts.ends("IsthmusLedgerUnbalanced")
    finally:
        pool.close()


@pytest.mark.skipif(postgres.binaries() is None, reason=f"PostgreSQL is missing: {postgres.INSTALL}")
def test_no_server_leads_while_another_session_holds_the_lock(tmp_path: Path) -> None:
    """A server that hangs before its first heartbeat keeps its session, and with it the lock; then it ends."""
    binaries = postgres.binaries()
    assert binaries is not None
    with postgres.running(binaries) as address, ExitStack() as stack:
        (tmp_path / "address").write_text(f"{address} dbname=postgres\n")
        hung = stack.enter_context(psycopg.connect(f"{address} dbname=postgres", autocommit=True))
        hung.execute("SELECT pg_advisory_lock(%s)", (LEADER_LOCK,))
        pool = WatchedPool(tmp_path / "server", alive=(), database=tmp_path / "address")
        try:
            receiver = stack.enter_context(webhook_receiver())
            stack.enter_context(monitoring(tmp_path / "monitoring", pool, receiver))
            alerts = Alerts(receiver)
            alerts.fires("IsthmusNoLeader")
            hung.close()
            alerts.ends("IsthmusNoLeader")
        finally:
            pool.close()
