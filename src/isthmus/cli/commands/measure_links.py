"""`measure_links`: goodput of a TCP flow on each link of a pool, as a fraction of the model's prediction;
`measure_messages`: overhead of single runtime messages.

Routes come from the site's emulator or gateway (`routes.json`); the receiver is a sink on this machine.
Without routes the pool's links are emulated during the measurement.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress

from isthmus.core.errors import InputError, UnavailableError
from isthmus.core.link_throughput import effective_bytes_per_s, transfer_time_s
from isthmus.core.pool import Pool
from isthmus.wan import dial, links_in_background

Routes = Mapping[str, Mapping[str, str]]
"""{cluster: {other cluster: "host:port" of the proxy to it}}."""

SEND_CHUNK = bytes(1 << 16)
REPETITIONS = 3
MESSAGE_BYTES = 1 << 18
"""Size of timed messages: about the activations of a small micro-batch."""


def measure_links(
    pool: Pool, routes: Routes | None = None, duration_s: float = 0.5
) -> dict[tuple[str, str], list[float]]:
    """Return for every directed link the fractions reached by three flows of about `duration_s` each.

    Raises `InputError` for a pool without links or with missing routes, `UnavailableError` and `PeerError`
    for an unreachable route.
    """
    if not pool.links:
        raise InputError("the pool has no links to measure", hint="define them under `links` in the pool file")
    with ExitStack() as stack:
        sink = stack.enter_context(_sink_server())
        found = routes or stack.enter_context(links_in_background(pool)).routes
        return {
            (link.source, link.target): [
                _goodput_bytes_per_s(
                    sink, _route(found, link.source, link.target), link.bandwidth_bytes_per_s * duration_s
                )
                / effective_bytes_per_s(link, pool.link(link.target, link.source))
                for _ in range(REPETITIONS)
            ]
            for link in pool.links
        }


def measure_messages(pool: Pool, routes: Routes, num_bytes: int = MESSAGE_BYTES) -> dict[tuple[str, str], list[float]]:
    """Return for every directed link the overhead of messages of `num_bytes`, in seconds.

    Overhead is the time beyond link delay and transmission: runtime threads, the forwarding emulator or
    gateway, and this machine's sockets. Two workers exchange tensors as in training; both directions of a
    link get the same values. Raises `UnavailableError` if the workers cannot run.
    """
    found: dict[tuple[str, str], list[float]] = {}
    for link in pool.links:
        ends = link.source, link.target
        back = pool.link(link.target, link.source) or link
        if ends[::-1] not in found:
            round_trip_s = transfer_time_s(link, num_bytes, back) + transfer_time_s(back, num_bytes, link)
            measured_s = _message_times_s(_route(routes, *ends), num_bytes)
            found[ends] = [one_way_s - round_trip_s / 2 for one_way_s in measured_s]
        else:
            found[ends] = found[ends[::-1]]
    return found


def _message_times_s(route: str, num_bytes: int) -> list[float]:
    """Return half the round-trip times of messages, in seconds, between processes on cores 0 and 1.

    Keeps the faster half of the samples; the others are disturbed by other load on this machine.
    """
    argv = [sys.executable, "-m", "isthmus.train.measure.measure_message", "--cores", "--route", route]
    done = subprocess.run([*argv, "--bytes", str(num_bytes)], capture_output=True, text=True, check=False, timeout=600)  # noqa: S603 - this Python with a module of this package
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no error output"])[-1]
        raise UnavailableError(f"cannot measure message times: {last}", hint="install isthmus[train]")
    times: list[float] = sorted(json.loads(done.stdout))
    return times[: len(times) // 2 + 1]


def _route(routes: Routes, source: str, target: str) -> str:
    if target not in routes.get(source, {}):
        raise InputError(f"no route from {source} to {target}", hint="give the routes.json of the pool's emulator")
    return routes[source][target]


def _goodput_bytes_per_s(sink: tuple[str, int], route: str, num_bytes: float) -> float:
    """Return the goodput of one flow in bytes per second, without slow start and round trip."""
    with dial(sink, route) as connection:
        # Step 1: measure the round trip. Step 2: leave slow start. Step 3: time the flow.
        round_trip_s = min(_timed_send_s(connection, 1) for _ in range(3))
        _timed_send_s(connection, max(1, int(num_bytes / 4)))
        sent_bytes = max(len(SEND_CHUNK), int(num_bytes))
        taken_s = _timed_send_s(connection, sent_bytes) - round_trip_s
    return sent_bytes / max(taken_s, 1e-6)


def _timed_send_s(connection: socket.socket, num_bytes: int) -> float:
    """Send `num_bytes` bytes and wait for the sink's acknowledgement; return the seconds."""
    start_s = time.perf_counter()
    connection.sendall(num_bytes.to_bytes(8, "big"))
    for start in range(0, num_bytes, len(SEND_CHUNK)):
        connection.sendall(SEND_CHUNK[: num_bytes - start])
    if not connection.recv(1):
        raise InputError("the sink closed the connection", hint="measure again")
    return time.perf_counter() - start_s


@contextmanager
def _sink_server() -> Iterator[tuple[str, int]]:
    """Run a server on this machine that acknowledges each complete message with one byte."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=_accept_connections, args=(server,), name="sink", daemon=True)
        thread.start()
        try:
            yield server.getsockname()[:2]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def _accept_connections(server: socket.socket) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:  # the server was shut down
            return
        with connection, suppress(OSError):  # a link that stops resets its connections
            _acknowledge_messages(connection)


def _acknowledge_messages(connection: socket.socket) -> None:
    buffer = bytearray(1 << 20)
    while head := connection.recv(8, socket.MSG_WAITALL):
        left = int.from_bytes(head, "big")
        while left:
            got = connection.recv_into(buffer, min(left, len(buffer)))
            if not got:
                return
            left -= got
        connection.sendall(b"!")
