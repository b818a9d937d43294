"""`sleep_exactly`: a sleep accurate to microseconds; kernel timers alone end about 0.1 ms late."""

from __future__ import annotations

import time
from collections.abc import Callable

SPIN_S = 0.2e-3
"""The last part of a sleep, which polls the clock and yields the CPU between polls."""


def sleep_exactly(
    duration_s: float,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Sleep for `duration_s`, accurate to a few microseconds if the thread is scheduled in time."""
    end_s = clock() + duration_s
    if duration_s > SPIN_S:
        sleep(duration_s - SPIN_S)
    while clock() < end_s:
        sleep(0)
