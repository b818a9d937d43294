"""`memory_transports`: the fake of the transport seam, for tests: ranks of one process, no network."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from isthmus.comm.transport.receive_matching import Mailbox
from isthmus.comm.transport.transport import Arrival, Traffic
from isthmus.core.errors import PeerError


class MemoryTransport:
    """One rank of a set of transports that hand messages over at once. `kill` ends it as a crash would."""

    def __init__(self, rank: int, size: int, clock: Callable[[], float]) -> None:
        self.rank, self.size = rank, size
        self._clock = clock
        self._others: dict[int, MemoryTransport] = {}
        self._mailboxes = {peer: Mailbox(peer) for peer in range(size) if peer != rank}
        self._traffic = {peer: Traffic() for peer in self._mailboxes}
        self._gone: dict[int, PeerError] = {}
        self._lost: PeerError | None = None
        self._wakes: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def send(self, peer: int, tag: int, label: str, payload: memoryview) -> Future[None]:
        """Hand a copy of `payload` over at once."""
        future: Future[None] = Future()
        if peer in self._gone:
            future.set_exception(self._gone[peer])
            return future
        self._others[peer]._deliver(self.rank, tag, label, payload)
        self._traffic[peer].sent_bytes += len(payload)
        self._traffic[peer].sent_messages += 1
        future.set_result(None)
        return future

    def receive(self, peer: int, tag: int, label: str, into: memoryview) -> Future[Arrival]:
        """Ask for the next message of `tag`."""
        return self._mailboxes[peer].ask(tag, label, into)

    def traffic(self) -> dict[int, Traffic]:
        """Return the counters per peer."""
        return dict(self._traffic)

    def loss(self, wait_s: float = 0.0) -> PeerError | None:
        """Return the loss that broke the transport; nothing here takes time, so nothing is waited for."""
        del wait_s
        return self._lost

    def when_lost(self, wake: Callable[[], None]) -> None:
        """Call `wake` once a loss has broken the transport."""
        self._wakes.append(wake)
        if self._lost is not None:
            wake()

    def close(self, reason: str = "") -> None:
        """Take leave of all peers."""
        for other in self._others.values():
            if reason:
                other._lose(self.rank, PeerError(f"peer {self.rank} gave up: {reason}"))
            else:
                other._part(self.rank, PeerError(f"peer {self.rank} has ended"))
        for peer in self._mailboxes:
            self._part(peer, PeerError(f"this rank ({self.rank}) has closed"))

    def kill(self) -> None:
        """Vanish without a word."""
        for other in self._others.values():
            other._lose(self.rank, PeerError(f"peer {self.rank} closed its connection"))

    def _deliver(self, source: int, tag: int, label: str, payload: memoryview) -> None:
        with self._lock:
            now_s = self._clock()
            slot = self._mailboxes[source].open(tag, label, len(payload))
            slot.buffer[:] = payload
            self._traffic[source].received_bytes += len(payload)
            self._traffic[source].received_messages += 1
            self._mailboxes[source].complete(slot, Arrival(now_s, now_s))

    def _part(self, peer: int, error: PeerError) -> None:
        self._gone.setdefault(peer, error)
        self._mailboxes[peer].fail(error)

    def _lose(self, peer: int, error: PeerError) -> None:
        self._lost = self._lost or error
        self._part(peer, error)
        for other in self._mailboxes:
            self._part(other, error)
        for wake in self._wakes:
            wake()


def memory_transports(size: int, clock: Callable[[], float] = time.time) -> list[MemoryTransport]:
    """Return `size` transports joined to each other, one per rank."""
    transports = [MemoryTransport(rank, size, clock) for rank in range(size)]
    for one in transports:
        one._others = {other.rank: other for other in transports if other is not one}
    return transports
