"""`connect`: meet every other worker of the run, by all lanes: dial the lower ranks, answer the higher."""

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
"""How long one who connects may take to say who it is."""

MAX_STRANGERS = 64
"""How many that are nobody of ours may be connected at once; those beyond wait unanswered."""

Lane = tuple[int, int]
"""A peer's rank and the number of a connection to it."""

_POLL_S = 0.2
_LOOK_S = 1.0


def connect(
    greeting: Greeting,
    endpoints: Sequence[Endpoint],
    listener: socket.socket,
    timeout_s: float,
    clock: Callable[[], float] = time.time,
) -> dict[int, list[Connection]]:
    """Connect to every other rank; `endpoints[r]` is where rank `r` listens, `listener` our own socket there.

    Returns the connections by rank, in the order of lanes.

    Of two ranks the higher one dials. A stranger that connects, or a rank that is here already, is turned
    away, and one that says nothing keeps nobody waiting; a process that ends before it has answered may be
    replaced, and is dialled again. Raises `PeerError` naming
    the rank that refused, could not be reached, or did not come within `timeout_s`; `RestartError` where one
    is of a later incarnation; `ProtocolError` where it is of another format version.
    """
    meeting = _Meeting(greeting, endpoints, time.monotonic() + timeout_s, clock)
    lanes = [(rank, lane) for rank in range(greeting.rank) for lane in range(endpoints[rank].lanes)]
    with ThreadPoolExecutor(len(lanes) + 2, thread_name_prefix="isthmus-meet") as pool:
        tasks = [pool.submit(meeting.accept, listener), pool.submit(meeting.look)]
        tasks += [pool.submit(meeting.dial, *one) for one in lanes]
        for task in tasks:
            task.add_done_callback(meeting.note)
    meeting.end()
    if meeting.errors:
        for connection, _ in meeting.connections.values():
            connection.close()
        raise meeting.worst()
    return {
        rank: [meeting.connections[rank, lane] for lane in range(endpoint.lanes)]
        for rank, endpoint in enumerate(endpoints)
        if rank != greeting.rank
    }


@dataclass
class _Meeting:
    """One rank's side of the meeting; the first error ends all of it."""

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
        """End the meeting: nobody waits for an answer any longer."""
        self.errors.append(error)
        self.over.set()
        self.accepted.set()
        with self.lock:
            dialled = list(self.dialled)
        for connection in dialled:
            _shut(connection)

    def worst(self) -> BaseException:
        """Return the error that ended the meeting: the latest incarnation, if any is later than ours."""
        newer = [error for error in self.errors if isinstance(error, RestartError)]
        return max(newer, key=lambda error: error.incarnation) if newer else self.errors[0]

    def dial(self, rank: int, lane: int) -> None:
        """Reach and greet a lower rank, which has checked in. Its route may still be starting, or it may be
        in the middle of being replaced: tried again.
        """
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
        """Answer the higher ranks, all that connect at once, until all are there."""
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
        """Look now and then whether the higher ranks that are missing still listen; raise if one is gone."""
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
        return {(rank, lane) for rank in higher for lane in range(self.endpoints[rank].lanes)}

    def end(self) -> None:
        """Turn away who has connected without saying who it is; return when nobody is being heard."""
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

        def claim(rank: int, lane: int) -> bool:
            if self._claim(rank, lane):
                claimed.append((rank, lane))
                tune(connection, self.endpoints[rank].congestion_control)
            return bool(claimed)

        try:
            connection.settimeout(min(self.left_s, GREETING_S))
            rank, lane, offset_s = answer(connection, self.greeting, self.clock, claim)
        except (IsthmusError, OSError) as error:
            connection.close()
            self.claimed.difference_update(claimed)
            if isinstance(error, RestartError):
                self.fail(error)
        else:
            with self.lock:  # `end` must not take the connection for that of a stranger
                del self.callers[threading.current_thread()]
                self.connections[rank, lane] = (connection, offset_s)
        finally:
            with self.lock:
                self.callers.pop(threading.current_thread(), None)


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
