"""`measure_links`: what a TCP flow reaches on each link of a pool, as a share of what the link offers;
`measure_messages`: what single messages of the runtime take there.

The routes are those of the site's emulator or gateway (`routes.json`), and the far end is a sink on this
machine; without routes the pool's links are emulated for the time of the measurement.
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
from isthmus.core.link_physics import effective_bytes_per_s, transfer_s
from isthmus.core.pool import Pool
from isthmus.wan import dial, links_in_background

Routes = Mapping[str, Mapping[str, str]]
"""{cluster: {other cluster: "host:port" of the proxy that leads there}}."""

CHUNK = bytes(1 << 16)
REPETITIONS = 3
MESSAGE_BYTES = 1 << 18
"""Bytes of the single messages that are timed: about an activation of a small micro-batch."""


def measure_links(
    pool: Pool, routes: Routes | None = None, seconds: float = 0.5
) -> dict[tuple[str, str], list[float]]:
    """Return for every directed link the shares reached, one for each of three flows of about `seconds`.

    Raises `InputError` for a pool without links or routes that lack one, `UnavailableError` and `PeerError`
    for a route that leads nowhere.
    """
    if not pool.links:
        raise InputError("the pool has no links to measure", hint="give them under `links` in the pool")
    with ExitStack() as stack:
        sink = stack.enter_context(_sink())
        found = routes or stack.enter_context(links_in_background(pool)).routes
        return {
            (link.source, link.target): [
                _goodput(sink, _route(found, link.source, link.target), link.bytes_per_s * seconds)
                / effective_bytes_per_s(link, pool.link(link.target, link.source))
                for _ in range(REPETITIONS)
            ]
            for link in pool.links
        }


def measure_messages(
    pool: Pool, routes: Routes, num_bytes: int = MESSAGE_BYTES
) -> dict[tuple[str, str], list[float]]:
    """Return for every directed link what messages of `num_bytes` take beside delay and bytes, in seconds.

    The messages are tensors that two workers send to and fro as in training, so this is the time of the
    runtime's threads, of what forwards the bytes (an emulator, a gateway) and of this machine's sockets. Both
    directions of a link are given the same. Raises `UnavailableError` where the workers cannot run.
    """
    found: dict[tuple[str, str], list[float]] = {}
    for link in pool.links:
        ends = link.source, link.target
        back = pool.link(link.target, link.source) or link
        if ends[::-1] not in found:
            there_s = transfer_s(link, num_bytes, back) + transfer_s(back, num_bytes, link)
            taken_s = _message_times(_route(routes, *ends), num_bytes)
            found[ends] = [one - there_s / 2 for one in taken_s]
        else:
            found[ends] = found[ends[::-1]]
    return found


def _message_times(route: str, num_bytes: int) -> list[float]:
    """Return half of the round trip of messages, measured by two processes on cores 0 and 1.

    The quicker half of them: the others met whatever else is at work on this machine.
    """
    command = [sys.executable, "-m", "isthmus.train.measure.measure_message", "--cores", "--route", route]
    done = subprocess.run([*command, "--bytes", str(num_bytes)], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise UnavailableError(f"messages could not be timed: {last}", hint="install isthmus[train]")
    times: list[float] = sorted(json.loads(done.stdout))
    return times[: len(times) // 2 + 1]


def _route(routes: Routes, source: str, target: str) -> str:
    if target not in routes.get(source, {}):
        raise InputError(f"no route from {source} to {target}", hint="give the routes of the pool's emulator")
    return routes[source][target]


def _goodput(sink: tuple[str, int], route: str, num_bytes: float) -> float:
    """Return the bytes a second of one flow of `num_bytes`, slow start and the round trip left out."""
    with dial(sink, route) as connection:
        round_trip_s = min(_exchange(connection, 1) for _ in range(3))
        _exchange(connection, max(1, int(num_bytes / 4)))
        sent_bytes = max(len(CHUNK), int(num_bytes))
        taken_s = _exchange(connection, sent_bytes) - round_trip_s
    return sent_bytes / max(taken_s, 1e-6)


def _exchange(connection: socket.socket, num_bytes: int) -> float:
    """Send so many bytes and wait for the sink's answer; return the seconds."""
    begun_s = time.perf_counter()
    connection.sendall(num_bytes.to_bytes(8, "big"))
    for start in range(0, num_bytes, len(CHUNK)):
        connection.sendall(CHUNK[: num_bytes - start])
    if not connection.recv(1):
        raise InputError("the sink went away", hint="measure again")
    return time.perf_counter() - begun_s


@contextmanager
def _sink() -> Iterator[tuple[str, int]]:
    """Listen on this machine and answer each message with a byte once it has come whole."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=_serve, args=(server,), name="sink", daemon=True)
        thread.start()
        try:
            yield server.getsockname()[:2]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def _serve(server: socket.socket) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:  # the block was left
            return
        with connection, suppress(OSError):  # a link that ends resets its connections
            _answer(connection)


def _answer(connection: socket.socket) -> None:
    buffer = bytearray(1 << 20)
    while head := connection.recv(8, socket.MSG_WAITALL):
        left = int.from_bytes(head, "big")
        while left:
            got = connection.recv_into(buffer, min(left, len(buffer)))
            if not got:
                return
            left -= got
        connection.sendall(b"!")
