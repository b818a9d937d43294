"""`PostgresLeaderElection`: leader election by a session-level advisory lock in PostgreSQL.

When the leader dies its session ends, and the next server that tries becomes leader. A leader that hangs
keeps its session; another server terminates it once its heartbeat is older than `LEADER_TIMEOUT_S`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import psycopg

from isthmus.control.store.postgres_store import open_connection
from isthmus.core.errors import IsthmusError

LEADER_LOCK = 0x15_7468_6D75_7303
"""Advisory lock held by the leader's session."""
LEADER_TIMEOUT_S = 5.0
"""Heartbeat age at which a leader's session is terminated; the leader sends one with every tick."""
REPORT_INTERVAL_S = 1.0
"""Minimum interval at which reports of a cluster are published to the other servers."""

_log = logging.getLogger("isthmus.server")


class PostgresLeaderElection:
    """A `LeaderElection` among the servers on the database at `address`; without the database none leads."""

    def __init__(self, address: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._address, self._clock = address, clock
        self._lock = threading.Lock()
        self._db: psycopg.Connection[Any] | None = None
        self._is_leader = False
        self._recorded_s: dict[str, float] = {}

    def try_acquire(self) -> bool:
        """Tell whether this server leads; see `LeaderElection`."""
        with self._lock:
            led = self._is_leader
            self._is_leader = bool(self._with_session(self._heartbeat_or_acquire))
            if led and not self._is_leader:
                _log.warning("this server no longer leads")
            return self._is_leader

    def record_report(self, cluster: str) -> bool:
        """Publish a report to the other servers; see `LeaderElection`."""
        with self._lock:
            now_s = self._clock()
            if now_s - self._recorded_s.get(cluster, -REPORT_INTERVAL_S) < REPORT_INTERVAL_S:
                return True
            sql = (
                "INSERT INTO heard (cluster, at_s) VALUES (%s, extract(epoch FROM clock_timestamp())) "
                "ON CONFLICT (cluster) DO UPDATE SET at_s = excluded.at_s"
            )
            is_known = self._with_session(lambda db: db.execute(sql, (cluster,))) is not None
            if is_known:
                self._recorded_s[cluster] = now_s
            return is_known

    def report_ages_s(self) -> Mapping[str, float]:
        """Return the seconds since each cluster's last report; see `LeaderElection`."""
        sql = "SELECT cluster, greatest(extract(epoch FROM clock_timestamp()) - at_s, 0)::float8 FROM heard"
        with self._lock:
            return dict(self._with_session(lambda db: db.execute(sql).fetchall()) or ())

    def release(self) -> None:
        """Close the session, which releases the lock; see `LeaderElection`."""
        with self._lock:
            self._end_session()

    def _with_session(self, use: Callable[[psycopg.Connection[Any]], Any]) -> Any:
        """Run `use` on the session; None if the database is unavailable. A lost session loses leadership."""
        try:
            if self._db is None or self._db.closed:
                self._is_leader, self._db = False, open_connection(self._address, self._session_name())
            return use(self._db)
        except (psycopg.Error, IsthmusError) as error:
            _log.warning("leadership: the PostgreSQL database cannot be used: %s", str(error).strip())
            self._end_session()
            return None

    def _session_name(self) -> str:
        """Return the session's application name, which tells the database operator which server it is."""
        return f"isthmus lead {socket.gethostname()[:32]}:{os.getpid()}"

    def _end_session(self) -> None:
        self._is_leader = False
        if self._db is not None:
            with contextlib.suppress(psycopg.Error):
                self._db.close()
        self._db = None

    def _heartbeat_or_acquire(self, db: psycopg.Connection[Any]) -> bool:
        if not self._is_leader:
            found = db.execute("SELECT pg_try_advisory_lock(%s)", (LEADER_LOCK,)).fetchone()
            if not (found and found[0]):
                self._terminate_stalled_leader(db)
                return False
        db.execute(
            "INSERT INTO leader (beat) VALUES (clock_timestamp()) ON CONFLICT (one) DO UPDATE SET beat = excluded.beat"
        )
        return True

    def _terminate_stalled_leader(self, db: psycopg.Connection[Any]) -> None:
        """Terminate the session of a leader that hangs, so that a later attempt gets the lock."""
        ended = db.execute(
            "SELECT pg_terminate_backend(l.pid) FROM pg_locks l, leader "
            "WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 "
            "AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
            "AND (l.classid::bigint << 32) | l.objid::bigint = %s "
            "AND leader.beat < clock_timestamp() - make_interval(secs => %s)",
            (LEADER_LOCK, LEADER_TIMEOUT_S),
        ).fetchall()
        if ended:
            _log.warning("the leader sent no heartbeat for %g s: its session was terminated", LEADER_TIMEOUT_S)
