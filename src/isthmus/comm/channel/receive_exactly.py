"""`receive_exactly`: fill a buffer from a socket, with few system calls for long parts."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable
from contextlib import suppress

CHUNK_BYTES = 2**20
"""Most bytes of a system call."""

LOW_WATER_BYTES = 64 * 2**10
"""Bytes that a long read waits for at a time, where a link delivers packet by packet."""

LOW_WATER_WAIT_S = 0.25
"""Longest wait for `LOW_WATER_BYTES`, after which a read takes each packet as it arrives."""

_SHORT_BYTES = 4 * 2**10


def receive_exactly(
    sock: socket.socket,
    buffer: memoryview,
    tolerate_silence: Callable[[], bool] = lambda: False,
    timeout_s: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Fill `buffer` within `timeout_s` from its first byte, so that a byte now and then keeps no connection alive.

    The socket's timeout bounds the silence before a read; both are ignored while `tolerate_silence()`. A long read
    wakes this thread every `LOW_WATER_BYTES` rather than with each packet (`SO_RCVLOWAT`), unless the link is too slow
    for that.
    """
    size, begun_s = len(buffer), math.inf
    low_water = _LowWater(sock) if size > _SHORT_BYTES else None
    try:
        while len(buffer):
            if low_water:
                low_water.set(min(len(buffer), LOW_WATER_BYTES))
            try:
                count = sock.recv_into(buffer[:CHUNK_BYTES])
            except TimeoutError:
                if low_water:
                    low_water.reset()
                    low_water = None
                elif not tolerate_silence():
                    raise
                continue
            if count == 0:
                raise ConnectionResetError("closed its connection")
            buffer = buffer[count:]
            if len(buffer) and timeout_s < math.inf:
                begun_s = min(begun_s, clock())
                if clock() - begun_s > timeout_s and not tolerate_silence():
                    raise TimeoutError(f"sent {size - len(buffer)} of {size} bytes within {timeout_s:g} s")
    finally:
        if low_water:
            with suppress(OSError):  # closed meanwhile
                low_water.reset()


class _LowWater:
    """The bytes that a read of `sock` waits for, and for how long."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._num_bytes, self._timeout_s = sock, 1, sock.gettimeout()
        sock.settimeout(LOW_WATER_WAIT_S if self._timeout_s is None else min(LOW_WATER_WAIT_S, self._timeout_s))

    def set(self, num_bytes: int) -> None:
        """Let a read wait until `num_bytes` have arrived."""
        if num_bytes != self._num_bytes:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
            self._num_bytes = num_bytes

    def reset(self) -> None:
        """Let a read wait for one byte, and for as long as before."""
        self.set(1)
        self._socket.settimeout(self._timeout_s)
