"""`Transport`: the interface between process group and network: tagged messages, in order per tag."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol

from isthmus.core.errors import PeerError


@dataclass(frozen=True)
class Arrival:
    """The times of a received message: epoch seconds on the receiver's clock, in this order."""

    sent_s: float
    """When the sender passed it to the transport."""
    first_left_s: float
    """When a connection began to write its first fragment."""
    last_left_s: float
    """When a connection began to write its last fragment."""
    arrived_s: float
    """When its last byte was received."""
    clock_offset_s: float = 0.0
    """The sender's clock minus the receiver's, as estimated."""

    def merged_with(self, other: Arrival) -> Arrival:
        """Return the times of a message of which `self` and `other` are fragments."""
        return replace(
            self,
            first_left_s=min(self.first_left_s, other.first_left_s),
            last_left_s=max(self.last_left_s, other.last_left_s),
            arrived_s=max(self.arrived_s, other.arrived_s),
        )

    @property
    def transfer_s(self) -> float:
        """Transfer time, including the sender's queue."""
        return max(self.arrived_s - self.sent_s, 0.0)


@dataclass
class Traffic:
    """Counters for one peer: payload bytes and messages."""

    sent_bytes: int = 0
    received_bytes: int = 0
    sent_messages: int = 0
    received_messages: int = 0
    last_transfer_s: float = 0.0
    """Transfer time of the last received message."""


class Transport(Protocol):
    """Moves messages between the ranks `0 .. size-1` of one run.

    A message has a `tag` (signed 64 bits) and a `label` (its type, such as `float32[2,8]`; at most 255
    bytes). Between two ranks, messages of one tag arrive in order; different tags are independent.
    Futures fail with `PeerError`. The loss of any peer breaks the transport for all peers.
    """

    rank: int
    size: int

    def send(self, peer: int, tag: int, label: str, payload: memoryview) -> Future[None]:
        """Queue `payload`, which must not change until the future is done; blocks while the queue is full."""
        ...

    def receive(self, peer: int, tag: int, label: str, into: memoryview) -> Future[Arrival]:
        """Post a receive for the next message of `tag`; another label or length fails the future."""
        ...

    def receive_any(self, peers: Sequence[int], tag: int, label: str, into: memoryview) -> Future[tuple[int, Arrival]]:
        """Post a receive for the next message of `tag` from any of `peers`; the future has its sender too.

        It fails when all of them have closed, and opens no connection: that is left to the sender.
        """
        ...

    def traffic(self) -> dict[int, Traffic]:
        """Return the counters per peer."""
        ...

    def loss(self, wait_s: float = 0.0) -> PeerError | None:
        """Return the loss that broke the transport, waiting up to `wait_s` for one; None if it is intact."""
        ...

    def add_loss_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback`, from any thread, when a loss breaks the transport; immediately if one has."""
        ...

    def close(self, reason: str = "") -> None:
        """Send queued messages, exchange CLOSE, stop all threads; `reason` tells peers of a failure."""
        ...


class JoinedTransport(Transport, Protocol):
    """A transport whose ranks can reconnect as a later incarnation of the group."""

    def unclosed_peers(self) -> list[int]:
        """Return, after `close`, the ranks that sent no CLOSE."""
        ...

    def abort(self) -> None:
        """Break all connections without CLOSE, like a killed rank; pending messages fail."""
        ...
