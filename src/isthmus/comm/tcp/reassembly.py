"""`Inbox`: puts the messages of one peer together again from pieces that come by several lanes, each once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from isthmus.comm.tcp.wire_format import Head
from isthmus.comm.transport.receive_matching import Mailbox, Slot
from isthmus.comm.transport.transport import Arrival

ROOM_S = 1.0
"""How often a lane that waits for room in the mailbox looks whether it is still needed."""


@dataclass(eq=False)
class _Arriving:
    """A message of which some pieces are there: those that are being read, by whom, and those that were."""

    slot: Slot
    missing: int
    reading: dict[int, object] = field(default_factory=dict)
    there: set[int] = field(default_factory=set)


class Inbox:
    """The pieces of one peer's messages on their way into its mailbox. Thread-safe.

    A piece may come again, after the lane that brought it broke. A message is whole once; a piece of a whole
    one, or one that is there, is read into nowhere. `cut(lane)` is asked to end a lane that still reads what
    another one has begun to bring: two may not write into one place.
    """

    def __init__(self, mailbox: Mailbox, cut: Callable[[Any], None]) -> None:
        self._mailbox, self._cut = mailbox, cut
        self._changed = threading.Condition()
        self._arriving: dict[int, _Arriving] = {}
        self._whole: set[int] = set()
        self._all_below = 0

    def begin(self, head: Head, lane: object, ended: Callable[[], bool]) -> memoryview | None:
        """Return where the piece `head` tells of goes, None where it is not needed or the lane has `ended`.

        Blocks while the mailbox is full of messages that nobody has asked for.
        """
        while not self._known(head.number) and not self._mailbox.wait_for_room(ROOM_S):
            if ended():
                return None
        with self._changed:
            if self._is_whole(head.number):
                return None
            one = self._arriving.get(head.number)
            if one is None:
                slot = self._mailbox.open(head.tag, head.label, head.num_bytes)
                one = self._arriving[head.number] = _Arriving(slot, head.num_bytes)
            if head.num_bytes != len(one.slot.buffer):
                raise ValueError(
                    f"message {head.number} has {len(one.slot.buffer)} bytes, not {head.num_bytes}"
                )
            while head.offset in one.reading:
                self._cut(one.reading[head.offset])
                self._changed.wait()
            if head.offset in one.there:
                return None
            one.reading[head.offset] = lane
            return one.slot.buffer[head.offset : head.offset + head.size]

    def end(self, head: Head, arrival: Arrival | None) -> bool:
        """Say that the piece is there (`arrival`) or will not come (None); True once its message is whole."""
        with self._changed:
            one = self._arriving[head.number]
            del one.reading[head.offset]
            self._changed.notify_all()
            if arrival is None:
                return False
            one.there.add(head.offset)
            one.missing -= head.size
            if one.missing > 0:
                return False
            del self._arriving[head.number]
            self._whole.add(head.number)
            while self._all_below in self._whole:
                self._whole.remove(self._all_below)
                self._all_below += 1
        self._mailbox.complete(one.slot, arrival)
        return True

    def _known(self, number: int) -> bool:
        with self._changed:
            return number in self._arriving or self._is_whole(number)

    def _is_whole(self, number: int) -> bool:
        return number < self._all_below or number in self._whole

    def has(self, number: int) -> bool:
        """Tell whether message `number` is whole."""
        with self._changed:
            return self._is_whole(number)
