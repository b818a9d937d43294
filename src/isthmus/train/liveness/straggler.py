"""`Pace`: whether a rank computes slower than it did, or than its plan says."""

from __future__ import annotations

from collections import deque
from statistics import median

SLOW = 1.5
"""A step that computes for so many times the expected time is slow."""

LEAST_S = 0.05
"""And by no less than this: shorter steps differ by chance."""

IN_A_ROW = 3
"""So many slow steps in a row are told of, and as many others that it is over."""

_KEPT_STEPS = 50
_FIRST_STEPS = 5


class Pace:
    """Judges the computing time of one step after the other. `planned_s` is what the plan predicts of one.

    What is expected is the median of the last 50 steps that were not slow, once there are 5; until then what
    the plan predicts, if it does.
    """

    def __init__(self, planned_s: float | None = None) -> None:
        self._planned_s = planned_s
        self._usual: deque[float] = deque(maxlen=_KEPT_STEPS)
        self._in_a_row = 0
        self.slow = False

    def judge(self, compute_s: float) -> str | None:
        """Take in the computing seconds of a step; return what to tell when a slow time begins or ends."""
        expected_s = median(self._usual) if len(self._usual) >= _FIRST_STEPS else self._planned_s
        is_slow = expected_s is not None and compute_s > max(SLOW * expected_s, expected_s + LEAST_S)
        if not is_slow:
            self._usual.append(compute_s)
        self._in_a_row = self._in_a_row + 1 if is_slow != self.slow else 0
        if self._in_a_row < IN_A_ROW or expected_s is None:
            return None
        self.slow, self._in_a_row = is_slow, 0
        if not is_slow:
            return f"computes in {compute_s:.3g} s a step again"
        whose = "its usual" if len(self._usual) >= _FIRST_STEPS else "the plan's"
        return f"computes for {compute_s:.3g} s a step, {compute_s / expected_s:.1f} times {whose} time"
