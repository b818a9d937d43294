"""`Channel`: one connection as a sequence of parts whose sizes both sides know; `PlainChannel` is one in the clear."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from isthmus.comm.channel.receive_exactly import CHUNK_BYTES, receive_exactly

MAX_PART_BYTES = 256 * 2**10
"""Longest part: messages cross a channel in fragments of this size."""

_JOINED_BYTES = 64 * 2**10

Part = bytes | bytearray | memoryview


class Channel(Protocol):
    """One connection. The receiver reads each part with the size that the sender wrote."""

    socket: socket.socket
    part_timeout_s: float
    """Seconds from the first byte of a part to its last, after which the connection counts as stalled."""

    def write(self, parts: Sequence[Part], is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Send `parts`; ignore timeouts of a peer that is busy, until `is_stopped()`."""

    def read_into(self, into: memoryview, tolerate_silence: Callable[[], bool] = lambda: False) -> None:
        """Fill `into` with one part.

        Raises `ConnectionResetError` if the peer closed or the part is not the peer's, `TimeoutError` on silence
        or for a part that takes longer than `part_timeout_s`, unless `tolerate_silence()`.
        """

    def shut_down(self) -> None:
        """Shut the socket down, as a network failure would."""

    def close(self) -> None:
        """Close the socket."""


class RecordChannel(Channel, Protocol):
    """A `Channel` whose records may cross another way too, in the same order."""

    tag_bytes: int
    """By which a record is longer than its part."""

    def seal_into(self, part: Part, into: memoryview) -> None:
        """Write `part` as the next record to `into`."""

    def open_into(self, record: memoryview, into: memoryview) -> None:
        """Write the part of the next `record` to `into`; raises `ConnectionResetError` if it is not the peer's."""


class SocketChannel:
    """The part of a channel that concerns its socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.part_timeout_s, self.clock = math.inf, time.monotonic

    def receive(self, buffer: memoryview, tolerate_silence: Callable[[], bool]) -> None:
        """Fill `buffer` within `part_timeout_s`."""
        receive_exactly(self.socket, buffer, tolerate_silence, self.part_timeout_s, self.clock)

    def shut_down(self) -> None:
        """Shut the socket down, as a network failure would."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


class PlainChannel(SocketChannel):
    """A `Channel` without keys, for ranks on one machine: every part crosses the socket as it is."""

    tag_bytes = 0

    def write(self, parts: Sequence[Part], is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Send `parts`; see `Channel`."""
        is_small = sum(map(len, parts)) <= _JOINED_BYTES
        for part in [b"".join(parts)] if is_small else [b"".join(parts[:-1]), parts[-1]]:
            send_all(self.socket, memoryview(part), is_stopped)

    def read_into(self, into: memoryview, tolerate_silence: Callable[[], bool] = lambda: False) -> None:
        """Fill `into`; see `Channel`."""
        self.receive(into, tolerate_silence)

    def seal_into(self, part: Part, into: memoryview) -> None:
        """Copy `part`; see `RecordChannel`."""
        into[:] = part

    def open_into(self, record: memoryview, into: memoryview) -> None:
        """Copy `record`; see `RecordChannel`."""
        into[:] = record


def send_all(sock: socket.socket, data: memoryview, is_stopped: Callable[[], bool]) -> None:
    """Send all of `data`; ignore timeouts of a peer that is busy, until `is_stopped()`."""
    while len(data):
        try:
            data = data[sock.send(data[:CHUNK_BYTES]) :]
        except TimeoutError:
            if is_stopped():
                raise
