"""`RequestBatcher`: batches the event loop's actor requests and executes each batch in one worker thread.

While a batch is flushed the next one collects, so few flushes serve many clients without a thread for each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import anyio.to_thread
from anyio import CapacityLimiter

from isthmus.control.service.coordinator_actor import ActorRequest


class RequestBatcher:
    """Batches requests of one event loop; `execute_requests` is the actor's method."""

    def __init__(self, execute_requests: Callable[[Sequence[ActorRequest]], object]) -> None:
        self._execute_requests = execute_requests
        self._waiting: list[tuple[Sequence[ActorRequest], asyncio.Future[None]]] = []
        self._worker_task: asyncio.Task[None] | None = None
        self._limiter = CapacityLimiter(1)

    async def execute(self, requests: Sequence[ActorRequest]) -> None:
        """Execute requests; return once they are done and their events are on disk."""
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((requests, done))
        if self._worker_task is None or self._worker_task.done():
            self._worker_task = asyncio.create_task(self._run_batches())
        await done

    async def result_of(self, request: ActorRequest) -> Any:
        """Execute a request; return its result or raise its error."""
        await self.execute([request])
        return request.value()

    async def _run_batches(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            asked = [request for requests, _ in batch for request in requests]
            try:
                await anyio.to_thread.run_sync(self._execute_requests, asked, limiter=self._limiter)
            except Exception as error:
                _resolve_futures(batch, error)
            else:
                _resolve_futures(batch)


def _resolve_futures(
    batch: list[tuple[Sequence[ActorRequest], asyncio.Future[None]]], error: Exception | None = None
) -> None:
    for _, done in batch:
        if done.done():  # the client has disconnected
            continue
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)
