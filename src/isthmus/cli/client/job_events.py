"""`News`: waits for changes of a job, by the server's event stream or, without one, by polling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import TracebackType

from httpx_sse import ServerSentEvent

from isthmus.cli.client.api_client import Client
from isthmus.cli.shell.shell import Shell
from isthmus.core.errors import NotFoundError, UnavailableError

RETRY_AFTER = 10
"""Polls between attempts to reopen a broken stream."""


class News:
    """Change notifications of job id `job`, at most one per `interval_s` seconds; a context manager.

    Calls `note` each time the stream breaks. If the server has no stream, it polls silently.
    """

    def __init__(
        self, shell: Shell, client: Client, job: str, interval_s: float, note: Callable[[str], None]
    ) -> None:
        self._shell, self._client, self._job = shell, client, job
        self._interval_s, self._note = interval_s, note
        self._stream = ExitStack()
        self._events: Iterator[ServerSentEvent] | None = None
        self._looks_until_retry, self._has_stream = 0, True
        self._last_id = ""

    def __enter__(self) -> News:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()

    def wait(self) -> None:
        """Block until the job may have changed."""
        start_s = self._shell.now()
        if self._open() and self._told():
            left_s = self._interval_s - (self._shell.now() - start_s)
            if left_s > 0:
                self._shell.sleep(left_s)
            return
        self._shell.sleep(self._interval_s)

    def _open(self) -> bool:
        """Open the stream unless it is open; return whether it is."""
        if self._events is not None or not self._has_stream:
            return self._events is not None
        if self._looks_until_retry:
            self._looks_until_retry -= 1
            return False
        try:
            self._events = self._stream.enter_context(self._client.events(self._job, after=self._last_id))
        except NotFoundError:
            self._has_stream = False
        except UnavailableError:
            self._looks_until_retry = RETRY_AFTER
        return self._events is not None

    def _told(self) -> bool:
        """Wait for the next event; return False if the stream ended first."""
        try:
            for event in self._events or ():
                self._last_id = event.id or self._last_id
                if event.event != "hello":
                    return True
            reason = "the server closed the event stream"
        except UnavailableError as error:
            reason = error.message
        self._events, self._looks_until_retry = None, RETRY_AFTER
        self._stream.close()
        self._note(f"{reason}; polling every {self._interval_s:g} s")
        return False
