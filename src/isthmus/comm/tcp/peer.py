"""`Peer`: one remote worker and the connections to it, which are reopened while the worker lives."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from isthmus.comm.tcp.connection import Connection
from isthmus.comm.tcp.reassembly import Reassembler
from isthmus.comm.tcp.reconnect import GreetedChannel, OnLink, Reconnector, Redial, peer_loss_error
from isthmus.comm.tcp.send_queue import SendQueue
from isthmus.comm.transport.receive_matching import MAX_MESSAGE_BYTES, ReceiveMatcher
from isthmus.comm.transport.transport import Arrival, Traffic
from isthmus.core.errors import PeerError
from isthmus.core.process.steady_clock import steady_time_s

MAX_MISSED_HEARTBEATS = 3
"""Missed heartbeats after which a connection counts as broken."""
PART_TIMEOUT_SHARE = 0.5
"""Share of the peer's timeout that a part of a frame, of at most 256 KiB, may take: 140 kbit/s with the defaults."""


OnNotice = Callable[[int, int, bytes], None]
"""(rank, tag, text) of a notice; raises `ValueError` for a malformed one."""


class Peer:
    """The worker of rank `rank` and its connections; delivery is exactly once.

    `greeted_channels` are its first connections; others, up to `num_connections`, are opened by `open` or by the peer.
    `redial` opens a connection, also a broken one; the others meanwhile resend its unacknowledged fragments.
    `on_loss` is called once, from a connection thread, when the worker is gone without CLOSE, silent for
    `timeout_s`, or closed with a failure reason. `on_link` reports when nothing arrives from the worker,
    and when it does again; `on_notice` gets tag and text of what the peer tells about the run, and `on_peer_closed`
    the rank once it has sent CLOSE on every live connection. While `is_joining()`, the peer may be silent.
    `jitter` is that of `Reconnector`.
    """

    connection_type: type[Connection] = Connection

    def __init__(
        self,
        rank: int,
        greeted_channels: Sequence[GreetedChannel],
        *,
        heartbeat_s: float,
        timeout_s: float,
        on_loss: Callable[[PeerError], None],
        redial: Redial,
        on_link: OnLink = lambda _rank, _why, _lasted_s: None,
        clock: Callable[[], float] = steady_time_s,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        num_connections: int = 0,
        on_notice: OnNotice = lambda _rank, _tag, _text: None,
        on_peer_closed: Callable[[int], None] = lambda _rank: None,
        is_joining: Callable[[], bool] = lambda: False,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.rank, self.traffic = rank, Traffic()
        self.matcher = ReceiveMatcher(rank, max_message_bytes=max_message_bytes)
        self.reassembler, self.send_queue = Reassembler(self.matcher, Connection.shut_down), SendQueue()
        self.close_reason: str | None = None
        # Whether the peer has closed with the reason of a failure.
        self.has_failed = False
        self._heartbeat_s, self._timeout_s = heartbeat_s, timeout_s
        self._clock, self._on_loss, self._on_notice = clock, on_loss, on_notice
        self._on_peer_closed, self._is_joining = on_peer_closed, is_joining
        self._num_connections = max(num_connections, len(greeted_channels))
        self._is_opened = bool(greeted_channels)
        self._notices: list[tuple[int, bytes]] = []
        self._error: PeerError | None = None
        self._stopped_waiting = False
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._stopped = threading.Event()
        self._reconnector = Reconnector(rank, timeout_s, redial, on_link, self._stopped, jitter)
        self._reconnect_threads: set[threading.Thread] = set()
        self._num_attaching = 0
        self._connections = {number: self._make_connection(number, one) for number, one in enumerate(greeted_channels)}

    def start(self) -> None:
        """Start the threads of all connections."""
        with self._lock:
            for connection in self._connections.values():
                connection.start()

    def send(self, tag: int, label: str, payload: memoryview) -> Future[None]:
        """Queue a message stamped with the current time; the future is done when the peer acknowledges it."""
        return self.send_queue.put(tag, label, payload, self._clock())

    def receive(self, tag: int, label: str, into: memoryview) -> Future[Arrival]:
        """Post a receive for the next message of `tag`."""
        return self.matcher.post_receive(tag, label, into)

    def open(self) -> None:
        """Begin to dial, once, every connection that there is not."""
        if self._is_opened:
            return
        with self._changed:
            if self._is_opened or self._stopped.is_set():
                return
            self._is_opened = True
            for number in range(self._num_connections):
                if number not in self._connections:
                    self._start_reconnect(number, None, ConnectionError("not connected yet"))

    def notify(self, tag: int, text: bytes = b"") -> None:
        """Send a notice, and again on each later connection: it arrives once at least while the peer is reachable."""
        with self._lock:
            self._notices.append((tag, text))
        self.send_queue.queue_notice(tag, text)

    def attach(self, number: int, greeted_channel: GreetedChannel) -> bool:
        """Add or replace connection `number`; return False if the peer is stopped or has no such connection.

        The dialler may reopen a connection twice before the old one has ended: each replaces the one it
        finds.
        """
        with self._lock:
            self._num_attaching += 1
        try:
            is_attached = self._replace_connection(number, greeted_channel)
        finally:
            with self._changed:
                self._num_attaching -= 1
                self._changed.notify_all()
        if is_attached:
            self._reconnector.on_reconnected()
            for notice in list(self._notices):
                self.send_queue.queue_notice(*notice)
        return is_attached

    def _replace_connection(self, number: int, greeted_channel: GreetedChannel) -> bool:
        while not self._stopped.is_set() and 0 <= number < self._num_connections:
            old = self._started_connection(number)
            if old is not None:
                old.abort()
                old.join()
            with self._lock:
                if self._stopped.is_set():
                    return False
                if self._connections.get(number) is old:
                    replacement = self._make_connection(number, greeted_channel)
                    self._connections = self._connections | {number: replacement}
                    self._is_opened = True
                    replacement.start()
                    return True
        return False

    def has_connected(self, number: int) -> bool:
        """Return whether connection `number` was open at some time."""
        return number in self._connections

    @property
    def has_connected_once(self) -> bool:
        """Whether any connection was open at some time."""
        return bool(self._connections)

    @property
    def last_activity_s(self) -> float:
        """When the last frame arrived, on the monotonic clock."""
        return self._reconnector.last_activity_s

    @property
    def is_linked(self) -> bool:
        """Whether the peer was connected at some time, or is dialled."""
        return self._is_opened

    @property
    def has_closed(self) -> bool:
        """Whether the peer sent CLOSE on any connection."""
        return any(one.peer_closed for one in self._connections.values())

    def fail(self, error: PeerError) -> None:
        """Fail all pending and future sends and receives, and stop reconnecting."""
        with self._changed:
            self._stopped.set()
            self._changed.notify_all()
        self._fail_pending(error)

    def close(self, reason: str, linger_s: float) -> None:
        """Send CLOSE: immediately with a `reason`, otherwise when all is acknowledged or after `linger_s`."""
        if not reason and self._error is None:
            self.send_queue.wait_until_acked(linger_s)
        with self._lock:
            self.close_reason = reason if self.close_reason is None else self.close_reason
        self.send_queue.wake()

    def join(self, linger_s: float, silence_timeout_s: float = 0.0) -> None:
        """Wait until both sides have sent CLOSE, then stop the threads and close the sockets.

        Waits for at most `linger_s`, or longer, up to the peer timeout, while the peer was active within
        the last `silence_timeout_s`.
        """
        start_s = time.monotonic()
        with self._changed:
            while not self._is_closed():
                heard_s = min(self._reconnector.last_activity_s, start_s + self._timeout_s)
                left_s = max(start_s + linger_s, heard_s + silence_timeout_s) - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            reconnecting = list(self._reconnect_threads)
        self.fail(PeerError(f"this rank closed the connection to peer {self.rank}"))
        for thread in reconnecting:
            thread.join()
        self._end_connections()

    def stop_waiting(self) -> None:
        """Stop waiting for the CLOSE and the acknowledgements of an unreachable peer."""
        with self._changed:
            self._stopped_waiting = True
            self._changed.notify_all()
        if not self.has_closed and all(one.dead for one in self._connections.values()):
            self.send_queue.drop(PeerError(f"this rank stopped waiting for peer {self.rank}"))

    def abort(self) -> None:
        """Break all connections without CLOSE, and wait for their threads; reconnect threads see the stop flag."""
        self.begin_abort()
        self._end_connections()

    def begin_abort(self) -> None:
        """Break all connections without CLOSE; `abort` ends them."""
        self.fail(PeerError(f"this rank aborted the connection to peer {self.rank}"))
        for connection in list(self._connections.values()):
            connection.abort()

    def _end_connections(self) -> None:
        """Break all connections, then wait for all: each may take a moment to deliver what was written."""
        connections = list(self._connections.values())
        for connection in connections:
            connection.abort()
        for connection in connections:
            connection.join()

    @property
    def tolerates_silence(self) -> bool:
        """Whether silence breaks no connection: ranks join or end."""
        return self.close_reason is not None or self._is_joining()

    def on_activity(self) -> None:
        """Record that a frame arrived from the peer."""
        self._reconnector.on_activity()

    def on_acked(self, num_bytes: int) -> None:
        """Count a message that the peer acknowledged."""
        with self._lock:
            self.traffic.sent_bytes += num_bytes
            self.traffic.sent_messages += 1

    def on_received(self, num_bytes: int, arrival: Arrival) -> None:
        """Count a message that was received completely."""
        with self._lock:
            self.traffic.received_bytes += num_bytes
            self.traffic.received_messages += 1
            self.traffic.last_transfer_s = arrival.transfer_s

    def on_notice(self, tag: int, text: bytes) -> None:
        """Pass a notice of the peer on."""
        self._on_notice(self.rank, tag, text)

    def on_peer_closed(self, reason: str) -> None:
        """Handle a CLOSE frame from the peer; a `reason` means that its run failed."""
        if reason:
            self.has_failed = True
            self._mark_lost(peer_loss_error(f"peer {self.rank} failed: {reason}"))
            self._begin_close()
        else:
            self._answer_close()

    def on_closed(self) -> None:
        """Wake `join` after this rank sent CLOSE on one connection."""
        with self._changed:
            self._changed.notify_all()

    def on_broken(self, connection: Connection, error: Exception) -> None:
        """Reconnect after a network error; treat the peer as lost after a malformed frame.

        A connection that breaks during an orderly close is reopened too, so that both sides exchange CLOSE.
        """
        if not isinstance(error, OSError):
            self._mark_lost(peer_loss_error(f"malformed frame from peer {self.rank}: {error}"))
        self._answer_close()
        with self._changed:
            if not (self._stopped.is_set() or self.close_reason or self._close_exchanged()):
                self._start_reconnect(connection.number, connection, error)
            connection.is_failing = False
            self._changed.notify_all()

    def _start_reconnect(self, number: int, broken: Connection | None, error: Exception) -> None:
        """Start to open connection `number`, `broken` by `error` or not there; the lock is held."""
        name = f"isthmus-reconnect-{self.rank}"
        thread = threading.Thread(target=self._reconnect, args=(number, broken, error), name=name, daemon=True)
        self._reconnect_threads.add(thread)
        thread.start()

    def _answer_close(self) -> None:
        """Send CLOSE in turn once the peer has on every live connection."""
        if self.has_closed and all(one.peer_closed or one.dead for one in self._connections.values()):
            self._fail_pending(PeerError(f"peer {self.rank} has closed"))
            self._begin_close()
            self._on_peer_closed(self.rank)

    def _begin_close(self) -> None:
        with self._changed:
            self.close_reason = self.close_reason or ""
            self._changed.notify_all()
        self.send_queue.wake()

    def _is_closed(self) -> bool:
        """Return whether CLOSE was exchanged on all live connections, or none is live and none will be."""
        alive = [one for one in self._connections.values() if not one.dead]
        if alive:
            return all(one.has_closed and one.peer_closed for one in alive)
        if self._num_attaching or any(one.is_failing for one in self._connections.values()):
            return self._stopped.is_set() or self._stopped_waiting
        return self._close_exchanged() or self._stopped.is_set() or self._stopped_waiting or not self._reconnect_threads

    def _close_exchanged(self) -> bool:
        return self.has_closed and any(one.has_closed for one in self._connections.values())

    def _reconnect(self, number: int, broken: Connection | None, error: Exception) -> None:
        """Open a connection; if that fails, mark the peer lost unless this rank is closing."""
        try:
            self._reconnector.reconnect(
                number, error, lambda: self._connections.get(number) is broken, self.attach, is_first=broken is None
            )
        except PeerError as gone:
            if self.close_reason is None:
                self._mark_lost(gone)
        finally:
            with self._changed:
                self._reconnect_threads.discard(threading.current_thread())
                self._changed.notify_all()

    def _started_connection(self, number: int) -> Connection | None:
        """Return connection `number`, if there is one. The lock is held from its creation to its start."""
        with self._lock:
            return self._connections.get(number)

    def _make_connection(self, number: int, greeted_channel: GreetedChannel) -> Connection:
        return self.connection_type(
            number,
            *greeted_channel,
            self,
            heartbeat_s=self._heartbeat_s,
            silence_timeout_s=(silence_s := MAX_MISSED_HEARTBEATS * self._heartbeat_s),
            part_timeout_s=max(silence_s, PART_TIMEOUT_SHARE * self._timeout_s),
            clock=self._clock,
        )

    def _fail_pending(self, error: PeerError) -> None:
        with self._lock:
            self._error = error = self._error or error
        self.matcher.fail(error)
        self.send_queue.fail(error)

    def _mark_lost(self, error: PeerError) -> None:
        with self._lock:
            known = self._error is not None
        self.fail(error)
        if not known and self.close_reason is None:
            self._on_loss(error)
