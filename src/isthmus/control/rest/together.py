"""`Together`: batches the event loop's actor requests and executes each batch in one worker thread.

While a batch is flushed the next one collects, so few flushes serve many clients without a thread for each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import anyio.to_thread
from anyio import CapacityLimiter

from isthmus.control.service.actor import Request


class Together:
    """Batches requests of one event loop; `settle` is the actor's method."""

    def __init__(self, settle: Callable[[Sequence[Request]], object]) -> None:
        self._settle = settle
        self._waiting: list[tuple[Sequence[Request], asyncio.Future[None]]] = []
        self._settling: asyncio.Task[None] | None = None
        self._one = CapacityLimiter(1)

    async def settle(self, requests: Sequence[Request]) -> None:
        """Execute requests; return once they are done and their events are on disk."""
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((requests, done))
        if self._settling is None or self._settling.done():
            self._settling = asyncio.create_task(self._settle_all())
        await done

    async def value(self, request: Request) -> Any:
        """Execute a request; return its result or raise its error."""
        await self.settle([request])
        return request.value()

    async def _settle_all(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            asked = [request for requests, _ in batch for request in requests]
            try:
                await anyio.to_thread.run_sync(self._settle, asked, limiter=self._one)
            except Exception as error:
                _end(batch, error)
            else:
                _end(batch)


def _end(batch: list[tuple[Sequence[Request], asyncio.Future[None]]], error: Exception | None = None) -> None:
    for _, done in batch:
        if done.done():  # the client has disconnected
            continue
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)
