"""`StragglerDetector`: detects a rank that computes slower than before, or than its plan predicts."""

from __future__ import annotations

from collections import deque
from statistics import median

SLOW_FACTOR = 1.5
"""A step that computes for more than this multiple of the expected time is slow."""

MIN_EXCESS_S = 0.05
"""Smallest excess over the expected time that counts as slow: short steps vary by chance."""

NUM_CONSECUTIVE = 3
"""Consecutive slow (or normal) steps before a change is reported."""

_WINDOW_STEPS = 50
_MIN_STEPS = 5


class StragglerDetector:
    """Compares the compute time of each step with the expected time.

    The expected time is the median of the last 50 steps that were not slow, once there are 5, and before
    that the plan's prediction `planned_s`, if any.
    """

    def __init__(self, planned_s: float | None = None) -> None:
        self._planned_s = planned_s
        self._usual_s: deque[float] = deque(maxlen=_WINDOW_STEPS)
        self._num_consecutive = 0
        self.is_slow = False

    def add_step(self, compute_s: float) -> str | None:
        """Add a step that computed for `compute_s`; return a message when a slow period begins or ends."""
        expected_s = median(self._usual_s) if len(self._usual_s) >= _MIN_STEPS else self._planned_s
        is_slow = expected_s is not None and compute_s > max(SLOW_FACTOR * expected_s, expected_s + MIN_EXCESS_S)
        if not is_slow:
            self._usual_s.append(compute_s)
        self._num_consecutive = self._num_consecutive + 1 if is_slow != self.is_slow else 0
        if self._num_consecutive < NUM_CONSECUTIVE or expected_s is None:
            return None
        self.is_slow, self._num_consecutive = is_slow, 0
        if not is_slow:
            return f"back to {compute_s:.3g} s of compute per step"
        reference = "its median" if len(self._usual_s) >= _MIN_STEPS else "the plan's"
        return f"{compute_s:.3g} s of compute per step, {compute_s / expected_s:.1f} times {reference} time"
