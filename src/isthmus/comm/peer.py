"""`Peer`: another worker and the lanes to it; broken lanes are mended while the worker lives."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from isthmus.comm.inbox import Inbox
from isthmus.comm.lane import Lane
from isthmus.comm.mailbox import Mailbox
from isthmus.comm.outbox import Outbox
from isthmus.comm.transport import Arrival, Traffic
from isthmus.core.errors import PeerError, RestartError, UnavailableError

Connection = tuple[socket.socket, float]
"""A greeted connection, and how far the peer's clock is ahead of ours in seconds."""

Redial = Callable[[int, int], Connection | None]
"""Open lane `lane` to rank `rank` again; None where the other side must, and its worker lives.

Raises `UnavailableError` where there is no way just now, `PeerError` where there is no such worker any more,
`RestartError` where another one has taken its place.
"""

OnLink = Callable[[int, str, float | None], None]
"""Told that nothing comes from a rank any more, and why; or (no why) that it does again, after how long."""

SILENT_BEATS = 3
"""Heartbeats that may be missing before a lane counts as broken."""

_SILENT = "silent"

_RETRY_S = (0.1, 1.0)
"""Shortest and longest pause between two tries to mend a lane."""


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
        self.inbox, self.outbox = Inbox(self.mailbox, Lane.cut), Outbox()
        self.farewell: str | None = None
        self._heartbeat_s, self._timeout_s, self._clock = heartbeat_s, timeout_s, clock
        self._on_loss, self._redial, self._on_link = on_loss, redial, on_link
        self._cut_s: float | None = None
        self._error: PeerError | None = None
        self._heard_s = time.monotonic()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._menders: list[threading.Thread] = []
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
        """Put a new connection in the place of lane `number`; False where there is none (any more)."""
        old = self._lanes.get(number)
        if old is None or self._over.is_set():
            return False
        old.cut()
        old.join()
        lane = self._lane(number, connection)
        with self._lock:
            if self._over.is_set():
                return False
            self._lanes[number] = lane
            cut_s, self._cut_s = self._cut_s, None
        self.heard()
        if cut_s is not None:
            self._on_link(self.rank, "", time.monotonic() - cut_s)
        lane.start()
        return True

    @property
    def has_left(self) -> bool:
        """Whether the peer has taken leave by any lane."""
        return any(one.peer_left for one in self._lanes.values())

    def fail(self, error: PeerError) -> None:
        """Fail everything that waits for this peer, now and from now on."""
        with self._lock:
            self._error = self._error or error
        self._over.set()
        self.mailbox.fail(self._error)
        self.outbox.fail(self._error)

    def part(self, reason: str, linger_s: float) -> None:
        """Take leave: at once with a `reason`, else when all has arrived there, or after `linger_s`."""
        if not reason and self._error is None:
            self.outbox.wait_until_arrived(linger_s)
        with self._lock:
            self.farewell = reason if self.farewell is None else self.farewell
        self.outbox.wake()

    def join(self, linger_s: float) -> None:
        """Wait for the peer to take leave too, for at most `linger_s`; then end threads and connections."""
        deadline_s = time.monotonic() + linger_s
        for lane in list(self._lanes.values()):
            if not lane.dead:
                lane.wait_for_leave(deadline_s - time.monotonic())
        self.fail(PeerError(f"the connection to peer {self.rank} was closed here"))
        for mender in self._menders:
            mender.join()
        for lane in list(self._lanes.values()):
            lane.cut()
            lane.join()

    def abandon(self) -> None:
        """Cut all lanes without a word; who still tries to mend one finds that it is over."""
        self.fail(PeerError(f"the connection to peer {self.rank} was given up here"))
        for lane in list(self._lanes.values()):
            lane.cut()
            lane.join()

    def heard(self) -> None:
        """Take note that the peer lives."""
        self._heard_s = time.monotonic()

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
        """Take note that the peer has taken leave, and do so too: orderly, once it has by every lane."""
        if reason:
            self._lose(f"peer {self.rank} gave up: {reason}")
        elif all(one.peer_left or one.dead for one in self._lanes.values()):
            self.fail(PeerError(f"peer {self.rank} has ended"))
        else:
            return
        with self._lock:
            self.farewell = self.farewell or ""
        self.outbox.wake()

    def broke(self, lane: Lane, error: Exception) -> None:
        """Mend a lane, unless what came by it was no frame: then nothing of this peer can be trusted."""
        if not isinstance(error, OSError):
            self._lose(f"peer {self.rank} sent what is no frame: {error}")
            return
        with self._lock:
            if self._over.is_set() or self.farewell is not None:
                return
            mender = threading.Thread(
                target=self._mend, args=(lane, _why(error)), name=f"isthmus-mend-{self.rank}", daemon=True
            )
            self._menders = [one for one in self._menders if one.is_alive()] + [mender]
            mender.start()

    def _mend(self, lane: Lane, why: str) -> None:
        """Try to open the lane again until it is, or the peer is lost."""
        pause_s, longest_s = _RETRY_S
        tried = why == _SILENT
        if tried:
            self._cut(why)
        while not self._over.is_set() and self._lanes[lane.number] is lane:
            try:
                connection = self._redial(self.rank, lane.number)
                if connection is not None:
                    if not self.attach(lane.number, connection):
                        connection[0].close()
                    return
            except RestartError as error:
                self._lost(error)
                return
            except PeerError as error:
                self._lose(f"peer {self.rank} is lost: {why}; {error.message}")
                return
            except UnavailableError as error:
                if tried:  # the first may only have met a peer that is about to begin anew
                    self._cut(error.message)
                tried = True
            if time.monotonic() - self._heard_s > self._timeout_s:
                self._lose(f"peer {self.rank} was silent for {self._timeout_s:g} s")
                return
            self._over.wait(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    def _cut(self, why: str) -> None:
        """Tell, once until it is mended, that nothing comes."""
        with self._lock:
            known, self._cut_s = self._cut_s, self._cut_s or self._heard_s
        if known is None:
            self._on_link(self.rank, why, None)

    def _lane(self, number: int, connection: Connection) -> Lane:
        return Lane(
            number,
            *connection,
            self,
            heartbeat_s=self._heartbeat_s,
            silence_s=SILENT_BEATS * self._heartbeat_s,
            clock=self._clock,
        )

    def _lose(self, why: str) -> None:
        self._lost(PeerError(why, hint="its cluster's agent and its log say why; the job restarts by itself"))

    def _lost(self, error: PeerError) -> None:
        with self._lock:
            known = self._error is not None
        self.fail(error)
        if not known and self.farewell is None:
            self._on_loss(error)


def _why(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return _SILENT
    return (error.strerror or str(error) or type(error).__name__).lower()
