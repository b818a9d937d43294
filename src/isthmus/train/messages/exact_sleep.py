"""`sleep_exactly`: a sleep that ends when it should: the kernel's timers end 0.1 ms late."""

from __future__ import annotations

import time
from collections.abc import Callable

SPIN_S = 0.2e-3
"""The last part of a sleep, in which the clock is looked at again and again; others may run between."""


def sleep_exactly(
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return `seconds` from now, to a few microseconds where the machine lets this thread run."""
    end_s = clock() + seconds
    if seconds > SPIN_S:
        sleep(seconds - SPIN_S)
    while clock() < end_s:
        sleep(0)
