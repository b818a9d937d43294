"""`WorkerConnection`: the connection of one worker to its proxy, on an event loop."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from contextlib import suppress
from typing import Protocol

from isthmus.wan.tunnel.incoming_bytes import Chunk
from isthmus.wan.tunnel.tunnel_frame import MAX_PAYLOAD_BYTES

_RESET = struct.pack("ii", 1, 0)
_MAX_READS = 4


class WorkerOwner(Protocol):
    """What a connection calls."""

    def worker_sent(self, stream: int, data: bytes) -> None:
        """Bytes came; empty for the end."""

    def worker_took(self, stream: int, num_bytes: int) -> None:
        """The kernel took bytes for the worker."""

    def worker_broke(self, stream: int, reason: str) -> None:
        """The connection broke; nothing follows."""

    def worker_closed(self, stream: int) -> None:
        """Both directions have ended, all bytes were handed over; nothing follows."""


class WorkerConnection:
    """Reads and writes a non-blocking socket as its owner says."""

    def __init__(self, sock: socket.socket, stream: int, owner: WorkerOwner, loop: asyncio.AbstractEventLoop) -> None:
        self._sock, self._stream, self._owner, self._loop = sock, stream, owner, loop
        self._descriptor = sock.fileno()  # the loop looks numbers up faster than sockets
        self._is_writing = False
        self._waiting: deque[memoryview] = deque()
        self._ends = self._has_ended = self._is_at_end = False
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def set_reading(self, is_on: bool) -> None:
        """Read, or leave bytes in the kernel."""
        if self._sock.fileno() >= 0:
            if is_on:
                self._loop.add_reader(self._descriptor, self._read)
            else:
                self._loop.remove_reader(self._descriptor)

    def reply(self, data: bytes) -> None:
        """Send the proxy's own short answer, before any bytes of the far side."""
        try:
            self._sock.send(data)
        except OSError as error:
            self._break(error)

    def write(self, data: Chunk) -> None:
        """Hand bytes to the worker."""
        if self._sock.fileno() >= 0:
            self._waiting.append(memoryview(data))
            if len(self._waiting) == 1:
                self._flush()

    def end_writing(self) -> None:
        """End this direction after what waits."""
        self._ends = True
        self._flush()

    def close(self, *, is_broken: bool) -> None:
        """Close without a call of the owner, with a reset if `is_broken`."""
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._descriptor)
            self._loop.remove_writer(self._descriptor)
            if is_broken:
                with suppress(OSError):
                    self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._sock.close()
        self._waiting.clear()

    def _read(self) -> None:
        try:
            for _ in range(_MAX_READS):
                data = self._sock.recv(MAX_PAYLOAD_BYTES)
                if not data:
                    self._is_at_end = True
                    self._loop.remove_reader(self._descriptor)
                self._owner.worker_sent(self._stream, data)
                if len(data) < MAX_PAYLOAD_BYTES or self._sock.fileno() < 0:
                    break
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._break(error)
            return
        self._close_if_done()

    def _flush(self) -> None:
        taken = 0
        try:
            while self._waiting:
                sent = self._sock.send(self._waiting[0])
                taken += sent
                if sent < len(self._waiting[0]):
                    self._waiting[0] = self._waiting[0][sent:]
                else:
                    self._waiting.popleft()
        except (BlockingIOError, InterruptedError):
            if not self._is_writing:
                self._is_writing = True
                self._loop.add_writer(self._descriptor, self._flush)
        except OSError as error:
            self._break(error)
            return
        if not self._waiting and self._sock.fileno() >= 0:
            if self._is_writing:
                self._is_writing = False
                self._loop.remove_writer(self._descriptor)
            if self._ends and not self._has_ended:
                self._has_ended = True
                with suppress(OSError):
                    self._sock.shutdown(socket.SHUT_WR)
        if taken:
            self._owner.worker_took(self._stream, taken)
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._has_ended and self._is_at_end and self._sock.fileno() >= 0:
            self.close(is_broken=False)
            self._owner.worker_closed(self._stream)

    def _break(self, error: OSError) -> None:
        self.close(is_broken=True)
        self._owner.worker_broke(self._stream, error.strerror or str(error))
