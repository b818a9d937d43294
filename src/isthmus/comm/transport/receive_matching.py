"""`ReceiveMatcher`: matches messages from one peer with posted receives, first in first out per tag."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from isthmus.comm.transport.transport import Arrival
from isthmus.core.errors import PeerError

MAX_MESSAGE_BYTES = 2**30
"""Longest message that may arrive before its receive, unless the run states its own bound."""
MAX_UNCLAIMED = 65_536
"""Most messages of a peer without a receive: each costs memory, however short it is."""


class Request(Protocol):
    """A posted receive: the expected label and the destination."""

    label: str
    into: memoryview

    def claim(self, peer: int) -> bool:
        """Return whether a message of `peer` may serve this receive, which no other one does from then on."""
        ...

    def complete(self, peer: int, arrival: Arrival) -> None:
        """Finish with the message of `peer`, which has filled the destination."""
        ...

    def fail(self, peer: int, error: PeerError) -> None:
        """Take `peer` as unable to serve this receive."""
        ...


@dataclass(eq=False)
class IncomingMessage:
    """An incoming message: the reader fills `buffer`, then calls `ReceiveMatcher.complete`.

    A message that does not fit its receive has no buffer: its bytes are read and dropped.
    """

    tag: int
    label: str
    num_bytes: int
    buffer: memoryview | None
    request: Request | None = None
    """The matching receive, once posted."""
    arrival: Arrival | None = None
    """Set when the message is complete."""

    def place(self, offset: int, num_bytes: int) -> memoryview:
        """Return the memory for `num_bytes` from `offset` on."""
        if self.buffer is None:
            return memoryview(bytearray(num_bytes))
        return self.buffer[offset : offset + num_bytes]


@dataclass(eq=False)
class _ReceiveRequest:
    """A `Request` of one peer, and the future of its completion."""

    label: str
    into: memoryview
    future: Future[Arrival] = field(default_factory=Future)

    def claim(self, peer: int) -> bool:
        """Return True: the receive is posted at one peer only."""
        del peer
        return True

    def complete(self, peer: int, arrival: Arrival) -> None:
        """Complete the future."""
        del peer
        self.future.set_result(arrival)

    def fail(self, peer: int, error: PeerError) -> None:
        """Fail the future."""
        del peer
        self.future.set_exception(error)


_Item = TypeVar("_Item", IncomingMessage, Request)


class ReceiveMatcher:
    """Unclaimed messages of one peer, and posted receives without a message. Thread-safe.

    A message whose receive is already posted is read directly into the receiver's memory. Above
    `max_unclaimed_bytes`, `wait_for_space` blocks the network reader unless a receive is posted, which may
    match a later message. A message arrives between `begin_message` and `complete` (or `fail`); several may arrive
    concurrently, but only one per tag.
    """

    def __init__(
        self, peer: int, max_unclaimed_bytes: int = 256 * 2**20, max_message_bytes: int = MAX_MESSAGE_BYTES
    ) -> None:
        self.peer = peer
        self._max_unclaimed_bytes, self._max_message_bytes = max_unclaimed_bytes, max_message_bytes
        self._changed = threading.Condition()
        self._requests: dict[int, deque[Request]] = defaultdict(deque)
        self._unclaimed: dict[int, deque[IncomingMessage]] = defaultdict(deque)
        self._unclaimed_bytes = self._num_unclaimed = 0
        self._arriving: set[IncomingMessage] = set()
        self._error: PeerError | None = None

    def post_receive(self, tag: int, label: str, into: memoryview) -> Future[Arrival]:
        """Post a receive of the next message of `tag` into `into`."""
        request = _ReceiveRequest(label, into)
        self.post(tag, request)
        return request.future

    def post(self, tag: int, request: Request) -> None:
        """Post `request` for the next message of `tag`."""
        slot, error = None, None
        with self._changed:
            if tag in self._unclaimed:
                if not request.claim(self.peer):
                    return
                slot = _pop_first(self._unclaimed, tag)
            if slot is not None:
                self._unclaimed_bytes -= slot.num_bytes
                self._num_unclaimed -= 1
                slot.request = request
            elif self._error is None:
                self._requests[tag].append(request)
            else:
                error = self._error
            self._changed.notify_all()
        if error is not None:
            request.fail(self.peer, error)
        elif slot is not None and slot.arrival is not None:
            self._deliver(slot)

    def withdraw(self, request: Request) -> None:
        """Forget `request`, which another peer serves."""
        with self._changed:
            for tag in [tag for tag, waiting in self._requests.items() if request in waiting]:
                self._requests[tag].remove(request)
                if not self._requests[tag]:
                    del self._requests[tag]

    def begin_message(self, tag: int, label: str, num_bytes: int) -> IncomingMessage:
        """Return the slot for a message that begins to arrive.

        Raises `ValueError`, before any memory is taken, for one without a receive that is above
        `max_message_bytes`, or beyond `MAX_UNCLAIMED`.
        """
        with self._changed:
            request = self._claimed_request(tag)
            if request is None and num_bytes > self._max_message_bytes:
                raise ValueError(
                    f"a message of {num_bytes} bytes, where at most {self._max_message_bytes} are expected"
                )
            if request is None and self._num_unclaimed >= MAX_UNCLAIMED:
                raise ValueError(f"more than {MAX_UNCLAIMED} messages without a receive")
            if request is None:
                slot = IncomingMessage(tag, label, num_bytes, _allocate(num_bytes))
            else:
                fits = request.label == label and len(request.into) == num_bytes
                slot = IncomingMessage(tag, label, num_bytes, request.into if fits else None, request)
            if request is None:
                self._unclaimed[tag].append(slot)
                self._unclaimed_bytes += num_bytes
                self._num_unclaimed += 1
            self._arriving.add(slot)
            return slot

    def complete(self, message: IncomingMessage, arrival: Arrival) -> None:
        """Mark the message as complete; ignored after `fail`."""
        with self._changed:
            if message not in self._arriving:
                return
            message.arrival = arrival
            self._arriving.remove(message)
            claimed = message.request is not None
        if claimed:
            self._deliver(message)

    def fail(self, error: PeerError) -> None:
        """Fail every posted and future receive without a complete message; the first error is kept."""
        with self._changed:
            self._error = self._error or error
            waiting = [request for requests in self._requests.values() for request in requests]
            self._requests.clear()
            for cut_off in self._arriving:
                if cut_off.request is not None:
                    waiting.append(cut_off.request)
                    continue
                self._unclaimed[cut_off.tag].pop()  # the arriving message is the last of its tag
                if not self._unclaimed[cut_off.tag]:
                    del self._unclaimed[cut_off.tag]
                self._unclaimed_bytes -= cut_off.num_bytes
                self._num_unclaimed -= 1
            self._arriving.clear()
            self._changed.notify_all()
        for request in waiting:
            request.fail(self.peer, self._error)

    @property
    def num_tags(self) -> int:
        """Tags with a posted receive or an unclaimed message."""
        return len(self._requests) + len(self._unclaimed)

    @property
    def unclaimed_bytes(self) -> int:
        """Bytes of the messages without a receive."""
        return self._unclaimed_bytes

    def wait_for_space(self, timeout_s: float) -> bool:
        """Block while too much is unclaimed and no receive is posted; return False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(self._has_space, timeout_s)

    def _claimed_request(self, tag: int) -> Request | None:
        """Pop the first receive of `tag` that no other peer serves; the lock is held."""
        while (request := _pop_first(self._requests, tag)) is not None:
            if request.claim(self.peer):
                return request
        return None

    def _has_space(self) -> bool:
        return self._unclaimed_bytes <= self._max_unclaimed_bytes or bool(self._requests) or self._error is not None

    def _deliver(self, message: IncomingMessage) -> None:
        request, arrival = message.request, message.arrival
        if request is None or arrival is None:
            raise ValueError("a message can be delivered only when it is complete and claimed")
        if message.buffer is None or request.label != message.label or len(request.into) != message.num_bytes:
            sent, wanted = message.label, request.label
            error = PeerError(f"peer {self.peer} sent {sent} where {wanted} was expected (tag {message.tag})")
            request.fail(self.peer, error)
            return
        if request.into is not message.buffer:
            request.into[:] = message.buffer
        request.complete(self.peer, arrival)


def _pop_first(queues: dict[int, deque[_Item]], tag: int) -> _Item | None:
    """Pop the first entry of a tag; delete the empty queue, since most tags are used once."""
    waiting = queues.get(tag)
    if waiting is None:
        return None
    first = waiting.popleft()
    if not waiting:
        del queues[tag]
    return first


def _allocate(num_bytes: int) -> memoryview:
    return memoryview(bytearray(num_bytes))
