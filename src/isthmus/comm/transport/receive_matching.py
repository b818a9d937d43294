"""`Mailbox`: matches what arrives from one peer with the receives asked of it, first in first out per tag."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from isthmus.comm.transport.transport import Arrival
from isthmus.core.errors import PeerError


@dataclass(eq=False)
class Slot:
    """Where one arriving message goes: `buffer` is written by the reader, then `Mailbox.complete` called."""

    tag: int
    label: str
    buffer: memoryview
    claim: Request | None = None
    arrival: Arrival | None = None


@dataclass(eq=False)
class Request:
    """One receive: the message expected, the memory it goes to, and the future that tells of it."""

    label: str
    into: memoryview
    future: Future[Arrival] = field(default_factory=Future)


_Item = TypeVar("_Item", Slot, Request)


class Mailbox:
    """The messages of one peer that nobody asked for yet, and the receives that nothing has come for yet.

    Thread-safe. A message whose receive is already there is read straight into the receiver's memory.
    `max_unclaimed_bytes` bounds what is kept unasked for; `wait_for_room` holds the reader of the network
    back beyond it, unless a receive is waiting (which may be for a message further behind). A message arrives
    between its `open` and `complete` (or `fail`); several may at once, but no two of one tag.
    """

    def __init__(self, peer: int, max_unclaimed_bytes: int = 256 * 2**20) -> None:
        self._peer = peer
        self._max_unclaimed_bytes = max_unclaimed_bytes
        self._changed = threading.Condition()
        self._requests: dict[int, deque[Request]] = defaultdict(deque)
        self._unclaimed: dict[int, deque[Slot]] = defaultdict(deque)
        self._unclaimed_bytes = 0
        self._arriving: set[Slot] = set()
        self._error: PeerError | None = None

    def ask(self, tag: int, label: str, into: memoryview) -> Future[Arrival]:
        """Ask for the next message of `tag`, to be put into `into`."""
        request = Request(label, into)
        with self._changed:
            slot = _take(self._unclaimed, tag)
            if slot is not None:
                self._unclaimed_bytes -= len(slot.buffer)
                slot.claim = request
                done = slot.arrival is not None
            elif self._error is not None:
                request.future.set_exception(self._error)
                return request.future
            else:
                self._requests[tag].append(request)
                done = False
            self._changed.notify_all()
        if done and slot is not None:
            self._hand_over(slot)
        return request.future

    def open(self, tag: int, label: str, num_bytes: int) -> Slot:
        """Say where the payload of a message that has begun to arrive goes."""
        with self._changed:
            request = self._requests[tag][0] if tag in self._requests else None
            if request is not None and request.label == label and len(request.into) == num_bytes:
                slot = Slot(tag, label, request.into, claim=request)
            else:
                slot = Slot(tag, label, _scratch(num_bytes), claim=request)
            if request is None:
                self._unclaimed[tag].append(slot)
                self._unclaimed_bytes += num_bytes
            else:
                _take(self._requests, tag)
            self._arriving.add(slot)
            return slot

    def complete(self, slot: Slot, arrival: Arrival) -> None:
        """Say that the payload is whole; nothing happens where `fail` has meanwhile given it up."""
        with self._changed:
            if slot not in self._arriving:
                return
            slot.arrival = arrival
            self._arriving.remove(slot)
            claimed = slot.claim is not None
        if claimed:
            self._hand_over(slot)

    def fail(self, error: PeerError) -> None:
        """Fail every receive that nothing has arrived for, now and from now on; the first error is kept."""
        with self._changed:
            self._error = self._error or error
            waiting = [request for requests in self._requests.values() for request in requests]
            self._requests.clear()
            for cut_off in self._arriving:
                if cut_off.claim is not None:
                    waiting.append(cut_off.claim)
                    continue
                self._unclaimed[cut_off.tag].pop()  # of its tag, what arrives came last
                if not self._unclaimed[cut_off.tag]:
                    del self._unclaimed[cut_off.tag]
                self._unclaimed_bytes -= len(cut_off.buffer)
            self._arriving.clear()
            self._changed.notify_all()
        for request in waiting:
            request.future.set_exception(self._error)

    def wait_for_room(self, timeout_s: float) -> bool:
        """Block while too much is unclaimed and nobody waits; False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(self._has_room, timeout_s)

    def _has_room(self) -> bool:
        return (
            self._unclaimed_bytes <= self._max_unclaimed_bytes
            or bool(self._requests)
            or self._error is not None
        )

    def _hand_over(self, slot: Slot) -> None:
        request, arrival = slot.claim, slot.arrival
        if request is None or arrival is None:
            raise ValueError("a message is handed over once it is whole and asked for")
        if request.label != slot.label or len(request.into) != len(slot.buffer):
            sent, wanted = slot.label, request.label
            error = PeerError(f"peer {self._peer} sent {sent} where {wanted} was expected (tag {slot.tag})")
            request.future.set_exception(error)
            return
        if request.into is not slot.buffer:
            request.into[:] = slot.buffer
        request.future.set_result(arrival)


def _take(queues: dict[int, deque[_Item]], tag: int) -> _Item | None:
    """Take the first of a tag, and with the last one the queue: tags are many and most are used once."""
    waiting = queues.get(tag)
    if waiting is None:
        return None
    first = waiting.popleft()
    if not waiting:
        del queues[tag]
    return first


def _scratch(num_bytes: int) -> memoryview:
    return memoryview(bytearray(num_bytes))
