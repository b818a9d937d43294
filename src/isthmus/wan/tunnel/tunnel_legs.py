"""`TunnelLegs`: the legs of a tunnel: which take a frame, which are silent, and when the missing ones are dialled."""

from __future__ import annotations

import math
from dataclasses import dataclass

PING_S = 0.5
"""Longest silence of a sender, unless another one is agreed."""

SILENCE_S = 3.0
"""Silence after which a leg counts as broken, unless another one is agreed."""

QUICK_S = 0.05
"""Time in which a leg takes a frame if long ones keep nothing waiting."""

DIAL_S = (0.0, 0.1, 0.2, 0.4, 0.8, 1.6)
"""Wait before each dial of an index; the last one repeats."""


@dataclass(slots=True)
class _Leg:
    index: int
    heard_s: float
    sent_s: float
    is_quick: bool = False


@dataclass(slots=True)
class _Dial:
    due_s: float
    num_failed: int = 0
    under_way: bool = False


class TunnelLegs:
    """Legs by their id. A dialler has `num_legs` indices and dials each that has no leg."""

    def __init__(self, num_legs: int, now_s: float, *, silence_s: float = SILENCE_S, ping_s: float = PING_S) -> None:
        self._silence_s, self._ping_s = silence_s, ping_s
        self._legs: dict[int, _Leg] = {}
        self._ready: dict[int, None] = {}
        self._dials = {index: _Dial(now_s) for index in range(num_legs)}
        self._due_s: float | None = None
        self.empty_since_s = now_s
        """When the last leg broke; without meaning while there is one."""

    def __len__(self) -> int:
        return len(self._legs)

    def __contains__(self, leg: int) -> bool:
        return leg in self._legs

    def all(self) -> list[int]:
        """Return the ids of all legs."""
        return list(self._legs)

    def add(self, leg: int, index: int, now_s: float) -> int | None:
        """Add a leg, which is ready; return the leg of the same index that it replaces."""
        replaced = next((old for old, one in self._legs.items() if one.index == index), None)
        self._legs[leg] = _Leg(index, now_s, now_s)
        self._ready[leg] = self._due_s = None
        if index in self._dials:
            self._dials[index] = _Dial(math.inf)
        return replaced

    def remove(self, leg: int, now_s: float) -> bool:
        """Forget a leg and dial its index again; return whether it was known."""
        one = self._legs.pop(leg, None)
        self._ready.pop(leg, None)
        if one is None:
            return False
        self._due_s = None
        if not self._legs:
            self.empty_since_s = now_s
        if one.index in self._dials and all(other.index != one.index for other in self._legs.values()):
            self._dials[one.index] = _Dial(now_s)
        return True

    def heard(self, leg: int, now_s: float) -> None:
        """Note that something came on a leg."""
        self._legs[leg].heard_s = now_s

    def mark_ready(self, leg: int, now_s: float) -> None:
        """Note that a leg takes a frame."""
        if (one := self._legs.get(leg)) is not None:
            one.is_quick = now_s < one.sent_s + QUICK_S
            self._ready[leg] = None
            if self._due_s is not None:
                self._due_s = min(self._due_s, one.sent_s + self._ping_s)

    def first_ready(self) -> int | None:
        """Return the leg that has been ready for longest, None if none is."""
        return next(iter(self._ready), None)

    def is_quick(self, leg: int) -> bool:
        """Whether the last frame of a leg has left soon."""
        return self._legs[leg].is_quick

    def use(self, leg: int, now_s: float) -> None:
        """Note that a frame leaves on a ready leg."""
        del self._ready[leg]
        self._legs[leg].sent_s = now_s

    def silent(self, now_s: float) -> list[int]:
        """Return the legs on which nothing has come for the time that counts as silence."""
        return [leg for leg, one in self._legs.items() if now_s >= one.heard_s + self._silence_s]

    def to_ping(self, now_s: float) -> list[int]:
        """Return the ready legs on which nothing has left for the time between pings."""
        return [leg for leg in self._ready if now_s >= self._legs[leg].sent_s + self._ping_s]

    def to_dial(self, now_s: float) -> list[int]:
        """Return the indices to dial now; each counts as under way."""
        self._due_s = None
        due = [index for index, dial in self._dials.items() if not dial.under_way and now_s >= dial.due_s]
        for index in due:
            self._dials[index].under_way = True
        return due

    def dial_failed(self, index: int, now_s: float) -> None:
        """Dial an index again, later each time."""
        if (dial := self._dials.get(index)) is not None and dial.under_way:
            self._due_s = None
            dial.num_failed += 1
            dial.under_way, dial.due_s = False, now_s + DIAL_S[min(dial.num_failed, len(DIAL_S) - 1)]

    def next_due_s(self) -> float:
        """Return when a leg will be silent, to ping, or to dial, or an earlier time; `to_dial` makes it exact again.

        It is asked for after each frame, which can only put it off.
        """
        if self._due_s is None:
            self._due_s = self._exact_due_s()
        return self._due_s

    def _exact_due_s(self) -> float:
        times = [one.heard_s + self._silence_s for one in self._legs.values()]
        times += [self._legs[leg].sent_s + self._ping_s for leg in self._ready]
        times += [dial.due_s for dial in self._dials.values() if not dial.under_way]
        return min(times, default=math.inf)
