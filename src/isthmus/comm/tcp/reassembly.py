"""`Inbox`: reassembles one peer's messages, exactly once, from fragments of several connections."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from isthmus.comm.tcp.wire_format import Head
from isthmus.comm.transport.receive_matching import Mailbox, Slot
from isthmus.comm.transport.transport import Arrival

ROOM_S = 1.0
"""How often a connection that waits for receive space checks whether it is still alive."""


@dataclass(eq=False)
class _Arriving:
    """A partially received message: per offset the connection that reads it, and the offsets received."""

    slot: Slot
    missing: int
    reading: dict[int, object] = field(default_factory=dict)
    there: set[int] = field(default_factory=set)


class Inbox:
    """Reassembles the fragments of one peer's messages into its `Mailbox`. Thread-safe.

    A fragment is resent after its connection broke, so duplicates are discarded. `cut(connection)` shuts
    down a connection that still reads a fragment which another one begins to deliver: only one may write
    a buffer.
    """

    def __init__(self, mailbox: Mailbox, cut: Callable[[Any], None]) -> None:
        self._mailbox, self._cut = mailbox, cut
        self._changed = threading.Condition()
        self._arriving: dict[int, _Arriving] = {}
        self._whole: set[int] = set()
        self._all_below = 0

    def begin(self, head: Head, lane: object, ended: Callable[[], bool]) -> memoryview | None:
        """Return the buffer for the fragment of `head`; None for a duplicate or once `ended()` is true.

        Blocks while too many received bytes wait for a receive call. Raises `ValueError` for a message length
        that contradicts an earlier fragment.
        """
        while not self._known(head.number) and not self._mailbox.wait_for_room(ROOM_S):
            if ended():
                return None
        with self._changed:
            if self._is_whole(head.number):
                return None
            partial = self._arriving.get(head.number)
            if partial is None:
                message = self._mailbox.open(head.tag, head.label, head.num_bytes)
                partial = self._arriving[head.number] = _Arriving(message, head.num_bytes)
            if head.num_bytes != len(partial.slot.buffer):
                raise ValueError(
                    f"message {head.number} has {len(partial.slot.buffer)} bytes, not {head.num_bytes}"
                )
            while head.offset in partial.reading:
                self._cut(partial.reading[head.offset])
                self._changed.wait()
            if head.offset in partial.there:
                return None
            partial.reading[head.offset] = lane
            return partial.slot.buffer[head.offset : head.offset + head.size]

    def end(self, head: Head, arrival: Arrival | None) -> bool:
        """Record a fragment, failed if `arrival` is None; return True if its message is now complete."""
        with self._changed:
            partial = self._arriving[head.number]
            del partial.reading[head.offset]
            self._changed.notify_all()
            if arrival is None:
                return False
            partial.there.add(head.offset)
            partial.missing -= head.size
            if partial.missing > 0:
                return False
            del self._arriving[head.number]
            self._whole.add(head.number)
            while self._all_below in self._whole:
                self._whole.remove(self._all_below)
                self._all_below += 1
        self._mailbox.complete(partial.slot, arrival)
        return True

    def _known(self, number: int) -> bool:
        with self._changed:
            return number in self._arriving or self._is_whole(number)

    def _is_whole(self, number: int) -> bool:
        return number < self._all_below or number in self._whole

    def has(self, number: int) -> bool:
        """Return whether message `number` is complete."""
        with self._changed:
            return self._is_whole(number)
