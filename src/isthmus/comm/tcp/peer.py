"""`Peer`: one remote worker and the connections to it, which are reopened while the worker lives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from isthmus.comm.tcp.connection import Lane
from isthmus.comm.tcp.reassembly import Inbox
from isthmus.comm.tcp.reconnect import Connection, Mender, OnLink, Redial, loss_of_peer
from isthmus.comm.tcp.send_queue import Outbox
from isthmus.comm.transport.receive_matching import Mailbox
from isthmus.comm.transport.transport import Arrival, Traffic
from isthmus.core.errors import PeerError

SILENT_BEATS = 3
"""Missed heartbeats after which a connection counts as broken."""


class Peer:
    """The worker of rank `rank` and its connections; delivery is exactly once.

    `redial` reopens a broken connection; the others meanwhile resend its unacknowledged fragments.
    `on_loss` is called once, from a connection thread, when the worker is gone without CLOSE, silent for
    `timeout_s`, or closed with a failure reason. `on_link` reports when nothing arrives from the worker,
    and when it does again.
    """

    def __init__(
        self,
        rank: int,
        connections: Sequence[Connection],
        *,
        heartbeat_s: float,
        timeout_s: float,
        on_loss: Callable[[PeerError], None],
        redial: Redial,
        on_link: OnLink = lambda _rank, _why, _lasted_s: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.rank, self.traffic, self.mailbox = rank, Traffic(), Mailbox(rank)
        self.inbox, self.outbox = Inbox(self.mailbox, Lane.shut), Outbox()
        self.farewell: str | None = None
        self._heartbeat_s, self._timeout_s = heartbeat_s, timeout_s
        self._clock, self._on_loss = clock, on_loss
        self._error: PeerError | None = None
        self._given_up = False
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._over = threading.Event()
        self._mender = Mender(rank, timeout_s, redial, on_link, self._over)
        self._mending: set[threading.Thread] = set()
        self._lanes = {number: self._lane(number, one) for number, one in enumerate(connections)}

    def start(self) -> None:
        """Start the threads of all connections."""
        for connection in self._lanes.values():
            connection.start()

    def send(self, tag: int, label: str, payload: memoryview) -> Future[None]:
        """Queue a message stamped with the current time; the future is done when the peer acknowledges it."""
        return self.outbox.put(tag, label, payload, self._clock())

    def receive(self, tag: int, label: str, into: memoryview) -> Future[Arrival]:
        """Post a receive for the next message of `tag`."""
        return self.mailbox.ask(tag, label, into)

    def attach(self, number: int, connection: Connection) -> bool:
        """Replace connection `number`; return False if the peer is stopped or has no such connection.

        The dialler may reopen a connection twice before the old one has ended: each replaces the one it
        finds.
        """
        while (old := self._lanes.get(number)) is not None and not self._over.is_set():
            old.cut()
            old.join()
            with self._lock:
                if self._over.is_set():
                    return False
                if self._lanes[number] is old:
                    self._lanes[number] = replacement = self._lane(number, connection)
                    replacement.start()
                    break
        else:
            return False
        self._mender.mended()
        return True

    @property
    def has_left(self) -> bool:
        """Whether the peer sent CLOSE on any connection."""
        return any(one.peer_left for one in self._lanes.values())

    def fail(self, error: PeerError) -> None:
        """Fail all pending and future sends and receives, and stop reconnecting."""
        with self._changed:
            self._over.set()
            self._changed.notify_all()
        self._fail(error)

    def part(self, reason: str, linger_s: float) -> None:
        """Send CLOSE: immediately with a `reason`, otherwise when all is acknowledged or after `linger_s`."""
        if not reason and self._error is None:
            self.outbox.wait_until_arrived(linger_s)
        with self._lock:
            self.farewell = reason if self.farewell is None else self.farewell
        self.outbox.wake()

    def join(self, linger_s: float, silence_s: float = 0.0) -> None:
        """Wait until both sides have sent CLOSE, then stop the threads and close the sockets.

        Waits for at most `linger_s`, or longer, up to the peer timeout, while the peer was active within
        the last `silence_s`.
        """
        start_s = time.monotonic()
        with self._changed:
            while not self._has_parted():
                heard_s = min(self._mender.heard_s, start_s + self._timeout_s)
                left_s = max(start_s + linger_s, heard_s + silence_s) - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            reconnecting = list(self._mending)
        self.fail(PeerError(f"this rank closed the connection to peer {self.rank}"))
        for thread in reconnecting:
            thread.join()
        for connection in list(self._lanes.values()):
            connection.cut()
            connection.join()

    def give_up(self) -> None:
        """Stop waiting for the CLOSE and the acknowledgements of an unreachable peer."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()
        if not self.has_left and all(one.dead for one in self._lanes.values()):
            self.outbox.drop(PeerError(f"this rank stopped waiting for peer {self.rank}"))

    def abandon(self) -> None:
        """Break all connections without CLOSE; reconnect threads see the stop flag."""
        self.fail(PeerError(f"this rank aborted the connection to peer {self.rank}"))
        for connection in list(self._lanes.values()):
            connection.cut()
            connection.join()

    def heard(self) -> None:
        """Record that a frame arrived from the peer."""
        self._mender.heard()

    def sent(self, num_bytes: int) -> None:
        """Count a message that the peer acknowledged."""
        with self._lock:
            self.traffic.sent_bytes += num_bytes
            self.traffic.sent_messages += 1

    def received(self, num_bytes: int, arrival: Arrival) -> None:
        """Count a message that was received completely."""
        with self._lock:
            self.traffic.received_bytes += num_bytes
            self.traffic.received_messages += 1
            self.traffic.last_transfer_s = arrival.transfer_s

    def left(self, reason: str) -> None:
        """Handle a CLOSE frame from the peer; a `reason` means that its run failed."""
        if reason:
            self._lost(loss_of_peer(f"peer {self.rank} failed: {reason}"))
            self._leave()
        else:
            self._answer_leave()

    def took_leave(self) -> None:
        """Wake `join` after this rank sent CLOSE on one connection."""
        with self._changed:
            self._changed.notify_all()

    def broke(self, lane: Lane, error: Exception) -> None:
        """Reconnect after a network error; treat the peer as lost after a malformed frame.

        A connection that breaks during an orderly close is reopened too, so that both sides exchange CLOSE.
        """
        if not isinstance(error, OSError):
            self._lost(loss_of_peer(f"malformed frame from peer {self.rank}: {error}"))
        self._answer_leave()
        with self._changed:
            if not (self._over.is_set() or self.farewell or self._said_and_heard()):
                thread = threading.Thread(
                    target=self._mend, args=(lane, error), name=f"isthmus-reconnect-{self.rank}", daemon=True
                )
                self._mending.add(thread)
                thread.start()
            self._changed.notify_all()

    def _answer_leave(self) -> None:
        """Send CLOSE in turn once the peer has on every live connection."""
        if self.has_left and all(one.peer_left or one.dead for one in self._lanes.values()):
            self._fail(PeerError(f"peer {self.rank} has closed"))
            self._leave()

    def _leave(self) -> None:
        with self._changed:
            self.farewell = self.farewell or ""
            self._changed.notify_all()
        self.outbox.wake()

    def _has_parted(self) -> bool:
        """Return whether CLOSE was exchanged on all live connections, or none is live and none will be."""
        alive = [one for one in self._lanes.values() if not one.dead]
        if alive:
            return all(one.has_taken_leave and one.peer_left for one in alive)
        return self._said_and_heard() or self._over.is_set() or self._given_up or not self._mending

    def _said_and_heard(self) -> bool:
        return self.has_left and any(one.has_taken_leave for one in self._lanes.values())

    def _mend(self, lane: Lane, error: Exception) -> None:
        """Reopen a connection; if that fails, mark the peer lost unless this rank is closing."""
        try:
            number = lane.number
            self._mender.open_again(number, error, lambda: self._lanes[number] is lane, self.attach)
        except PeerError as gone:
            if self.farewell is None:
                self._lost(gone)
        finally:
            with self._changed:
                self._mending.discard(threading.current_thread())
                self._changed.notify_all()

    def _lane(self, number: int, connection: Connection) -> Lane:
        return Lane(
            number,
            *connection,
            self,
            heartbeat_s=self._heartbeat_s,
            silence_s=SILENT_BEATS * self._heartbeat_s,
            clock=self._clock,
        )

    def _fail(self, error: PeerError) -> None:
        with self._lock:
            self._error = error = self._error or error
        self.mailbox.fail(error)
        self.outbox.fail(error)

    def _lost(self, error: PeerError) -> None:
        with self._lock:
            known = self._error is not None
        self.fail(error)
        if not known and self.farewell is None:
            self._on_loss(error)
