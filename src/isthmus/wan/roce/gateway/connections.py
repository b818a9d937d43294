"""`Connections`: queue pairs that connection management (CM) messages set up, as a gateway sees them pass.

Source: the report on cross-domain pooling, 4.2.4, step 1. A REQ and its REP name what no other header does: the queue
pairs of both ends, their first packet sequence numbers, and the path MTU. The messages themselves pass on unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.wan.roce.cm_message import CmKind, CmMessage, parse_cm
from isthmus.wan.roce.roce_view import FlowKey, RoceView, swap_ends


@dataclass(frozen=True, slots=True)
class NewDirection:
    """One direction of a queue pair before its first packet."""

    key: FlowKey
    sender: int
    """The sender's queue pair."""
    first_psn: int
    mtu_bytes: int

    @property
    def back(self) -> FlowKey:
        """The key of the other direction."""
        return swap_ends(self.key[0]), self.sender


class Connections:
    """What was set up and is not in use yet; `most` bounds it, the oldest goes first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._asked: dict[tuple[bytes, int], CmMessage] = {}
        self._answered: set[tuple[bytes, int]] = set()
        self._new: dict[FlowKey, NewDirection] = {}

    def __len__(self) -> int:
        return len(self._asked) + len(self._new)

    def note(self, view: RoceView) -> tuple[NewDirection, NewDirection] | None:
        """Note a message; return a queue pair that is set up now: the direction of the REQ's sender, and the other."""
        message = parse_cm(view)
        if message is None:
            return None
        own, other = (view.ends, message.local_id), (swap_ends(view.ends), message.remote_id)
        if message.kind is CmKind.REQ:
            if self._asked.get(own) != message:  # else it is sent once more
                self._forget(own)
                self._asked[own] = message
                if len(self._asked) > self._most:
                    self._forget(next(iter(self._asked)))
        elif message.kind is CmKind.REP:
            asked = self._asked.get(other)
            if asked is not None and other not in self._answered:
                self._answered.add(other)
                return self._set_up(asked, message, view.ends)
        elif message.kind in (CmKind.REJ, CmKind.DREP):
            self._forget(own)
            self._forget(other)
        return None

    def take(self, key: FlowKey) -> NewDirection | None:
        """Return what was set up for a direction, once: with its first packet."""
        return self._new.pop(key, None)

    def _set_up(self, asked: CmMessage, answer: CmMessage, ends: bytes) -> tuple[NewDirection, NewDirection]:
        there = NewDirection((swap_ends(ends), answer.queue_pair), asked.queue_pair, asked.first_psn, asked.mtu_bytes)
        back = NewDirection((ends, asked.queue_pair), answer.queue_pair, answer.first_psn, asked.mtu_bytes)
        for one in (there, back):
            self._new.pop(one.key, None)
            self._new[one.key] = one
            if len(self._new) > self._most:
                del self._new[next(iter(self._new))]
        return there, back

    def _forget(self, name: tuple[bytes, int]) -> None:
        self._asked.pop(name, None)
        self._answered.discard(name)
