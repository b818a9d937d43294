"""`DomainCourier`: carries orders of a decision centre to the port of one domain's controller, and its answers back.

A domain that does not answer costs no other domain anything: each has a thread and a queue of its own, where an order
takes the place of an earlier copy. What is lost the centre orders again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from pydantic import ValidationError

from isthmus.core.errors import IsthmusError
from isthmus.wan.centre.domain_requests import (
    MAX_REPORT_BYTES,
    DomainMessage,
    DomainReply,
    OrderMessage,
    ReportMessage,
    order_message,
)
from isthmus.wan.centre.line_client import CentreAddress, LineClient
from isthmus.wan.controller.controller_messages import DomainOrder

TIMEOUT_S = 3.0
REPORT_S = 10.0
"""Between two reports of a domain."""
PAUSE_S = 0.5
"""After an order that did not get through."""
MAX_WAITING = 10_000
"""Orders that wait; beyond them the oldest is dropped, and ordered again by the centre."""
_log = logging.getLogger("isthmus.wan.centre")


class DomainCourier:
    """Calls `on_answer` on the event loop with each answer of `domain`, whose port is at `address`."""

    def __init__(self, domain: str, address: CentreAddress, on_answer: Callable[[DomainMessage], None]) -> None:
        self._domain, self._on_answer = domain, on_answer
        self._client = LineClient(
            address,
            f"controller of domain {domain}",
            "isthmus wan domain serves it",
            timeout_s=TIMEOUT_S,
            max_answer_bytes=MAX_REPORT_BYTES,
        )
        self._waiting: dict[tuple[str, str, int], OrderMessage] = {}
        self._news = asyncio.Event()
        self._threads = ThreadPoolExecutor(1, f"domain-{domain}")
        self._task: asyncio.Task[None] | None = None
        self._is_silent = False

    def start(self) -> None:
        """Begin to send, with a request for a report."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    def send(self, order: DomainOrder) -> None:
        """Send an order after those that wait."""
        message = order_message(order)
        self._waiting[message.kind, message.name, message.version] = message
        if len(self._waiting) > MAX_WAITING:
            del self._waiting[next(iter(self._waiting))]
        self._news.set()

    async def close(self) -> None:
        """Send nothing more; returns when the last call has ended."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await asyncio.to_thread(self._threads.shutdown)
        self._client.close()

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        report_s = clock()
        while True:
            if clock() >= report_s:
                report_s = clock() + REPORT_S
                await self._exchange(ReportMessage())
            elif self._waiting:
                await self._exchange(self._waiting.pop(next(iter(self._waiting))))
            else:
                self._news.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), report_s - clock())

    async def _exchange(self, message: OrderMessage | ReportMessage) -> None:
        loop = asyncio.get_running_loop()
        try:
            content = message.model_dump(mode="json")
            found = await loop.run_in_executor(self._threads, self._client.call, content)
            reply = DomainReply.model_validate(found)
            self._on_answer(DomainMessage(domain=self._domain, **dict(reply)))
        except (IsthmusError, ValidationError) as error:
            if not self._is_silent:
                _log.warning("domain %s: %s", self._domain, error)
            self._is_silent = True
            await asyncio.sleep(PAUSE_S)
            return
        self._is_silent = False
