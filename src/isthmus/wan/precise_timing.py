"""Precise timing: an event loop with sub-millisecond timers, and prompt scheduling of a thread."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import platform
import select
import selectors
import struct
import sys
from collections.abc import Callable

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_TIME_SLICE_NS = 100_000


class _PreciseSelector(selectors.DefaultSelector):
    """Waits with select(2) on the epoll descriptor: microsecond timeouts instead of milliseconds."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait at most `timeout` seconds (None: forever; <= 0: not at all); return the ready keys."""
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        select.select([self.fileno()], [], [], timeout)
        return super().select(0)


def precise_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop with precise timers; the caller runs and closes it."""
    return asyncio.SelectorEventLoop(_PreciseSelector())


def take_real_time_priority() -> None:
    """Run this thread before all threads of ordinary priority (man 7 sched, SCHED_RR); children do not inherit it.

    Raises `OSError` where that is not permitted: it needs CAP_SYS_NICE or a limit RLIMIT_RTPRIO.
    """
    if sys.platform != "linux":
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))


def request_short_slice() -> None:
    """Ask for a short time slice, which Linux 6.12 schedules earlier on wake-up; it needs no privilege.

    Does nothing where that is not granted (man 2 sched_setattr, `sched_runtime` of SCHED_OTHER).
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if sys.platform == "linux" and number is not None:
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        attributes = struct.pack("=IIQiIQQQII", 56, 0, 0, nice, 0, _TIME_SLICE_NS, 0, 0, 0, 0)
        ctypes.CDLL(None).syscall(number, 0, attributes, 0)


def request_prompt_wakeup(take: Callable[[], None] = take_real_time_priority) -> None:
    """Ask the scheduler to run this thread promptly on wake-up: real-time priority if permitted, else a short slice."""
    try:
        take()
    except OSError:
        request_short_slice()
