"""`News`: waits for news of a job, by the server's event stream, and by the clock where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import TracebackType

from httpx_sse import ServerSentEvent

from isthmus.cli.client.api_client import Client
from isthmus.cli.shell.shell import Shell
from isthmus.core.errors import NotFoundError, UnavailableError

RETRY_AFTER = 10
"""Looks by the clock before a stream that was cut is tried again."""


class News:
    """News of job id `job`, at most once in `interval_s` seconds; a context manager.

    `note` is told once when the stream is cut. Where a server has no stream the clock serves, quietly.
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
        """Return once there may be news."""
        begun_s = self._shell.now()
        if self._open() and self._told():
            left_s = self._interval_s - (self._shell.now() - begun_s)
            if left_s > 0:
                self._shell.sleep(left_s)
            return
        self._shell.sleep(self._interval_s)

    def _open(self) -> bool:
        """Have a stream, if there can be one just now."""
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
        """Wait for the stream's next event; tell whether one came, or the stream is over."""
        try:
            for event in self._events or ():
                self._last_id = event.id or self._last_id
                if event.event != "hello":
                    return True
            reason = "the server has closed it"
        except UnavailableError as error:
            reason = error.message
        self._events, self._looks_until_retry = None, RETRY_AFTER
        self._stream.close()
        self._note(f"the event stream was cut ({reason}): looking every {self._interval_s:g} s instead")
        return False
