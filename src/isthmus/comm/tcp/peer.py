"""`Peer`: another worker and the lanes to it; broken lanes are mended while the worker lives."""

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
"""Heartbeats that may be missing before a lane counts as broken."""


class Peer:
    """The worker of rank `rank`, reached by one lane per connection.

    A lane that breaks is opened again by `redial`; what it carried goes by the others meanwhile, and nothing
    is lost or doubled. `on_loss` is called once, from one of the threads, if the worker is gone without
    having taken leave, if nothing came from it for `timeout_s`, or if it left saying that the run failed;
    `on_link` when a lane is silent or there is no way to mend it, and when it is mended.
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
        """Start the threads of all lanes."""
        for lane in self._lanes.values():
            lane.start()

    def send(self, tag: int, label: str, payload: memoryview) -> Future[None]:
        """Queue a message, stamped with the present time; the future is done when the peer has it."""
        return self.outbox.put(tag, label, payload, self._clock())

    def receive(self, tag: int, label: str, into: memoryview) -> Future[Arrival]:
        """Ask for the next message of `tag`."""
        return self.mailbox.ask(tag, label, into)

    def attach(self, number: int, connection: Connection) -> bool:
        """Put a new connection in the place of lane `number`; False where there is none (any more).

        Who dials may open it once more before the old one has ended: each ends the one that it finds.
        """
        while (old := self._lanes.get(number)) is not None and not self._over.is_set():
            old.cut()
            old.join()
            with self._lock:
                if self._over.is_set():
                    return False
                if self._lanes[number] is old:
                    self._lanes[number] = lane = self._lane(number, connection)
                    lane.start()
                    break
        else:
            return False
        self._mender.mended()
        return True

    @property
    def has_left(self) -> bool:
        """Whether the peer has taken leave by any lane."""
        return any(one.peer_left for one in self._lanes.values())

    def fail(self, error: PeerError) -> None:
        """Fail everything that waits for this peer, now and from now on."""
        with self._changed:
            self._over.set()
            self._changed.notify_all()
        self._fail(error)

    def part(self, reason: str, linger_s: float) -> None:
        """Take leave: at once with a `reason`, else when all has arrived there, or after `linger_s`."""
        if not reason and self._error is None:
            self.outbox.wait_until_arrived(linger_s)
        with self._lock:
            self.farewell = reason if self.farewell is None else self.farewell
        self.outbox.wake()

    def join(self, linger_s: float, silence_s: float = 0.0) -> None:
        """Wait until both have taken leave, then end threads and connections.

        That is for at most `linger_s`, and on while less than `silence_s` have passed since the peer was
        heard, up to its time-out.
        """
        start_s = time.monotonic()
        with self._changed:
            while not self._has_parted():
                heard_s = min(self._mender.heard_s, start_s + self._timeout_s)
                left_s = max(start_s + linger_s, heard_s + silence_s) - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            mending = list(self._mending)
        self.fail(PeerError(f"the connection to peer {self.rank} was closed here"))
        for thread in mending:
            thread.join()
        for lane in list(self._lanes.values()):
            lane.cut()
            lane.join()

    def give_up(self) -> None:
        """Wait for no leave of a peer that no lane leads to, now or later, nor for what should arrive."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()
        if not self.has_left and all(one.dead for one in self._lanes.values()):
            self.outbox.drop(PeerError(f"the connection to peer {self.rank} was given up here"))

    def abandon(self) -> None:
        """Cut all lanes without a word; who still tries to mend one finds that it is over."""
        self.fail(PeerError(f"the connection to peer {self.rank} was given up here"))
        for lane in list(self._lanes.values()):
            lane.cut()
            lane.join()

    def heard(self) -> None:
        """Take note that the peer lives."""
        self._mender.heard()

    def sent(self, num_bytes: int) -> None:
        """Count a message that has arrived there."""
        with self._lock:
            self.traffic.sent_bytes += num_bytes
            self.traffic.sent_messages += 1

    def received(self, num_bytes: int, arrival: Arrival) -> None:
        """Count a message that has arrived here."""
        with self._lock:
            self.traffic.received_bytes += num_bytes
            self.traffic.received_messages += 1
            self.traffic.last_transfer_s = arrival.transfer_s

    def left(self, reason: str) -> None:
        """Take note that the peer has taken leave by one lane more; a `reason` says that its run failed."""
        if reason:
            self._lost(loss_of_peer(f"peer {self.rank} gave up: {reason}"))
            self._leave()
        else:
            self._answer_leave()

    def took_leave(self) -> None:
        """Take note that we have taken leave by one lane more."""
        with self._changed:
            self._changed.notify_all()

    def broke(self, lane: Lane, error: Exception) -> None:
        """Mend a lane, unless what came by it was no frame: then nothing of this peer can be trusted.

        A line that breaks while leave is taken is mended too: the peer must hear of it.
        """
        if not isinstance(error, OSError):
            self._lost(loss_of_peer(f"peer {self.rank} sent what is no frame: {error}"))
        self._answer_leave()
        with self._changed:
            if not (self._over.is_set() or self.farewell or self._said_and_heard()):
                thread = threading.Thread(
                    target=self._mend, args=(lane, error), name=f"isthmus-mend-{self.rank}", daemon=True
                )
                self._mending.add(thread)
                thread.start()
            self._changed.notify_all()

    def _answer_leave(self) -> None:
        """Take leave too, where the peer has by every lane that lives."""
        if self.has_left and all(one.peer_left or one.dead for one in self._lanes.values()):
            self._fail(PeerError(f"peer {self.rank} has ended"))
            self._leave()

    def _leave(self) -> None:
        with self._changed:
            self.farewell = self.farewell or ""
            self._changed.notify_all()
        self.outbox.wake()

    def _has_parted(self) -> bool:
        """Tell whether both have taken leave by every lane that lives; or none does, and none will."""
        alive = [one for one in self._lanes.values() if not one.dead]
        if alive:
            return all(one.has_taken_leave and one.peer_left for one in alive)
        return self._said_and_heard() or self._over.is_set() or self._given_up or not self._mending

    def _said_and_heard(self) -> bool:
        return self.has_left and any(one.has_taken_leave for one in self._lanes.values())

    def _mend(self, lane: Lane, error: Exception) -> None:
        """Mend a lane; where that cannot be done, the peer is lost, unless both were about to part."""
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
