"""`receive_exactly`: fill a buffer from a socket, with few system calls for long parts."""

from __future__ import annotations

import math
import select
import socket
import time
from collections.abc import Callable

CHUNK_BYTES = 2**20
"""Most bytes of a system call."""

LOW_WATER_BYTES = 64 * 2**10
"""Bytes that a long read waits for at a time, where a link delivers packet by packet."""

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
    wakes this thread every `LOW_WATER_BYTES` rather than with each packet (`SO_RCVLOWAT`),
    unless the link is too slow for that.
    """
    size, begun_s, low_water_bytes = len(buffer), math.inf, 1
    is_slow = size <= _SHORT_BYTES
    while len(buffer):
        wanted_bytes = 1 if is_slow else min(len(buffer), LOW_WATER_BYTES)
        if wanted_bytes != low_water_bytes:
            _set_low_water(sock, low_water_bytes := wanted_bytes)
        try:
            count = sock.recv_into(buffer[:CHUNK_BYTES])
        except TimeoutError:
            count = _receive_less(sock, buffer[:CHUNK_BYTES]) if low_water_bytes > 1 else 0
            low_water_bytes, is_slow = 1, is_slow or count > 0
            if not count:
                if tolerate_silence():
                    continue
                raise
        if count == 0:
            raise ConnectionResetError("closed its connection")
        buffer = buffer[count:]
        if len(buffer) and timeout_s < math.inf:
            begun_s = min(begun_s, clock())
            if clock() - begun_s > timeout_s and not tolerate_silence():
                raise TimeoutError(f"sent {size - len(buffer)} of {size} bytes within {timeout_s:g} s")
    if low_water_bytes > 1:
        _set_low_water(sock, 1)


def _set_low_water(sock: socket.socket, num_bytes: int) -> None:
    """Let a read of `sock` wait until `num_bytes` have arrived."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)


def _receive_less(sock: socket.socket, buffer: memoryview) -> int:
    """Read what has arrived on `sock` below the low-water mark, which becomes 1; return its size."""
    _set_low_water(sock, 1)
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return sock.recv_into(buffer) if poll.poll(0) else 0
