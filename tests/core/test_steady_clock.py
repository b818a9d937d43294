"""Rules of the clock of ranks."""

from __future__ import annotations

from isthmus.core.process.steady_clock import steady_clock


def test_a_steady_clock_advances_with_monotonic_time_alone() -> None:
    """A step of the system clock after the start moves nothing: only the anchor and monotonic time count."""
    now_s = [50.0]
    clock = steady_clock(1000.0, lambda: now_s[0])
    assert clock() == 1050.0
    now_s[0] = 50.5
    assert clock() == 1050.5
