"""`NearResponder`: what a gateway answers the NIC of its site in the name of the far one.

Source: the report on cross-domain pooling, 4.2.4 (pseudo acknowledgements); InfiniBand Architecture Specification,
volume 1, 9.7.5: an acknowledgement covers all requests before its number, a READ by its response only, and carries the
number of messages that the responder has completed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from isthmus.wan.roce.near_replies import ACK, NAK_OPERATION, NAK_SEQUENCE, RNR_FIRST, ReplyTemplate
from isthmus.wan.roce.request_order import MESSAGE_ENDS, READS_AND_ATOMICS
from isthmus.wan.roce.roce_opcodes import PSN_SPAN, Opcode, psn_distance
from isthmus.wan.roce.roce_view import RoceView

ACK_PACKETS = 16
"""Packets after which an acknowledgement is sent that none of them asks for."""

_MAX_UNKNOWN = 2**16
"""Messages that are remembered until the responder's count is known."""

_MAX_HISTORY = 64
"""Messages that are remembered afterwards."""

_LAST_RESPONSES = frozenset({Opcode.READ_RESPONSE_LAST, Opcode.READ_RESPONSE_ONLY, Opcode.ATOMIC_ACKNOWLEDGE})


@dataclass(slots=True)
class _Waiting:
    """A READ or atomic whose response has not come, and the last SEND or WRITE after it."""

    last_psn: int
    latest: tuple[int, int] | None = None


class NearResponder:
    """Answers of one direction. It stays silent until a genuine answer has shown its headers and message number."""

    def __init__(self, *, is_on: bool) -> None:
        """`is_on`: acknowledge SENDs and WRITEs here."""
        self.is_on = is_on
        self.template: ReplyTemplate | None = None
        self.acked: int | None = None
        """Last number that the NIC was acknowledged."""
        self.first: int | None = None
        """First request that was taken; one before it may have been lost on its way here."""
        self._num_messages = 0
        self._offset: int | None = None
        self._acked_messages = 0
        self._history: deque[tuple[int, int]] = deque(maxlen=_MAX_UNKNOWN)
        self._waiting: deque[_Waiting] = deque()
        self._latest: tuple[int, int] | None = None
        self._num_unacknowledged = 0
        self._told_gap: int | None = None

    @property
    def can_answer(self) -> bool:
        """Whether headers and message number are known."""
        return self.template is not None and self._offset is not None

    @property
    def is_active(self) -> bool:
        """Whether requests are acknowledged here now."""
        return self.is_on and self.can_answer

    def begin(self, reply: RoceView, first_psn: int) -> None:
        """Answer from the first request on: the queue pair was set up, with the headers of `reply` and no message."""
        self.template, self.first, self._offset = ReplyTemplate(reply), first_psn, 0

    def taken(self, view: RoceView, last_psn: int) -> bytes | None:
        """Note a request that the gateway has taken; return the acknowledgement that is due."""
        if self.first is None:
            self.first = view.psn
        self._told_gap = None
        if view.opcode in MESSAGE_ENDS:
            self._num_messages += 1
            self._history.append((last_psn, self._num_messages))
            if self._offset is not None and len(self._history) > _MAX_HISTORY:
                self._history.popleft()
        if view.opcode in READS_AND_ATOMICS:
            self._waiting.append(_Waiting(last_psn))
            return None
        latest = view.psn, self._num_messages
        if self._waiting:
            self._waiting[-1].latest = latest
            return None
        self._latest = latest
        self._num_unacknowledged += 1
        if self.is_active and (view.wants_ack or self._num_unacknowledged >= ACK_PACKETS):
            return self._acknowledge()
        return None

    def genuine(self, view: RoceView) -> tuple[bool, bytes | None]:
        """Note an answer of the far NIC; return whether the near one still needs it, and what follows it."""
        if self.template is None:
            self.template = ReplyTemplate(view)
        is_ack = view.opcode == Opcode.ACKNOWLEDGE
        is_nak = is_ack and view.syndrome >= RNR_FIRST
        psn, is_needed, is_ready = self.answered_psn(view), True, False
        if is_ack and not is_nak:
            self._learn_messages(view)
            is_needed = not self.covers(psn)
        if is_ack or view.opcode in _LAST_RESPONSES:
            while self._waiting and psn_distance(self._waiting[0].last_psn, psn) >= 0:
                waiting = self._waiting.popleft()
                self._latest, is_ready = waiting.latest or self._latest, True
            if not self.covers(psn):
                self.acked = psn
                self._acked_messages = view.message if is_ack else self._acked_messages
        follows = self._acknowledge() if (is_ready or not is_needed) and self.is_active else None
        return is_needed, follows

    @staticmethod
    def answered_psn(view: RoceView) -> int:
        """Return the last request that an answer covers; a NAK covers what is before it."""
        return (view.psn - (view.opcode == Opcode.ACKNOWLEDGE and view.syndrome >= RNR_FIRST)) % PSN_SPAN

    def skip(self) -> None:
        """Count messages from the next acknowledgement on: some that the NIC will not send again were rewound."""
        self._offset = self._told_gap = None

    def again(self) -> bytes | None:
        """Return the last acknowledgement once more: the NIC has missed it."""
        if self.acked is None or not self.can_answer or self.template is None:
            return None
        return self.template.acknowledge(self.acked, self._acked_messages)

    def gap(self, expected: int) -> bytes | None:
        """Return a NAK for requests lost on the way here, once for each gap."""
        if not self.is_active or self._waiting or self._told_gap == expected or self.template is None:
            return None
        self._told_gap, self.acked = expected, (expected - 1) % PSN_SPAN
        self._acked_messages = self._messages(self._num_messages)
        return self.template.acknowledge(expected, self._acked_messages, NAK_SEQUENCE)

    def refuse(self, psn: int) -> bytes | None:
        """Return the error for a request of a queue pair that has failed."""
        if self.template is None:
            return None
        return self.template.acknowledge(psn, self._messages(self._num_messages), NAK_OPERATION)

    def rewind(self, psn: int) -> None:
        """Forget requests from `psn` on, which the NIC sends again."""
        if self.first is not None and psn_distance(self.first, psn) < 0:
            self.first = None
        while self._history and psn_distance(psn, self._history[-1][0]) >= 0:
            self._history.pop()
        while self._waiting and psn_distance(psn, self._waiting[-1].last_psn) >= 0:
            self._waiting.pop()
        if self._offset is None:
            self._num_messages = self._history[-1][1] if self._history else 0

    def read_again(self, psn: int, last_psn: int) -> None:
        """Note that a READ was lost after its response came here, so nothing from it on may be acknowledged."""
        self._waiting.appendleft(_Waiting(last_psn, self._latest))
        self._latest = None
        self.acked = (psn - 1) % PSN_SPAN
        for known, count in reversed(self._history):
            if psn_distance(known, self.acked) >= 0:
                self._acked_messages = self._messages(count)
                break

    def covers(self, psn: int) -> bool:
        """Return whether the NIC was acknowledged `psn`."""
        return self.acked is not None and psn_distance(psn, self.acked) >= 0

    def _acknowledge(self) -> bytes | None:
        if self._latest is None or self.template is None or self.covers(self._latest[0]):
            return None
        self.acked, self._acked_messages = self._latest[0], self._messages(self._latest[1])
        self._num_unacknowledged = 0
        return self.template.acknowledge(self.acked, self._acked_messages, ACK)

    def _messages(self, count: int) -> int:
        return (count + (self._offset or 0)) % PSN_SPAN

    def _learn_messages(self, view: RoceView) -> None:
        """Learn how the responder counts from the first acknowledgement of a request that was taken here."""
        if self._offset is not None or self.first is None or psn_distance(self.first, view.psn) < 0:
            return
        count = 0
        for last_psn, number in self._history:
            if psn_distance(last_psn, view.psn) < 0:
                break
            count = number
        self._offset = (view.message - count) % PSN_SPAN
        while len(self._history) > _MAX_HISTORY:
            self._history.popleft()
