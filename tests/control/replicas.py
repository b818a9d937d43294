"""Several servers on one PostgreSQL as processes to be killed, behind an address that any of them answers."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psycopg

from isthmus.control.server.run_server import ServerConfig, ServerInfo, run_server
from isthmus.control.store.postgres_leader_election import LEADER_LOCK
from isthmus.control.store.postgres_store import PostgresStore
from tests.control.processes import RULES, RealPool, die, until
from tests.control.serving import POOL, plan_across

NAMES = ("server-a", "server-b")


class CrashingPostgres(PostgresStore):
    """The real store, in a process that kills itself around its n-th append of events.

    `where`: before it, between write and flush (the rows are inserted, the turn is not committed), or after
    the flush, before any request is answered.
    """

    def __init__(self, address: str, where: str, at: int) -> None:
        super().__init__(address)
        self._where, self._left = where, at

    @contextmanager
    def exclusive_access(self) -> Iterator[None]:
        appends = self._left
        with super().exclusive_access():
            yield
            if self._where == "between" and appends > 0 and self._left <= 0:
                die()
        if self._where == "after" and appends > 0 and self._left <= 0:
            die()

    def append(self, events, expected_last=None, audit=(), notices=()):  # type: ignore[no-untyped-def]
        self._left -= 1
        if self._left == 0 and self._where == "before":
            die()
        return super().append(events, expected_last, audit, notices)


def serve(state: Path, port: int, address: str, crash: tuple[str, int]) -> None:
    """Be one of several servers; note its URL in `<state>/url`."""

    def announce(listening: ServerInfo) -> None:
        (state / "url.tmp").write_text(listening.url)
        (state / "url.tmp").replace(state / "url")

    run_server(
        ServerConfig(state=state, port=port, pool=POOL, rules=RULES, database=state.parent / "address"),
        announce,
        make_store=lambda config: CrashingPostgres(address, *crash),
        planner=plan_across,
    )


class Balancer:
    """One address for several servers: each connection goes to the first, in turns, that accepts it."""

    def __init__(self) -> None:
        self.ports: list[int] = []
        self._turns = itertools.count()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        first = next(self._turns)
        with client:
            for i in range(len(self.ports)):
                port = self.ports[(first + i) % len(self.ports)]
                with suppress(OSError), socket.create_connection(("127.0.0.1", port), 2) as server:
                    server.settimeout(None)
                    back = threading.Thread(target=_copy, args=(server, client), daemon=True)
                    back.start()
                    _copy(client, server)
                    back.join()
                    return


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    for end in (source, sink):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


class Replicas(RealPool):
    """Two servers on one database, and the agents of POOL, which know only the balancer."""

    def __init__(self, folder: Path, database: str) -> None:
        self.database, self.balancer = database, Balancer()
        (folder / "address").write_text(database)
        self._ports = dict.fromkeys(NAMES, 0)
        super().__init__(folder)

    def start_server(self, crash: tuple[str, int] = ("", 0)) -> None:
        for name in NAMES:
            self.start(name)
        self.url = self.balancer.url

    def start(self, name: str, crash: tuple[str, int] = ("", 0)) -> None:
        if name not in NAMES:
            super().start(name)
            return
        url = self.folder / name / "url"
        url.unlink(missing_ok=True)
        self._launch(name, serve, self.folder / name, self._ports[name], self.database, crash)
        until(lambda: url.exists() or not self.alive(name), f"{name} listens")
        if url.exists():
            self._ports[name] = httpx.URL(url.read_text()).port or 0
            self.balancer.ports = [port for port in self._ports.values() if port]

    def leader(self) -> str:
        """Return which server leads now; "" while none does."""
        sql = (
            "SELECT a.application_name FROM pg_locks l JOIN pg_stat_activity a USING (pid) WHERE l.granted "
            "AND l.locktype = 'advisory' AND (l.classid::bigint << 32) | l.objid::bigint = %s "
            "AND a.datname = current_database()"
        )
        with psycopg.connect(self.database) as db:
            found = db.execute(sql, (LEADER_LOCK,)).fetchone()
        pid = int(found[0].rsplit(":", 1)[1]) if found else 0
        return next((name for name in NAMES if self.processes[name].pid == pid), "")

    def admin_token(self) -> str:
        files = [self.folder / name / "admin.token" for name in NAMES]
        return next(file.read_text().strip() for file in files if file.exists())

    def close(self) -> None:
        super().close()
        self.balancer.close()
