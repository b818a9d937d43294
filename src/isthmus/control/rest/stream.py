"""The event stream: server-sent events (WHATWG HTML standard, 9.2) with changes of jobs.

A subscriber receives the newest state of each changed job, not every change, so a slow or reconnecting one
needs no buffer and never misses a final state. A change wakes it; it polls the feed at most `LOOKS_PER_S`
times a second. A stream whose reader accepts no data for `STALLED_S` is closed.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import ExitStack

from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse
from starlette.types import Message, Send

from isthmus.control.service.change_feed import Change
from isthmus.control.service.control_service import ControlShell
from isthmus.core.errors import UnavailableError
from isthmus.core.messages.api_views import JobView

MEDIA_TYPE = "text/event-stream"
LOOKS_PER_S = 10.0
QUIET_S = 15.0
"""Interval without events after which a comment is sent, which detects a closed connection."""
STALLED_S = 30.0
"""A stream is closed if its reader accepts no data for this long."""
MOST_STREAMS = 1000
"""Largest number of open streams."""
PAGE = 500

_log = logging.getLogger("isthmus.server")


class Follower:
    """One subscription: the jobs of `user` (None: all) or the job `job_id`, from changes after event `after`.

    Without `after` a stream of many jobs starts with the next change, that of one job with its present state.
    """

    def __init__(
        self, shell: ControlShell, *, user: str | None, job_id: str | None = None, after: int | None = None
    ) -> None:
        self._shell, self._user, self._job_id = shell, user, job_id
        self._lines = shell.changes.num_lines(job_id) if job_id else 0
        if after is None:
            after = 0 if job_id else shell.last_event()
        self._after = after
        self._woken = asyncio.Event()

    async def text(self) -> AsyncGenerator[str]:
        """Yield the stream's text, event by event, until the server shuts down."""
        loop = asyncio.get_running_loop()
        changes = self._shell.changes

        def wake() -> None:
            if not self._woken.is_set():
                loop.call_soon_threadsafe(self._woken.set)

        with ExitStack() as stack:
            stack.enter_context(changes.listening(wake))
            yield f"event: hello\nid: {self._after}\ndata: {{}}\n\n"
            while not changes.ended:
                self._woken.clear()
                for event in await self._look():
                    yield event
                try:
                    await asyncio.wait_for(self._woken.wait(), QUIET_S)
                    await asyncio.sleep(1 / LOOKS_PER_S)
                except TimeoutError:
                    yield ": keep-alive\n\n"

    async def _look(self) -> list[str]:
        """Return the events since the last poll."""
        found = self._new_lines()
        while page := await run_in_threadpool(self._page):
            found += [_event(*one) for one in page]
            self._after = page[-1][0].number
            if len(page) < PAGE:
                break
        return found

    def _page(self) -> list[tuple[Change, JobView | None]]:
        changes = self._shell.changes
        if self._job_id is None:
            return self._shell.as_now(changes.since(self._after, PAGE, self._user))
        latest = changes.latest(self._job_id)
        return self._shell.as_now([latest] if latest and latest.number > self._after else [])

    def _new_lines(self) -> list[str]:
        if self._job_id is None:
            return []
        before, self._lines = self._lines, self._shell.changes.num_lines(self._job_id)
        return [] if before == self._lines else ["event: lines\ndata: {}\n\n"]


def _event(change: Change, view: JobView | None) -> str:
    if view is None:
        return f"event: deleted\nid: {change.number}\ndata: {json.dumps({'id': change.job_id})}\n\n"
    return f"event: job\nid: {change.number}\ndata: {view.model_dump_json(by_alias=True)}\n\n"


class OpenStreams:
    """Counts an application's open streams and limits them to `MOST_STREAMS`."""

    def __init__(self) -> None:
        self.num_open = 0

    def open(self, follower: Follower) -> EventStream:
        """Return the response that streams to `follower`; raise `UnavailableError` beyond the limit."""
        if self.num_open >= MOST_STREAMS:
            raise UnavailableError(
                f"{MOST_STREAMS} event streams are already open", hint="poll GET /v1/jobs instead"
            )
        return EventStream(follower, self)


class EventStream(StreamingResponse):
    """The response to a subscription; closed if its reader accepts no data for `STALLED_S`."""

    media_type = MEDIA_TYPE

    def __init__(self, follower: Follower, streams: OpenStreams) -> None:
        self._text, self._streams = follower.text(), streams
        super().__init__(self._text, headers={"Cache-Control": "no-store"})

    async def stream_response(self, send: Send) -> None:
        """Send the stream event by event."""

        async def in_time(message: Message) -> None:
            async with asyncio.timeout(STALLED_S):
                await send(message)

        self._streams.num_open += 1
        try:
            await super().stream_response(in_time)
        except TimeoutError:
            _log.info("event stream closed: its reader accepted no data for %g s", STALLED_S)
        finally:
            self._streams.num_open -= 1
            await self._text.aclose()
