"""Exact times: an event loop with timers good to a fraction of a millisecond, a process woken soon."""

from __future__ import annotations

import asyncio
import ctypes
import os
import platform
import select
import selectors
import struct
import sys

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_SLICE_NS = 100_000


class _PreciseSelector(selectors.DefaultSelector):
    """Waits by select(2) on the selector's own descriptor: microseconds, where epoll counts milliseconds."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait at most `timeout` seconds (None: for ever; at most 0: not at all) and return what is ready."""
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        select.select([self.fileno()], [], [], timeout)
        return super().select(0)


def precise_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop with precise timers; the caller runs and closes it."""
    return asyncio.SelectorEventLoop(_PreciseSelector())


def ask_to_be_woken_soon() -> None:
    """Ask the scheduler to wake this thread promptly while others compute; what it does not grant is let be.

    Real-time priority needs a privilege (CAP_SYS_NICE); it is not inherited by children. A short time slice
    needs Linux 6.12 and no privilege: whoever asks for little at a time is let in early (man 2 sched_setattr,
    `sched_runtime` of SCHED_OTHER).
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if sys.platform != "linux" or number is None:
        return
    try:
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except PermissionError:
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        attributes = struct.pack("=IIQiIQQQII", 56, 0, 0, nice, 0, _SLICE_NS, 0, 0, 0, 0)
        ctypes.CDLL(None).syscall(number, 0, attributes, 0)
