"""`receive_any`: a receive of the next message of a tag, whichever of several peers sends it."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future

from isthmus.comm.transport.receive_matching import ReceiveMatcher
from isthmus.comm.transport.transport import Arrival
from isthmus.core.errors import PeerError


class _AnyRequest:
    """A `Request` posted at several matchers, of which the first that has a message takes it."""

    def __init__(self, label: str, into: memoryview, matchers: Iterable[ReceiveMatcher]) -> None:
        self.label, self.into = label, into
        self.future: Future[tuple[int, Arrival]] = Future()
        self._matchers = {one.peer: one for one in matchers}
        self._able = set(self._matchers)
        self._source: int | None = None
        self._lock = threading.Lock()

    def claim(self, peer: int) -> bool:
        """Let `peer` serve this receive; return False if another one does."""
        with self._lock:
            if self._source is None:
                self._source = peer
            return self._source == peer

    def complete(self, peer: int, arrival: Arrival) -> None:
        """Finish with the message of `peer`, which has claimed the receive."""
        self._withdraw(peer)
        self.future.set_result((peer, arrival))

    def fail(self, peer: int, error: PeerError) -> None:
        """Fail if `peer` has claimed the receive, or if no other peer can send any more."""
        with self._lock:
            self._able.discard(peer)
            fails = self._source == peer or (self._source is None and not self._able)
            self._source = peer if fails else self._source
        if fails:
            self._withdraw(peer)
            self.future.set_exception(error)

    def post(self, tag: int) -> None:
        """Post this receive at all matchers, or until one has taken it."""
        for one in self._matchers.values():
            if self._source is None:
                one.post(tag, self)
        if self._source is not None:  # its message may have come before this was posted at the last one
            self._withdraw(self._source)

    def _withdraw(self, source: int) -> None:
        for peer, one in self._matchers.items():
            if peer != source:
                one.withdraw(self)


def receive_any(
    matchers: Iterable[ReceiveMatcher], tag: int, label: str, into: memoryview
) -> Future[tuple[int, Arrival]]:
    """Receive the next message of `tag` at any of `matchers` into `into`; the future has the rank of its sender.

    Peers that have closed are passed over; it fails when all have, with the error of the last one.
    """
    request = _AnyRequest(label, into, matchers)
    request.post(tag)
    return request.future
