"""Floods a server from loopback addresses: `python -m benchmarks._connection_flood PORT SILENT BAD_PER_S`.

It holds SILENT connections that send nothing, opens each one again that is closed, and sends BAD_PER_S requests a
second with an unknown token, each on a connection of its own. At SIGTERM it prints what it did as JSON.
"""

from __future__ import annotations

import json
import secrets
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from itertools import cycle

SILENT_ADDRESSES = [f"127.0.2.{i}" for i in range(1, 21)]
BAD_ADDRESSES = [f"127.0.3.{i}" for i in range(1, 5)]
REOPEN_INTERVAL_S = 0.5
MAX_PENDING = 512


class Flood:
    """One attacking process."""

    def __init__(self, port: int, silent: int, bad_per_s: int) -> None:
        self._port, self._num_silent, self._bad_per_s = port, silent, bad_per_s
        self._poll, self._silent = select.epoll(), {}
        self._pending: dict[int, socket.socket] = {}
        self._silent_sources, self._bad_sources = cycle(SILENT_ADDRESSES), cycle(BAD_ADDRESSES)
        self.counts = {"bad": 0, "refused": 0, "silent_opened": 0, "failed": 0}
        self.ended = False

    def run(self) -> None:
        """Attack until a signal."""
        begun_s = reopened_s = time.monotonic()
        self._open_silent()
        begun_s += time.monotonic() - begun_s
        while not self.ended:
            now_s = time.monotonic()
            due = min(64, int((now_s - begun_s) * self._bad_per_s) - self.counts["bad"])
            for _ in range(due):
                self._send_bad()
            if now_s - reopened_s > REOPEN_INTERVAL_S:
                self._open_silent()
                reopened_s = now_s
            self._read_answers()
        self.counts["seconds"] = round(time.monotonic() - begun_s)  # type: ignore[assignment]
        print(json.dumps(self.counts | {"silent_open": len(self._silent)}), flush=True)

    def _open_silent(self) -> None:
        for made in self._connect(self._silent_sources, self._num_silent - len(self._silent)):
            self._silent[made.fileno()] = made
            self._poll.register(made, select.EPOLLIN | select.EPOLLRDHUP)
            self.counts["silent_opened"] += 1

    def _connect(self, sources: Iterator[str], number: int) -> Iterator[socket.socket]:
        for _ in range(number):
            made = socket.socket()
            made.settimeout(2)
            try:
                made.bind((next(sources), 0))
                made.connect(("127.0.0.1", self._port))
            except OSError:
                made.close()
                self.counts["failed"] += 1
                continue
            yield made

    def _send_bad(self) -> None:
        self.counts["bad"] += 1
        if len(self._pending) >= MAX_PENDING:
            self.counts["failed"] += 1
            return
        for made in self._connect(self._bad_sources, 1):
            request = f"GET /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {secrets.token_hex(16)}\r\n\r\n"
            made.sendall(request.encode())
            self._pending[made.fileno()] = made
            self._poll.register(made, select.EPOLLIN)

    def _read_answers(self) -> None:
        for number, _ in self._poll.poll(0.002):
            made = self._pending.pop(number, None) or self._silent.pop(number, None)
            if made is None:
                continue
            self._poll.unregister(made)
            try:
                self.counts["refused"] += made.recv(4096).startswith(b"HTTP/1.1 4")
            except OSError:
                self.counts["failed"] += 1
            made.close()


def main() -> None:
    """Attack until SIGTERM."""
    flood = Flood(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

    def end(*_: object) -> None:
        flood.ended = True

    signal.signal(signal.SIGTERM, end)
    flood.run()


if __name__ == "__main__":
    main()
