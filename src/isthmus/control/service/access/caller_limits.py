"""`CallerLimits`: how many requests a caller may have in progress, and how many may wait for their turn.

The server has a few dozen threads for requests; without limits one caller holds them all.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from isthmus.core.errors import RateLimitError

MAX_RUNNING = 24
"""Requests of a caller in progress at once; the server has 40 threads."""
MAX_WAITING = 500
"""Further requests of a caller that wait; none of them has been read beyond its head."""
WAIT_LIMIT_S = 30.0
"""Longest wait of a request for its turn."""


@dataclass(slots=True)
class _Turns:
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_RUNNING))
    num_present: int = 0


class CallerLimits:
    """Requests in progress and waiting, by caller; for one event loop."""

    def __init__(self) -> None:
        self._callers: dict[str, _Turns] = {}

    @asynccontextmanager
    async def turn(self, caller: str) -> AsyncIterator[None]:
        """Wait for the caller's turn; raise `RateLimitError` if too many requests wait, or for too long."""
        mine = self._callers.setdefault(caller, _Turns())
        if mine.num_present >= MAX_RUNNING + MAX_WAITING:
            raise _too_many(caller, f"{mine.num_present} requests")
        mine.num_present += 1
        try:
            try:
                async with asyncio.timeout(WAIT_LIMIT_S):
                    await mine.turns.acquire()
            except TimeoutError:
                raise _too_many(caller, f"{MAX_RUNNING} requests for {WAIT_LIMIT_S:g} s") from None
            try:
                yield
            finally:
                mine.turns.release()
        finally:
            mine.num_present -= 1
            if mine.num_present == 0:
                self._callers.pop(caller, None)


def _too_many(caller: str, held: str) -> RateLimitError:
    return RateLimitError(f"{caller} has {held} in progress already", hint="send fewer requests at once, and try again")
