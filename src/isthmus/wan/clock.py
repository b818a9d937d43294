"""An asyncio event loop whose timers are good to a fraction of a millisecond."""

from __future__ import annotations

import asyncio
import select
import selectors


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
