"""`JobEvents`: waits for changes of a job, by the server's event stream or, without one, by polling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Protocol

from httpx_sse import ServerSentEvent

from isthmus.client.api_client import ApiClient
from isthmus.core.errors import NotFoundError, UnavailableError

POLLS_UNTIL_RETRY = 10
"""Polls between attempts to reopen a broken stream."""


class Clock(Protocol):
    """The time that a wait reads and spends, in seconds; the environment of the command line is one."""

    @property
    def now(self) -> Callable[[], float]:
        """Return seconds since the epoch when called."""

    @property
    def sleep(self) -> Callable[[float], None]:
        """Wait for the given seconds when called."""


class JobEvents:
    """Change notifications of job id `job`, at most one per `interval_s` seconds; a context manager.

    Calls `on_stream_cut` each time the stream breaks. If the server has no stream, it polls silently.
    """

    def __init__(
        self,
        clock: Clock,
        client: ApiClient,
        job: str,
        interval_s: float,
        on_stream_cut: Callable[[str], None],
    ) -> None:
        self._clock, self._client, self._job = clock, client, job
        self._interval_s, self._on_stream_cut = interval_s, on_stream_cut
        self._stream = ExitStack()
        self._events: Iterator[ServerSentEvent] | None = None
        self._polls_until_retry, self._has_stream = 0, True
        self._last_id = ""

    def __enter__(self) -> JobEvents:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def wait(self) -> None:
        """Block until the job may have changed."""
        start_s = self._clock.now()
        if self._ensure_stream() and self._wait_event():
            left_s = self._interval_s - (self._clock.now() - start_s)
            if left_s > 0:
                self._clock.sleep(left_s)
            return
        self._clock.sleep(self._interval_s)

    def _ensure_stream(self) -> bool:
        """Open the stream unless it is open; return whether it is."""
        if self._events is not None or not self._has_stream:
            return self._events is not None
        if self._polls_until_retry:
            self._polls_until_retry -= 1
            return False
        try:
            self._events = self._stream.enter_context(self._client.events(self._job, after=self._last_id))
        except NotFoundError:
            self._has_stream = False
        except UnavailableError:
            self._polls_until_retry = POLLS_UNTIL_RETRY
        return self._events is not None

    def _wait_event(self) -> bool:
        """Wait for the next event; return False if the stream ended first."""
        try:
            for event in self._events or ():
                self._last_id = event.id or self._last_id
                if event.event != "hello":
                    return True
            reason = "the server closed the event stream"
        except UnavailableError as error:
            reason = error.message
        self._events, self._polls_until_retry = None, POLLS_UNTIL_RETRY
        self._stream.close()
        self._on_stream_cut(f"{reason}; polling every {self._interval_s:g} s")
        return False
