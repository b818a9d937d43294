"""`connect_ranks`: connect to every other rank of the run: dial the lower ranks, accept the higher ones."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from isthmus.comm.tcp.endpoint import DIAL_TIMEOUT_S, Endpoint, dial_rank, is_transient, set_socket_options
from isthmus.comm.tcp.reconnect import GreetedSocket
from isthmus.comm.tcp.wire_format import Greeting, answer_greeting
from isthmus.core.errors import IsthmusError, PeerError, RestartError, UnavailableError
from isthmus.core.process.steady_clock import steady_time_s
from isthmus.wan import dial

GREETING_TIMEOUT_S = 10.0
"""Longest time from accepting a connection to its complete greeting."""

MAX_PENDING_CONNECTIONS = 64
"""Most connections without a valid greeting; further ones stay in the listen backlog."""

ConnectionKey = tuple[int, int]
"""A peer's rank and the number of the connection to it."""

_POLL_S = 0.2
_LISTEN_CHECK_S = 1.0


def connect_ranks(
    greeting: Greeting,
    endpoints: Sequence[Endpoint],
    listener: socket.socket,
    timeout_s: float,
    clock: Callable[[], float] = steady_time_s,
) -> dict[int, list[GreetedSocket]]:
    """Connect to every other rank; return the connections by rank, ordered by connection number.

    `endpoints[r]` is where rank `r` listens, `listener` this rank's own socket. The higher rank of a pair
    dials; it retries a peer that ends before answering, since that peer may be replaced. Invalid
    greetings and duplicate ranks are rejected; a silent connection delays no other. Raises `PeerError`
    naming the rank that refused, was unreachable or missed `timeout_s`; `RestartError` for a later
    incarnation; `ProtocolError` for another format version.
    """
    rendezvous = _Rendezvous(greeting, endpoints, time.monotonic() + timeout_s, clock)
    keys = [(rank, number) for rank in range(greeting.rank) for number in range(endpoints[rank].lanes)]
    with ThreadPoolExecutor(len(keys) + 2, thread_name_prefix="isthmus-connect") as pool:
        tasks = [pool.submit(rendezvous.accept, listener), pool.submit(rendezvous.check_listening)]
        tasks += [pool.submit(rendezvous.dial, *one) for one in keys]
        for task in tasks:
            task.add_done_callback(rendezvous.on_task_done)
    rendezvous.close_pending()
    if rendezvous.errors:
        for connection, _ in rendezvous.connections.values():
            connection.close()
        raise rendezvous.decisive_error()
    return {
        rank: [rendezvous.connections[rank, number] for number in range(endpoint.lanes)]
        for rank, endpoint in enumerate(endpoints)
        if rank != greeting.rank
    }


@dataclass
class _Rendezvous:
    """One rank's side of the rendezvous; the first error stops all of it."""

    greeting: Greeting
    endpoints: Sequence[Endpoint]
    deadline_s: float
    clock: Callable[[], float]
    connections: dict[ConnectionKey, GreetedSocket] = field(default_factory=dict)
    errors: list[BaseException] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)
    all_accepted: threading.Event = field(default_factory=threading.Event)
    claimed: set[ConnectionKey] = field(default_factory=set)
    pending: dict[threading.Thread, socket.socket] = field(default_factory=dict)
    dialled: list[socket.socket] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def remaining_s(self) -> float:
        return max(self.deadline_s - time.monotonic(), 0.01)

    def on_task_done(self, task: Future[None]) -> None:
        error = task.exception()
        if error is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Record `error`, stop accepting and shut down the dialled sockets."""
        self.errors.append(error)
        self.stopped.set()
        self.all_accepted.set()
        with self.lock:
            dialled = list(self.dialled)
        for connection in dialled:
            _shut_down(connection)

    def decisive_error(self) -> BaseException:
        """Return the error to raise: the `RestartError` of the latest incarnation, else the first error."""
        newer = [error for error in self.errors if isinstance(error, RestartError)]
        return max(newer, key=lambda error: error.incarnation) if newer else self.errors[0]

    def dial(self, rank: int, number: int) -> None:
        """Dial and greet a lower rank; retry while its route starts or its process is replaced."""
        endpoint = self.endpoints[rank]
        while True:
            try:
                found = dial_rank(self.greeting, rank, number, endpoint, self.remaining_s, self.clock, self._on_dialled)
                break
            except UnavailableError as error:
                if isinstance(error, PeerError) and not is_transient(error):
                    raise
                if self.stopped.wait(_POLL_S) or self.remaining_s <= _POLL_S:
                    raise
        self.connections[rank, number] = found

    def _on_dialled(self, sock: socket.socket) -> None:
        with self.lock:
            self.dialled.append(sock)
        if self.stopped.is_set():
            _shut_down(sock)

    def accept(self, listener: socket.socket) -> None:
        """Accept connections, each answered in its own thread, until all higher ranks are connected."""
        expected = self._expected_keys()
        listener.settimeout(_POLL_S)
        while missing := expected - self.connections.keys():
            if self.stopped.is_set():
                return
            if self.remaining_s <= _POLL_S:
                ranks = ", ".join(map(str, sorted({rank for rank, _ in missing})))
                raise PeerError(f"rank {self.greeting.rank}: rank {ranks} never connected")
            if len(self.pending) > len(expected) + MAX_PENDING_CONNECTIONS:
                self.stopped.wait(_POLL_S)
                continue
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            self._start_answer(connection)
        self.all_accepted.set()

    def check_listening(self) -> None:
        """Check periodically that the missing higher ranks still listen; raise `PeerError` if one is gone."""
        while not self.all_accepted.wait(_LISTEN_CHECK_S):
            for rank in sorted({rank for rank, _ in self._expected_keys() - self.connections.keys()}):
                endpoint = self.endpoints[rank]
                try:
                    dial((endpoint.host, endpoint.port), endpoint.route, min(DIAL_TIMEOUT_S, self.remaining_s)).close()
                except UnavailableError as error:
                    if isinstance(error, PeerError) and not is_transient(error):
                        raise PeerError(f"rank {rank}: {error.message}", hint=error.hint) from error

    def _expected_keys(self) -> set[ConnectionKey]:
        higher = range(self.greeting.rank + 1, self.greeting.size)
        return {(rank, number) for rank in higher for number in range(self.endpoints[rank].lanes)}

    def close_pending(self) -> None:
        """Shut down connections without a complete greeting and join their threads."""
        with self.lock:
            waiting = dict(self.pending)
        for connection in waiting.values():
            _shut_down(connection)
        for thread in waiting:
            thread.join()

    def _start_answer(self, sock: socket.socket) -> None:
        thread = threading.Thread(target=self._answer, args=(sock,), name="isthmus-answer", daemon=True)
        with self.lock:
            self.pending[thread] = sock
        thread.start()

    def _claim(self, rank: int, number: int) -> bool:
        with self.lock:
            known = (rank, number) in self.claimed or not 0 <= number < self.endpoints[rank].lanes
            self.claimed.add((rank, number))
            return not known

    def _answer(self, sock: socket.socket) -> None:
        claimed: list[ConnectionKey] = []

        def claim(rank: int, number: int) -> bool:
            if self._claim(rank, number):
                claimed.append((rank, number))
                set_socket_options(sock, self.endpoints[rank].congestion_control)
            return bool(claimed)

        try:
            sock.settimeout(min(self.remaining_s, GREETING_TIMEOUT_S))
            rank, number, offset_s = answer_greeting(sock, self.greeting, self.clock, claim)
        except (IsthmusError, OSError) as error:
            sock.close()
            self.claimed.difference_update(claimed)
            if isinstance(error, RestartError):
                self.fail(error)
        else:
            with self.lock:  # atomic, so that `close_pending` does not shut this connection down
                del self.pending[threading.current_thread()]
                self.connections[rank, number] = (sock, offset_s)
        finally:
            with self.lock:
                self.pending.pop(threading.current_thread(), None)


def _shut_down(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
