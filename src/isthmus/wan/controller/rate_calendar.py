"""`RateCalendar`: what is booked on one pipe over time, as a step function in whole kbit/s."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator


class RateCalendar:
    """Booked kbit/s by time in seconds. Integers, so that what is released leaves exactly nothing behind."""

    __slots__ = ("_kbps", "_times_s")

    def __init__(self) -> None:
        self._times_s = [-math.inf]
        self._kbps = [0]

    def peak_kbps(self, start_s: float, end_s: float) -> int:
        """Return the most that is booked at a moment from `start_s` until before `end_s`."""
        times_s = self._times_s
        if len(times_s) == 1:
            return self._kbps[0]
        return max(self._kbps[bisect_right(times_s, start_s) - 1 : bisect_left(times_s, end_s)])

    def least_kbps(self, start_s: float, end_s: float) -> int:
        """Return the least that is booked at a moment of a time."""
        return min(kbps for _, _, kbps in self.steps(start_s, end_s))

    def add(self, start_s: float, end_s: float, kbps: int) -> None:
        """Book `kbps` from `start_s` until before `end_s`; a negative rate releases it."""
        first, last = self._cut(start_s), self._cut(end_s)
        for index in range(first, last):
            self._kbps[index] += kbps
        for index in (last, first):
            if self._kbps[index] == self._kbps[index - 1]:
                del self._kbps[index], self._times_s[index]

    def steps(self, start_s: float, end_s: float) -> Iterator[tuple[float, float, int]]:
        """Yield (start, end, booked kbit/s) of each step from `start_s` until `end_s`, without gaps."""
        times_s = self._times_s
        index = bisect_right(times_s, start_s) - 1
        while start_s < end_s:
            next_s = times_s[index + 1] if index + 1 < len(times_s) else math.inf
            yield start_s, min(next_s, end_s), self._kbps[index]
            start_s, index = next_s, index + 1

    def _cut(self, at_s: float) -> int:
        """Return the index of the step that begins at `at_s`, which is made if there is none."""
        index = bisect_left(self._times_s, at_s)
        if index == len(self._times_s) or self._times_s[index] != at_s:
            self._times_s.insert(index, at_s)
            self._kbps.insert(index, self._kbps[index - 1])
        return index
