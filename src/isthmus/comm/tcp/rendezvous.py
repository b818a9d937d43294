"""`connect`: connect to every other rank of the run: dial the lower ranks, accept the higher ones."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from isthmus.comm.tcp.endpoint import DIAL_S, Endpoint, dial_lane, may_pass, tune
from isthmus.comm.tcp.reconnect import Connection
from isthmus.comm.tcp.wire_format import Greeting, answer
from isthmus.core.errors import IsthmusError, PeerError, RestartError, UnavailableError
from isthmus.wan.dial import dial

GREETING_S = 10.0
"""Longest time from accepting a connection to its complete greeting."""

MAX_STRANGERS = 64
"""Most connections without a valid greeting; further ones stay in the listen backlog."""

Lane = tuple[int, int]
"""A peer's rank and the number of the connection to it."""

_POLL_S = 0.2
_LOOK_S = 1.0


def connect(
    greeting: Greeting,
    endpoints: Sequence[Endpoint],
    listener: socket.socket,
    timeout_s: float,
    clock: Callable[[], float] = time.time,
) -> dict[int, list[Connection]]:
    """Connect to every other rank; return the connections by rank, ordered by connection number.

    `endpoints[r]` is where rank `r` listens, `listener` this rank's own socket. The higher rank of a pair
    dials; it retries a peer that ends before answering, since that peer may be replaced. Invalid
    greetings and duplicate ranks are rejected; a silent connection delays no other. Raises `PeerError`
    naming the rank that refused, was unreachable or missed `timeout_s`; `RestartError` for a later
    incarnation; `ProtocolError` for another format version.
    """
    rendezvous = _Meeting(greeting, endpoints, time.monotonic() + timeout_s, clock)
    keys = [(rank, number) for rank in range(greeting.rank) for number in range(endpoints[rank].lanes)]
    with ThreadPoolExecutor(len(keys) + 2, thread_name_prefix="isthmus-connect") as pool:
        tasks = [pool.submit(rendezvous.accept, listener), pool.submit(rendezvous.look)]
        tasks += [pool.submit(rendezvous.dial, *one) for one in keys]
        for task in tasks:
            task.add_done_callback(rendezvous.note)
    rendezvous.end()
    if rendezvous.errors:
        for connection, _ in rendezvous.connections.values():
            connection.close()
        raise rendezvous.worst()
    return {
        rank: [rendezvous.connections[rank, number] for number in range(endpoint.lanes)]
        for rank, endpoint in enumerate(endpoints)
        if rank != greeting.rank
    }


@dataclass
class _Meeting:
    """One rank's side of the rendezvous; the first error stops all of it."""

    greeting: Greeting
    endpoints: Sequence[Endpoint]
    deadline_s: float
    clock: Callable[[], float]
    connections: dict[Lane, Connection] = field(default_factory=dict)
    errors: list[BaseException] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    accepted: threading.Event = field(default_factory=threading.Event)
    claimed: set[Lane] = field(default_factory=set)
    callers: dict[threading.Thread, socket.socket] = field(default_factory=dict)
    dialled: list[socket.socket] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def left_s(self) -> float:
        return max(self.deadline_s - time.monotonic(), 0.01)

    def note(self, task: Future[None]) -> None:
        error = task.exception()
        if error is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Record `error`, stop accepting and shut down the dialled sockets."""
        self.errors.append(error)
        self.over.set()
        self.accepted.set()
        with self.lock:
            dialled = list(self.dialled)
        for connection in dialled:
            _shut(connection)

    def worst(self) -> BaseException:
        """Return the error to raise: the `RestartError` of the latest incarnation, else the first error."""
        newer = [error for error in self.errors if isinstance(error, RestartError)]
        return max(newer, key=lambda error: error.incarnation) if newer else self.errors[0]

    def dial(self, rank: int, lane: int) -> None:
        """Dial and greet a lower rank; retry while its route starts or its process is replaced."""
        endpoint = self.endpoints[rank]
        while True:
            try:
                found = dial_lane(self.greeting, rank, lane, endpoint, self.left_s, self.clock, self._opened)
                break
            except UnavailableError as error:
                if isinstance(error, PeerError) and not may_pass(error):
                    raise
                if self.over.wait(_POLL_S) or self.left_s <= _POLL_S:
                    raise
        self.connections[rank, lane] = found

    def _opened(self, connection: socket.socket) -> None:
        with self.lock:
            self.dialled.append(connection)
        if self.over.is_set():
            _shut(connection)

    def accept(self, listener: socket.socket) -> None:
        """Accept connections, each answered in its own thread, until all higher ranks are connected."""
        expected = self._expected()
        listener.settimeout(_POLL_S)
        while missing := expected - self.connections.keys():
            if self.over.is_set():
                return
            if self.left_s <= _POLL_S:
                ranks = ", ".join(map(str, sorted({rank for rank, _ in missing})))
                raise PeerError(f"rank {self.greeting.rank}: rank {ranks} never connected")
            if len(self.callers) > len(expected) + MAX_STRANGERS:
                self.over.wait(_POLL_S)
                continue
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            self._hear(connection)
        self.accepted.set()

    def look(self) -> None:
        """Check periodically that the missing higher ranks still listen; raise `PeerError` if one is gone."""
        while not self.accepted.wait(_LOOK_S):
            for rank in sorted({rank for rank, _ in self._expected() - self.connections.keys()}):
                endpoint = self.endpoints[rank]
                try:
                    dial((endpoint.host, endpoint.port), endpoint.route, min(DIAL_S, self.left_s)).close()
                except UnavailableError as error:
                    if isinstance(error, PeerError) and not may_pass(error):
                        raise PeerError(f"rank {rank}: {error.message}", hint=error.hint) from error

    def _expected(self) -> set[Lane]:
        higher = range(self.greeting.rank + 1, self.greeting.size)
        return {(rank, number) for rank in higher for number in range(self.endpoints[rank].lanes)}

    def end(self) -> None:
        """Shut down connections without a complete greeting and join their threads."""
        with self.lock:
            waiting = dict(self.callers)
        for connection in waiting.values():
            _shut(connection)
        for thread in waiting:
            thread.join()

    def _hear(self, connection: socket.socket) -> None:
        thread = threading.Thread(target=self._answer, args=(connection,), name="isthmus-answer", daemon=True)
        with self.lock:
            self.callers[thread] = connection
        thread.start()

    def _claim(self, rank: int, lane: int) -> bool:
        with self.lock:
            known = (rank, lane) in self.claimed or not 0 <= lane < self.endpoints[rank].lanes
            self.claimed.add((rank, lane))
            return not known

    def _answer(self, connection: socket.socket) -> None:
        claimed: list[Lane] = []

        def claim(rank: int, number: int) -> bool:
            if self._claim(rank, number):
                claimed.append((rank, number))
                tune(connection, self.endpoints[rank].congestion_control)
            return bool(claimed)

        try:
            connection.settimeout(min(self.left_s, GREETING_S))
            rank, number, offset_s = answer(connection, self.greeting, self.clock, claim)
        except (IsthmusError, OSError) as error:
            connection.close()
            self.claimed.difference_update(claimed)
            if isinstance(error, RestartError):
                self.fail(error)
        else:
            with self.lock:  # atomic, so that `end` does not shut this connection down
                del self.callers[threading.current_thread()]
                self.connections[rank, number] = (connection, offset_s)
        finally:
            with self.lock:
                self.callers.pop(threading.current_thread(), None)


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
