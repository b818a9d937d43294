"""`steady_time_s`: seconds since the epoch on a clock that a step of the system clock does not move.

Ranks estimate the difference of their clocks once per connection, so these clocks may not jump afterwards. On
Linux, all processes of a machine share the monotonic clock: with one anchor they share this clock too.
"""

from __future__ import annotations

import time
from collections.abc import Callable

ANCHOR_S = time.time() - time.monotonic()
"""Epoch time minus monotonic time when this process started."""


def steady_clock(anchor_s: float, monotonic: Callable[[], float] = time.monotonic) -> Callable[[], float]:
    """Return a clock of epoch seconds that advances with `monotonic` from the anchor `anchor_s`."""
    return lambda: anchor_s + monotonic()


steady_time_s = steady_clock(ANCHOR_S)
