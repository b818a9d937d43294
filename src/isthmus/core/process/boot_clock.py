"""The clock and the id of the machine's present start: what leases and agents are bound to.

`boot_time_s` counts suspended time, is never set, and all processes of the machine share it (Linux: CLOCK_BOOTTIME).
"""

from __future__ import annotations

import time
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boot_time_s() -> float:
    """Return the seconds since the machine started, suspended time included."""
    return time.clock_gettime(_CLOCK)


def boot_id() -> str:
    """Return the id of the machine's present start, "" where the system has none."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""
