"""What the tests of the links share: pools of a few clusters, and a worker that echoes or swallows bytes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from isthmus.core.pool import Link, Pool
from isthmus.wan.dial import format_address


def pool_of(*links: dict[str, Any]) -> Pool:
    """A pool of as many one-card clusters as the links name."""
    names = sorted({name for link in links for name in link.get("between", [link.get("from"), link.get("to")])})
    group = {"chip": "H20", "nodes": 1, "chips_per_node": 1}
    clusters = [{"name": name, "owner": name, "node_groups": [group]} for name in names]
    return Pool.model_validate({"clusters": clusters, "links": list(links)})


def link_of(**fields: Any) -> Link:
    return Link.model_validate({"from": "a", "to": "b", "bandwidth_gbps": 1, "delay_ms": 10} | fields)


class Worker:
    """Listens on loopback. The first byte says what a connection does: `e` echoes, `s` swallows and reports
    at the end how many bytes came (8 bytes, big-endian), `q` reads nothing until `go` is set, then as `s`."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self.listener.getsockname()
        self.errors: list[OSError] = []
        self._threads: list[threading.Thread] = []
        self.num_open = 0
        self._lock = threading.Lock()
        self._acceptor = threading.Thread(target=self._accept)
        self._acceptor.start()

    def _accept(self) -> None:
        while True:
            connection, _ = self.listener.accept()
            try:
                kind = connection.recv(1)
            except OSError as error:
                self.errors.append(error)
                kind = b""
            if kind == b"x":
                connection.close()
                return
            thread = threading.Thread(target=self._serve, args=(connection, kind))
            thread.start()
            self._threads.append(thread)

    def _serve(self, connection: socket.socket, kind: bytes) -> None:
        with self._lock:
            self.num_open += 1
        self._talk(connection, kind)
        with self._lock:
            self.num_open -= 1

    def _talk(self, connection: socket.socket, kind: bytes) -> None:
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                if kind == b"e":
                    while data := connection.recv(1 << 16):
                        connection.sendall(data)
                    return
                if kind == b"q":
                    self.go.wait(30)
                num_bytes = 0
                while data := connection.recv(1 << 20):
                    num_bytes += len(data)
                connection.sendall(num_bytes.to_bytes(8, "big"))
            except OSError as error:
                self.errors.append(error)

    def close(self) -> None:
        self.go.set()
        with socket.create_connection(self.address) as last:
            last.sendall(b"x")
            self._acceptor.join()
        for thread in self._threads:
            thread.join()
        self.listener.close()


@contextmanager
def a_worker() -> Iterator[Worker]:
    worker = Worker()
    try:
        yield worker
    finally:
        worker.close()


def closed_port() -> str:
    """An address without a listener."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return format_address(*listener.getsockname())


def receive(connection: socket.socket, num_bytes: int) -> bytes:
    """Return exactly that many bytes."""
    data = b""
    while len(data) < num_bytes:
        piece = connection.recv(num_bytes - len(data))
        assert piece, f"the stream ended after {len(data)} of {num_bytes} bytes"
        data += piece
    return data


def round_trips_s(connection: socket.socket, count: int, num_bytes: int = 64) -> list[float]:
    """Time `count` echoes of small messages, after having asked for the echo."""
    times_s, message = [], bytes(num_bytes)
    for _ in range(count):
        start_s = time.monotonic()
        connection.sendall(message)
        assert receive(connection, num_bytes) == message
        times_s.append(time.monotonic() - start_s)
    return times_s


def wait_until(condition: Any, limit_s: float = 10.0) -> None:
    """Poll until `condition()` holds; fail after `limit_s`."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.01)
