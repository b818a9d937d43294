"""`DeliveryQueue`: which notices go in which message, when, and when again. Pure: time and jitter are arguments.

Notices of a receiver that come close together share a message; a message that fails is repeated with the same notices,
ever later, before newer ones; what a receiver does not take for a day is given up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

GROUP_WAIT_S = 5.0
"""How long the first notice after a quiet time waits for others."""
GROUP_INTERVAL_S = 60.0
"""Shortest time between the beginnings of two messages to a receiver."""
MAX_NOTICES = 100
"""Notices of a message."""
MAX_WAITING = 1000
"""Notices of a receiver that wait; the oldest ones are dropped and counted."""
MAX_TOTAL = 20_000
"""Notices of all receivers that wait."""
FIRST_RETRY_S = 10.0
LAST_RETRY_S = 3600.0
"""Bounds of the time before a repetition: it doubles, with up to a quarter of jitter."""
GIVE_UP_S = 24 * 3600.0
"""How long a message is repeated after its first attempt."""

Receiver = tuple[str, str, str]
"""Role, name and channel."""


@dataclass(frozen=True, kw_only=True)
class NoticeBatch:
    """Notices, by their numbers, for one receiver. `number` names the message: repeated, it is the same."""

    receiver: Receiver
    number: int
    notices: tuple[int, ...]
    # It is sent for the first time: its number is to be stored with its notices before.
    is_new: bool = False
    # Notices before these that were dropped.
    num_dropped: int = 0


@dataclass
class _Receiver:
    waiting: deque[int] = field(default_factory=deque)
    num_dropped: int = 0
    # When the next message may be made.
    opens_s: float = 0.0
    # The message that is not delivered yet.
    open: NoticeBatch | None = None
    in_flight: bool = False
    num_failures: int = 0
    first_attempt_s: float = 0.0
    retry_s: float = 0.0

    @property
    def is_idle(self) -> bool:
        return not self.waiting and self.open is None

    def due_s(self) -> float | None:
        if self.in_flight or self.is_idle:
            return None
        return self.retry_s if self.open is not None else self.opens_s


class DeliveryQueue:
    """The notices that wait, by receiver. Each message that `due` returns ends with `delivered` or `failed`."""

    def __init__(self) -> None:
        self._receivers: dict[Receiver, _Receiver] = {}
        self.num_waiting = 0

    def restore(self, receiver: Receiver, batches: Iterable[tuple[int, Sequence[int]]], now_s: float) -> list[int]:
        """Take the messages (number, notices) that an earlier process has begun; return the notices of all but one.

        There is at most one for each receiver; others are of a fault, and their notices wait again.
        """
        mine, others = self._of(receiver), list[int]()
        for number, notices in batches:
            if mine.open is None:
                mine.open = NoticeBatch(receiver=receiver, number=number, notices=tuple(notices))
                mine.first_attempt_s = mine.retry_s = now_s
                self.num_waiting += len(notices)
            else:
                others += notices
        return others

    def add(self, receiver: Receiver, number: int, now_s: float) -> list[int]:
        """Add a notice; return those that are dropped for want of room."""
        mine, dropped = self._of(receiver), list[int]()
        if mine.is_idle and not mine.in_flight:
            mine.opens_s = max(mine.opens_s, now_s + GROUP_WAIT_S)
        mine.waiting.append(number)
        self.num_waiting += 1
        if len(mine.waiting) > MAX_WAITING or self.num_waiting > MAX_TOTAL:
            dropped.append(mine.waiting.popleft())
            mine.num_dropped += 1
            self.num_waiting -= 1
        return dropped

    def due(self, now_s: float) -> list[NoticeBatch]:
        """Return the messages to send now; their receivers get no other one until they have ended."""
        found = []
        for receiver, mine in self._receivers.items():
            due_s = mine.due_s()
            if due_s is None or due_s > now_s:
                continue
            if mine.open is None:
                notices = tuple(mine.waiting.popleft() for _ in range(min(MAX_NOTICES, len(mine.waiting))))
                mine.open = NoticeBatch(
                    receiver=receiver, number=notices[0], notices=notices, is_new=True, num_dropped=mine.num_dropped
                )
                mine.num_dropped, mine.num_failures = 0, 0
                mine.first_attempt_s, mine.opens_s = now_s, now_s + GROUP_INTERVAL_S
            mine.in_flight = True
            found.append(mine.open)
        return found

    def delivered(self, message: NoticeBatch) -> None:
        """End a message: its receiver has it, or is no receiver any more."""
        mine = self._receivers[message.receiver]
        mine.open, mine.in_flight, mine.num_failures = None, False, 0
        self.num_waiting -= len(message.notices)

    def failed(self, message: NoticeBatch, now_s: float, jitter: float, retry_after_s: float = 0.0) -> bool:
        """Repeat a message later, `jitter` (0 to 1) of a quarter later still; return whether it is given up instead."""
        mine = self._receivers[message.receiver]
        mine.in_flight, mine.num_failures = False, mine.num_failures + 1
        delay_s = min(LAST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(mine.num_failures - 1, 20))
        delay_s = max(delay_s * (1 + jitter / 4), min(retry_after_s, LAST_RETRY_S))
        if now_s + delay_s > mine.first_attempt_s + GIVE_UP_S:
            mine.num_dropped += len(message.notices)
            self.delivered(message)
            return True
        mine.open = NoticeBatch(
            receiver=message.receiver, number=message.number, notices=message.notices, num_dropped=message.num_dropped
        )
        mine.retry_s = now_s + delay_s
        return False

    def next_s(self) -> float | None:
        """Return when the next message is due, None while nothing waits."""
        times = [due_s for mine in self._receivers.values() if (due_s := mine.due_s()) is not None]
        return min(times, default=None)

    def forget_idle(self, now_s: float) -> None:
        """Forget receivers that nothing waits for and that may get a message at once."""
        idle = [
            key for key, one in self._receivers.items() if one.is_idle and not one.in_flight and one.opens_s <= now_s
        ]
        for receiver in idle:
            if not self._receivers[receiver].num_dropped:
                del self._receivers[receiver]

    def _of(self, receiver: Receiver) -> _Receiver:
        return self._receivers.setdefault(receiver, _Receiver())
