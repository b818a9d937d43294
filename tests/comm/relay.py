"""A small HTTP CONNECT proxy for tests: it relays bytes and can cut, hold, record or change what it carries."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress


class Relay:
    """Listens on a free port of this machine; `address` is what a route names. Use as a context manager."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.flowing = threading.Event()
        self.flowing.set()
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self.num_carried = 0
        self.change: Callable[[bytes], bytes] = lambda data: data
        """What becomes of each piece on its way."""
        self.drips: Callable[[bytes], bool] = lambda data: False
        """Whether only the first half of a piece goes on at once, and of the rest a byte every 0.1 s."""

    def __enter__(self) -> Relay:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.flowing.set()
        self.cut()
        for thread in list(self._threads):
            thread.join()
        for one in self._sockets:
            one.close()

    def cut(self) -> None:
        """Break every connection."""
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                head = _head_of(near)
                if not head:
                    near.close()
                    continue
                host, port = head.split()[1].decode().rsplit(":", 1)
                try:
                    far = socket.create_connection((host, int(port)))
                except OSError:
                    near.sendall(b"HTTP/1.1 502 Refused\r\n\r\n")
                    near.close()
                    continue
                near.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                self._sockets += [near, far]
                for source, target in ((near, far), (far, near)):
                    self._threads.append(threading.Thread(target=self._pump, args=(source, target)))
                    self._threads[-1].start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self.flowing.wait()
                self.num_carried += len(data)
                half = len(data) // 2 if self.drips(data) else len(data)
                target.sendall(self.change(data[:half]))
                for at in range(half, len(data)):
                    time.sleep(0.1)
                    target.sendall(data[at : at + 1])
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)


def _head_of(near: socket.socket) -> bytes:
    """Return the request, nothing where the client went away meanwhile."""
    head = b""
    with suppress(OSError):
        while not head.endswith(b"\r\n\r\n"):
            byte = near.recv(1)
            if not byte:
                return b""
            head += byte
    return head
