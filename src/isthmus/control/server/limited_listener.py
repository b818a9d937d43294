"""`LimitedListener`: accepts connections within `ConnectionLimits` and closes those that are overdue.

asyncio's own server accepts without limits, and without free files it writes a log line for each try, thousands a
second. This one closes the oldest unproven connections then, pauses, and goes on. A connection costs a socket and a
few hundred bytes until its first request is complete: only then it gets a transport, a protocol and a parser.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import select
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from isthmus.control.server.connection_limits import ClientConnection, ConnectionLimits
from isthmus.control.server.guarded_protocol import GuardedProtocol
from isthmus.control.server.head_refusal import HEAD_END, MAX_HEAD_BYTES, TOO_LARGE, refusal
from isthmus.control.service.access.token_gate import TokenGate

CALLS_PER_TURN = 16
"""Connections accepted, or read from, before others have their turn: 1 ms."""
PAUSE_S = 0.2
"""Pause after a failure to accept."""
FLOOD_PAUSE_S = 0.002
"""Pause after the last of those that wait to be accepted, if one was refused: a flood is accepted several at a time."""
FREED_PER_FAILURE = 64
"""Unproven connections that are closed when no file is free."""
SWEEP_INTERVAL_S = 0.5
"""Interval of closing overdue connections."""
SHORT_SWEEP_INTERVAL_S = 0.01
"""Interval while more are overdue than one sweep closes."""
CLOSED_PER_SWEEP = 16
"""Overdue connections closed at once: 1,600 a second, so that an attacker that opens them again has no burst."""
REPORT_INTERVAL_S = 60.0
"""Least interval between two log lines about closed connections."""

_NO_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_WITH_CLOSE = socket.MSG_DONTWAIT | getattr(socket, "MSG_MORE", 0)
"""Flags of an answer before a close: Linux sends both in one packet, at half the cost of two."""
_log = logging.getLogger("isthmus.server")
MakeProtocol = Callable[[ClientConnection, bytes, Callable[[ClientConnection], None]], GuardedProtocol]


@dataclass(slots=True, eq=False)
class _Waiting:
    """A connection whose first request is not complete: its socket, its address, and what it has sent."""

    socket: socket.socket
    address: str
    received: bytes = b""


class LimitedListener:
    """Accepts on a bound socket; used like an `asyncio.Server` by uvicorn."""

    def __init__(
        self,
        listener: socket.socket,
        limits: ConnectionLimits,
        gate: TokenGate,
        make_protocol: MakeProtocol,
        *,
        tls: ssl.SSLContext | None,
        backlog: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listener, self._limits, self._gate, self._make_protocol = listener, limits, gate, make_protocol
        self._tls, self._clock = tls, clock
        self._loop = asyncio.get_running_loop()
        self._epoll = select.epoll()
        self._by_file: dict[int, ClientConnection] = {}
        self._waiting: dict[ClientConnection, _Waiting] = {}
        self._protocols: dict[ClientConnection, GuardedProtocol] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._counts: Counter[str] = Counter()
        self._reported_s = float("-inf")
        listener.setblocking(False)
        listener.listen(backlog)
        self._timer = self._loop.call_later(SWEEP_INTERVAL_S, self._sweep)
        self._pause: asyncio.TimerHandle | None = None
        self._loop.add_reader(listener.fileno(), self._accept)
        self._loop.add_reader(self._epoll.fileno(), self._read_waiting)

    def close(self) -> None:
        """Stop accepting and close the connections without a request; the others go on."""
        self._timer.cancel()
        if self._pause is not None:
            self._pause.cancel()
        for file in (self._listener.fileno(), self._epoll.fileno()):
            with contextlib.suppress(ValueError, OSError):  # it is closed already
                self._loop.remove_reader(file)
        for connection in list(self._waiting):
            self._abort(connection)
        self._epoll.close()
        for task in self._tasks:
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until the handshakes have ended."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self) -> None:
        accepted: list[tuple[socket.socket, str]] = []
        is_last_turn = False
        for _ in range(CALLS_PER_TURN):
            try:
                made, peer = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                is_last_turn = True
                break
            except OSError as error:
                if error.errno in _NO_RESOURCES:
                    self._free_files(error)
                    break
                continue  # the client has gone
            accepted.append((made, str(peer[0])))
        # Read after all are accepted: most have sent their request by then.
        num_refused = sum([self._refuse_or_admit(made, address) for made, address in accepted])
        if num_refused and is_last_turn and self._pause is None:
            self._pause_accepting(FLOOD_PAUSE_S)

    def _refuse_or_admit(self, made: socket.socket, address: str) -> bool:
        """Refuse a new connection from what it has sent already, or admit it; return whether it was refused."""
        received = _received(made) if self._tls is None else None
        if received == b"":
            made.close()
            return False
        is_decided = received is not None and _is_decided(received)
        if is_decided and self._refuse(made, address, received or b""):
            made.close()
            return True
        connection = self._admit(made, address, received or b"")
        if connection is None:
            return False
        if is_decided:
            self._serve(connection)
        else:
            self._by_file[made.fileno()] = connection
            self._epoll.register(made, select.EPOLLIN | select.EPOLLRDHUP)
        return False

    def _admit(self, made: socket.socket, address: str, received: bytes) -> ClientConnection | None:
        """Return the connection within the limits, None if it was closed at once."""
        connection, victim = self._limits.open(address, self._clock())
        if victim is not None:
            self._abort(victim)
            self._counts["to make room for others"] += 1
        if connection is None:
            self._counts["at once, since the server is full"] += 1
            made.close()
            return None
        made.setblocking(False)
        self._waiting[connection] = _Waiting(made, address, received)
        return connection

    def _refuse(self, made: socket.socket, address: str, received: bytes) -> bool:
        """Answer a complete or too large head that is refused without parsing it; return whether it is."""
        is_complete = HEAD_END in received[:MAX_HEAD_BYTES]
        answer = refusal(self._gate, address, received) if is_complete else TOO_LARGE
        if answer is None:
            return False
        # A close discards what is unsent where something is unread.
        flags = _WITH_CLOSE if len(received) < MAX_HEAD_BYTES else socket.MSG_DONTWAIT
        with contextlib.suppress(OSError):
            made.send(answer, flags)
        return True

    def _read_waiting(self) -> None:
        for file, _ in self._epoll.poll(0, CALLS_PER_TURN):
            connection = self._by_file.get(file)
            if connection is None:
                continue
            if self._tls is not None:
                self._unregister(connection)
                self._serve(connection)  # its first bytes belong to the handshake
            else:
                self._read_head(connection, self._waiting[connection])

    def _read_head(self, connection: ClientConnection, waiting: _Waiting) -> None:
        """Read what has arrived; serve the connection once a head is complete, unless it is refused."""
        data = _received(waiting.socket)
        if data is None:
            return
        if not data:
            self._abort(connection)
            return
        waiting.received += data
        if not _is_decided(waiting.received):
            return
        if self._refuse(waiting.socket, waiting.address, waiting.received):
            self._abort(connection)
            return
        self._unregister(connection)
        self._serve(connection)

    def _unregister(self, connection: ClientConnection) -> None:
        made = self._waiting[connection].socket
        del self._by_file[made.fileno()]
        self._epoll.unregister(made)

    def _serve(self, connection: ClientConnection) -> None:
        task = self._loop.create_task(self._connect(connection, self._waiting[connection]))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, connection: ClientConnection, waiting: _Waiting) -> None:
        """Give a connection its protocol, after the TLS handshake where TLS is used."""
        protocol = self._make_protocol(connection, waiting.received, self._forget)
        limit_s = self._limits.caps.head_limit_s if self._tls else None
        try:
            await self._loop.connect_accepted_socket(
                lambda: protocol, waiting.socket, ssl=self._tls, ssl_handshake_timeout=limit_s
            )
        except (OSError, TimeoutError):  # the handshake failed, or took too long
            self._forget(connection)
            return
        except BaseException:
            self._forget(connection)
            raise
        if self._waiting.pop(connection, None) is None:  # closed meanwhile
            protocol.abort()
            return
        self._protocols[connection] = protocol

    def _abort(self, connection: ClientConnection) -> None:
        """Close a connection at once, whatever it does."""
        protocol, waiting = self._protocols.get(connection), self._waiting.get(connection)
        served = waiting is not None and waiting.socket.fileno() not in self._by_file
        self._forget(connection)
        if protocol is not None:
            protocol.abort()
        elif waiting is not None and served:  # its transport closes the socket
            with contextlib.suppress(OSError):
                waiting.socket.shutdown(socket.SHUT_RDWR)
        elif waiting is not None:
            waiting.socket.close()

    def _forget(self, connection: ClientConnection) -> None:
        self._limits.close(connection)
        self._protocols.pop(connection, None)
        waiting = self._waiting.pop(connection, None)
        if waiting is not None:
            self._by_file.pop(waiting.socket.fileno(), None)

    def _free_files(self, error: OSError) -> None:
        """Close the oldest unproven connections and accept again after a pause."""
        for _ in range(FREED_PER_FAILURE):
            victim = self._limits.oldest_unproven()
            if victim is None:
                break
            self._abort(victim)
            self._counts[f"since no file was free ({error.strerror})"] += 1
        self._pause_accepting(PAUSE_S)

    def _pause_accepting(self, pause_s: float) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._pause = self._loop.call_later(pause_s, self._resume)

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _sweep(self) -> None:
        is_more_left = False
        try:
            is_more_left = self._close_overdue(self._clock())
        finally:
            pause_s = SHORT_SWEEP_INTERVAL_S if is_more_left else SWEEP_INTERVAL_S
            self._timer = self._loop.call_later(pause_s, self._sweep)

    def _close_overdue(self, now_s: float) -> bool:
        """Close overdue connections and report; return whether more may be left for the next sweep."""
        overdue = self._limits.overdue(now_s, CLOSED_PER_SWEEP)
        for connection in overdue:
            self._abort(connection)
            self._counts["after their time for a request or its answer"] += 1
        if self._counts and now_s - self._reported_s >= REPORT_INTERVAL_S:
            text = ", ".join(f"{number} {why}" for why, number in self._counts.most_common())
            _log.warning("connections closed: %s; %d are open", text, self._limits.num_open)
            self._counts.clear()
            self._reported_s = now_s
        return len(overdue) == CLOSED_PER_SWEEP


def _received(made: socket.socket) -> bytes | None:
    """Return what has arrived, None if nothing has, nothing if the connection has ended."""
    try:
        return made.recv(MAX_HEAD_BYTES, socket.MSG_DONTWAIT)
    except (BlockingIOError, InterruptedError):
        return None
    except OSError:
        return b""


def _is_decided(received: bytes) -> bool:
    """Return whether a head is complete or too large."""
    return HEAD_END in received or len(received) >= MAX_HEAD_BYTES
