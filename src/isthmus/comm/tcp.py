"""`TcpTransport`: every worker connected to every other by TCP, each connection with its two threads."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from isthmus.comm.frame import Greeting
from isthmus.comm.peer import Peer
from isthmus.comm.transport import Arrival, Traffic
from isthmus.core.errors import PeerError

LINGER_S = 5.0
"""How long an orderly end waits for what is queued; a failing one waits a fifth of it."""


class TcpTransport:
    """A `Transport` over one connection per pair of ranks; the higher rank of a pair dials the lower."""

    def __init__(
        self,
        greeting: Greeting,
        connections: Mapping[int, tuple[socket.socket, float]],
        *,
        heartbeat_s: float = 2.0,
        peer_timeout_s: float = 30.0,
        on_loss: Callable[[PeerError], None] = lambda _: None,
    ) -> None:
        self.rank, self.size = greeting.rank, greeting.size
        self._on_loss = on_loss
        self._lock = threading.Lock()
        self._lost: PeerError | None = None
        self._broken = threading.Event()
        self._closed = False
        self._peers = {
            rank: Peer(
                rank,
                connection,
                offset_s,
                heartbeat_s=heartbeat_s,
                timeout_s=peer_timeout_s,
                on_loss=self._lose,
            )
            for rank, (connection, offset_s) in connections.items()
        }
        for peer in self._peers.values():
            peer.start()

    def send(self, peer: int, tag: int, label: str, payload: memoryview) -> Future[None]:
        """Queue `payload` for `peer`."""
        return self._peers[peer].send(tag, label, payload)

    def receive(self, peer: int, tag: int, label: str, into: memoryview) -> Future[Arrival]:
        """Ask `peer` for the next message of `tag`."""
        return self._peers[peer].mailbox.ask(tag, label, into)

    def traffic(self) -> dict[int, Traffic]:
        """Return the counters per peer."""
        return {rank: peer.traffic for rank, peer in self._peers.items()}

    def loss(self, wait_s: float = 0.0) -> PeerError | None:
        """Return the loss that broke the transport, waiting up to `wait_s` for one; None if it is whole."""
        self._broken.wait(wait_s)
        return self._lost

    def close(self, reason: str = "") -> None:
        """Send what is queued, take leave, end all threads; silent peers cost `LINGER_S` at most."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        linger_s = LINGER_S / 5 if reason or self._lost else LINGER_S
        deadline_s = time.monotonic() + linger_s
        for peer in self._peers.values():
            peer.leave(reason)
        for peer in self._peers.values():
            peer.join(max(deadline_s - time.monotonic(), 0.0))

    def _lose(self, error: PeerError) -> None:
        with self._lock:
            if self._lost is not None or self._closed:
                return
            self._lost = error
            self._broken.set()
        for peer in self._peers.values():
            peer.fail(error)
        self._on_loss(error)
