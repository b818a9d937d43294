"""`Transport`: the seam between process group and network: tagged bytes, rank to rank, in order per tag."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from isthmus.core.errors import PeerError


@dataclass(frozen=True)
class Arrival:
    """When a message was sent and when it had arrived whole: epoch seconds on the receiver's clock."""

    sent_s: float
    arrived_s: float

    @property
    def transfer_s(self) -> float:
        """Time under way, queueing at the sender included."""
        return max(self.arrived_s - self.sent_s, 0.0)


@dataclass
class Traffic:
    """What went to and came from one peer: payload bytes and messages."""

    sent_bytes: int = 0
    received_bytes: int = 0
    sent_messages: int = 0
    received_messages: int = 0
    last_transfer_s: float = 0.0


class Transport(Protocol):
    """Moves messages between the ranks `0 .. size-1` of one run.

    A message has a `tag` (signed 64 bits) and a `label` (what it is: `float32[2,8]`; at most 255 bytes).
    Between two ranks messages of one tag arrive in order; different tags are independent. Errors are set on
    the futures, as `PeerError`: the loss of any peer without notice breaks the transport for all of them.
    """

    rank: int
    size: int

    def send(self, peer: int, tag: int, label: str, payload: memoryview) -> Future[None]:
        """Queue `payload`, unchanged until the future is done; blocks only while the queue is full."""
        ...

    def receive(self, peer: int, tag: int, label: str, into: memoryview) -> Future[Arrival]:
        """Ask for the next message of `tag`; one of another label or length fails the future."""
        ...

    def traffic(self) -> dict[int, Traffic]:
        """Return the counters per peer."""
        ...

    def loss(self, wait_s: float = 0.0) -> PeerError | None:
        """Return the loss that broke the transport, waiting up to `wait_s` for one; None if it is whole."""
        ...

    def when_lost(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from any thread, once a loss has broken the transport: now, if it has."""
        ...

    def close(self, reason: str = "") -> None:
        """Send what is queued, take leave, stop all threads; a `reason` tells peers that the run failed."""
        ...


class JoinedTransport(Transport, Protocol):
    """A transport of ranks that have met, and may meet anew as a later incarnation of their group."""

    def stragglers(self) -> list[int]:
        """Return the ranks that have not taken leave, after `close`."""
        ...

    def abandon(self) -> None:
        """Cut all connections without a word, as a rank that is killed; what is under way fails."""
        ...
