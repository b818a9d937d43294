"""`memory_transports`: an in-process fake of `Transport` for tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from isthmus.comm.transport.receive_any import receive_any
from isthmus.comm.transport.receive_matching import ReceiveMatcher
from isthmus.comm.transport.transport import Arrival, Traffic
from isthmus.core.errors import PeerError
from isthmus.core.process.steady_clock import steady_time_s


class MemoryTransport:
    """One rank of a set of transports that deliver immediately; `kill` simulates a crash."""

    def __init__(self, rank: int, size: int, clock: Callable[[], float]) -> None:
        self.rank, self.size = rank, size
        self._clock = clock
        self._peers: dict[int, MemoryTransport] = {}
        self._matchers = {peer: ReceiveMatcher(peer) for peer in range(size) if peer != rank}
        self._traffic = {peer: Traffic() for peer in self._matchers}
        self._closed_peers: dict[int, PeerError] = {}
        self._lost: PeerError | None = None
        self._loss_callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def send(self, peer: int, tag: int, label: str, payload: memoryview) -> Future[None]:
        """Deliver a copy of `payload` immediately."""
        future: Future[None] = Future()
        if peer in self._closed_peers:
            future.set_exception(self._closed_peers[peer])
            return future
        self._peers[peer]._deliver(self.rank, tag, label, payload)
        self._traffic[peer].sent_bytes += len(payload)
        self._traffic[peer].sent_messages += 1
        future.set_result(None)
        return future

    def receive(self, peer: int, tag: int, label: str, into: memoryview) -> Future[Arrival]:
        """Post a receive for the next message of `tag` from `peer`."""
        return self._matchers[peer].post_receive(tag, label, into)

    def receive_any(self, peers: Sequence[int], tag: int, label: str, into: memoryview) -> Future[tuple[int, Arrival]]:
        """Post a receive for the next message of `tag` from any of `peers`."""
        return receive_any([self._matchers[peer] for peer in peers], tag, label, into)

    def traffic(self) -> dict[int, Traffic]:
        """Return the counters per peer."""
        return dict(self._traffic)

    def loss(self, wait_s: float = 0.0) -> PeerError | None:
        """Return the loss that broke the transport, without waiting: delivery is immediate."""
        del wait_s
        return self._lost

    def add_loss_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` when a loss breaks the transport, or now if one has."""
        self._loss_callbacks.append(callback)
        if self._lost is not None:
            callback()

    def close(self, reason: str = "") -> None:
        """Close towards all peers; a `reason` counts as a loss there."""
        for other in self._peers.values():
            if reason:
                other._lose_peer(self.rank, PeerError(f"peer {self.rank} failed: {reason}"))
            else:
                other._close_peer(self.rank, PeerError(f"peer {self.rank} has closed"))
        for peer in self._matchers:
            self._close_peer(peer, PeerError(f"this rank ({self.rank}) has closed"))

    def kill(self) -> None:
        """Break all connections without CLOSE."""
        for other in self._peers.values():
            other._lose_peer(self.rank, PeerError(f"peer {self.rank} closed its connection"))

    def _deliver(self, source: int, tag: int, label: str, payload: memoryview) -> None:
        with self._lock:
            now_s = self._clock()
            slot = self._matchers[source].begin_message(tag, label, len(payload))
            slot.place(0, len(payload))[:] = payload
            self._traffic[source].received_bytes += len(payload)
            self._traffic[source].received_messages += 1
            self._matchers[source].complete(slot, Arrival(now_s, now_s, now_s, now_s))

    def _close_peer(self, peer: int, error: PeerError) -> None:
        self._closed_peers.setdefault(peer, error)
        self._matchers[peer].fail(error)

    def _lose_peer(self, peer: int, error: PeerError) -> None:
        self._lost = self._lost or error
        self._close_peer(peer, error)
        for other in self._matchers:
            self._close_peer(other, error)
        for wake in self._loss_callbacks:
            wake()


def memory_transports(size: int, clock: Callable[[], float] = steady_time_s) -> list[MemoryTransport]:
    """Return `size` connected transports, one per rank."""
    transports = [MemoryTransport(rank, size, clock) for rank in range(size)]
    for one in transports:
        one._peers = {other.rank: other for other in transports if other is not one}
    return transports
