"""`probe_link` and `answer_probe`: round trip and rate between two sites, measured on one connection within a limit.

The caller sends samples, a size and as many bytes, and the listener answers each with one byte. Both ends bound sizes,
number and time of the samples.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from isthmus.core.errors import UnavailableError

MAX_SAMPLE_BYTES = 16 << 20
MAX_SAMPLES = 8
_NUM_PINGS = 3
_WARM_UP_BYTES = 64 << 10
_SAMPLE_S = 0.25
"""How long the timed sample takes at the rate of the one before it."""

_CHUNK_BYTES = 64 << 10
_SIZE_BYTES = 4
_ANSWER = b"."


def probe_link(
    connection: socket.socket, limit_s: float, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, float]:
    """Return the round trip in seconds and the rate in Gbit/s; raise `OSError` if they are not known in `limit_s`."""
    end_s = clock() + limit_s

    def sample_s(num_bytes: int) -> float:
        start_s = clock()
        connection.settimeout(_left_s(end_s - start_s))
        connection.sendall(num_bytes.to_bytes(_SIZE_BYTES, "big") + bytes(num_bytes))
        if connection.recv(1) != _ANSWER:
            raise OSError("the listener does not measure")
        return max(clock() - start_s, 1e-6)

    round_trip_s = min(sample_s(1) for _ in range(_NUM_PINGS))
    warm_up_s = max(sample_s(_WARM_UP_BYTES) - round_trip_s, 1e-6)
    num_bytes = min(max(int(_WARM_UP_BYTES / warm_up_s * _SAMPLE_S), _WARM_UP_BYTES), MAX_SAMPLE_BYTES)
    taken_s = max(sample_s(num_bytes) - round_trip_s, 1e-6)
    return round_trip_s, num_bytes * 8 / taken_s / 1e9


def answer_probe(connection: socket.socket, limit_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
    """Answer the samples of a caller; raise `OSError` once it closes, at the limit, and for one that is too large."""
    end_s = clock() + limit_s

    def receive(num_bytes: int) -> bytes:
        data = b""
        while num_bytes:
            connection.settimeout(_left_s(end_s - clock()))
            data = connection.recv(min(num_bytes, _CHUNK_BYTES))
            if not data:
                raise OSError("the caller closed the connection")
            num_bytes -= len(data)
        return data

    for _ in range(MAX_SAMPLES):
        head = b"".join(receive(1) for _ in range(_SIZE_BYTES))
        num_bytes = int.from_bytes(head, "big")
        if not 0 < num_bytes <= MAX_SAMPLE_BYTES:
            raise OSError(f"a sample of {num_bytes} bytes")
        receive(num_bytes)
        connection.sendall(_ANSWER)


def listen_for_probes(address: tuple[str, int]) -> socket.socket:
    """Return a listener at `address`; raise `UnavailableError` if it cannot be bound."""
    try:
        return socket.create_server(address, family=socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
    except OSError as error:
        raise UnavailableError(
            f"cannot listen at {address[0]}:{address[1]}: {error.strerror}", hint="choose a free port of this machine"
        ) from error


def _left_s(left_s: float) -> float:
    if left_s <= 0:
        raise TimeoutError("the limit has passed")
    return left_s
