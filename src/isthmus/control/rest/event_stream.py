"""The event stream: server-sent events (WHATWG HTML standard, 9.2) with changes of jobs.

A subscriber receives the newest state of each changed job, not every change, so a slow or reconnecting one
needs no buffer and never misses a final state. A change wakes it; it polls the feed at most `MAX_POLLS_PER_S`
times a second. A stream whose reader accepts no data for `SEND_TIMEOUT_S` is closed.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, contextmanager

from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from isthmus.control.service.auth import Caller
from isthmus.control.service.change_feed import Change
from isthmus.control.service.control_service import ControlService
from isthmus.core.errors import NotFoundError, RateLimitError, UnavailableError
from isthmus.core.views.api_views import JobView

MEDIA_TYPE = "text/event-stream"
MAX_POLLS_PER_S = 10.0
KEEPALIVE_INTERVAL_S = 15.0
"""Interval without events after which a comment is sent, which detects a closed connection."""
SEND_TIMEOUT_S = 30.0
"""A stream is closed if its reader accepts no data for this long."""
MAX_STREAMS = 1000
"""Largest number of open streams."""
MAX_STREAMS_PER_CALLER = 50
"""Largest number of open streams of one role and name."""
PAGE_SIZE = 500

_log = logging.getLogger("isthmus.server")


class EventSubscription:
    """One subscription: the jobs of `user` (None: all) or the job `job_id`, from changes after event `after`.

    Without `after` a stream of many jobs starts with the next change, that of one job with its present state.
    """

    def __init__(
        self,
        service: ControlService,
        *,
        caller: Caller,
        user: str | None,
        job_id: str | None = None,
        after: int | None = None,
    ) -> None:
        self.caller = caller
        self._service, self._user, self._job_id = service, user, job_id
        self._output_version = service.changes.output_version(job_id) if job_id else 0
        if after is None:
            after = 0 if job_id else service.last_event()
        self._after, self._after_history = after, 0
        self._wakeup = asyncio.Event()

    async def events(self) -> AsyncGenerator[str]:
        """Yield the stream's text, event by event, until the server shuts down or the caller's token ends."""
        loop = asyncio.get_running_loop()
        changes = self._service.changes

        def wake() -> None:
            if not self._wakeup.is_set():
                loop.call_soon_threadsafe(self._wakeup.set)

        with ExitStack() as stack:
            stack.enter_context(changes.subscribe(wake))
            stack.enter_context(self._service.gate.registry.subscribe(wake))
            yield f"event: hello\nid: {self._after}\ndata: {{}}\n\n"
            while not changes.closed and self._service.gate.registry.is_valid(self.caller.token_id):
                self._wakeup.clear()
                for event in await self._poll():
                    yield event
                try:
                    await asyncio.wait_for(self._wakeup.wait(), KEEPALIVE_INTERVAL_S)
                    await asyncio.sleep(1 / MAX_POLLS_PER_S)
                except TimeoutError:
                    yield ": keep-alive\n\n"

    async def _poll(self) -> list[str]:
        """Return the events since the last poll."""
        found = self._output_event()
        while page := await run_in_threadpool(self._next_page):
            found += [_format_event(*one) for one in page]
            self._after = page[-1][0].number
            if len(page) < PAGE_SIZE:
                break
        return found + await run_in_threadpool(self._history_events)

    def _next_page(self) -> list[tuple[Change, JobView | None]]:
        changes = self._service.changes
        if self._job_id is None:
            return self._service.current_views(changes.changes_after(self._after, PAGE_SIZE, self._user))
        latest = changes.latest_change(self._job_id)
        return self._service.current_views([latest] if latest and latest.number > self._after else [])

    def _history_events(self) -> list[str]:
        """Return the job's history events since the last poll; after a reconnection all, with their numbers."""
        if self._job_id is None:
            return []
        try:
            page = self._service.history(self._job_id, self._after_history, PAGE_SIZE)
        except NotFoundError:  # deleted
            return []
        self._after_history = page.next
        return [f"event: history\ndata: {one.model_dump_json()}\n\n" for one in page.events]

    def _output_event(self) -> list[str]:
        if self._job_id is None:
            return []
        before, self._output_version = (
            self._output_version,
            self._service.changes.output_version(self._job_id),
        )
        return [] if before == self._output_version else ["event: lines\ndata: {}\n\n"]


def _format_event(change: Change, view: JobView | None) -> str:
    if view is None:
        return f"event: deleted\nid: {change.number}\ndata: {json.dumps({'id': change.job_id})}\n\n"
    return f"event: job\nid: {change.number}\ndata: {view.model_dump_json(by_alias=True)}\n\n"


class OpenStreams:
    """Counts an application's open streams: at most `MAX_STREAMS`, and `MAX_STREAMS_PER_CALLER` of a caller."""

    def __init__(self) -> None:
        self.num_open = 0
        self._of_caller: Counter[str] = Counter()

    def open(self, subscription: EventSubscription) -> EventStream:
        """Return the response that streams to `subscription`."""
        return EventStream(subscription, self)

    @contextmanager
    def count(self, caller: Caller) -> Iterator[None]:
        """Count a stream of `caller` until the context exits; raise `UnavailableError` beyond the limits."""
        who = f"{caller.role} {caller.name}"
        if self._of_caller[who] >= MAX_STREAMS_PER_CALLER:
            raise RateLimitError(
                f"{who} has {MAX_STREAMS_PER_CALLER} event streams open already",
                hint="close some, or poll GET /v1/jobs instead",
            )
        if self.num_open >= MAX_STREAMS:
            raise UnavailableError(f"{MAX_STREAMS} event streams are already open", hint="poll GET /v1/jobs instead")
        self.num_open += 1
        self._of_caller[who] += 1
        try:
            yield
        finally:
            self.num_open -= 1
            self._of_caller[who] -= 1
            if not self._of_caller[who]:
                del self._of_caller[who]


class EventStream(StreamingResponse):
    """The response to a subscription; closed if its reader accepts no data for `SEND_TIMEOUT_S`."""

    media_type = MEDIA_TYPE

    def __init__(self, subscription: EventSubscription, streams: OpenStreams) -> None:
        self._caller = subscription.caller
        self._events, self._streams = subscription.events(), streams
        super().__init__(self._events, headers={"Cache-Control": "no-store"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream, or raise the error of a limit before anything is sent."""
        with self._streams.count(self._caller):
            await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        """Send the stream event by event."""

        async def in_time(message: Message) -> None:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send(message)

        try:
            await super().stream_response(in_time)
        except TimeoutError:
            _log.info("event stream closed: its reader accepted no data for %g s", SEND_TIMEOUT_S)
        finally:
            await self._events.aclose()
