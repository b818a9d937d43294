"""`Pace`: detects a rank that computes slower than before, or than its plan predicts."""

from __future__ import annotations

from collections import deque
from statistics import median

SLOW = 1.5
"""A step that computes for more than this multiple of the expected time is slow."""

LEAST_S = 0.05
"""Smallest excess over the expected time that counts as slow: short steps vary by chance."""

IN_A_ROW = 3
"""Consecutive slow (or normal) steps before a change is reported."""

_KEPT_STEPS = 50
_FIRST_STEPS = 5


class Pace:
    """Compares the compute time of each step with the expected time.

    The expected time is the median of the last 50 steps that were not slow, once there are 5, and before
    that the plan's prediction `planned_s`, if any.
    """

    def __init__(self, planned_s: float | None = None) -> None:
        self._planned_s = planned_s
        self._usual: deque[float] = deque(maxlen=_KEPT_STEPS)
        self._in_a_row = 0
        self.slow = False

    def judge(self, compute_s: float) -> str | None:
        """Add a step that computed for `compute_s`; return a message when a slow period begins or ends."""
        expected_s = median(self._usual) if len(self._usual) >= _FIRST_STEPS else self._planned_s
        is_slow = expected_s is not None and compute_s > max(SLOW * expected_s, expected_s + LEAST_S)
        if not is_slow:
            self._usual.append(compute_s)
        self._in_a_row = self._in_a_row + 1 if is_slow != self.slow else 0
        if self._in_a_row < IN_A_ROW or expected_s is None:
            return None
        self.slow, self._in_a_row = is_slow, 0
        if not is_slow:
            return f"back to {compute_s:.3g} s of compute per step"
        reference = "its median" if len(self._usual) >= _FIRST_STEPS else "the plan's"
        return f"{compute_s:.3g} s of compute per step, {compute_s / expected_s:.1f} times {reference} time"
