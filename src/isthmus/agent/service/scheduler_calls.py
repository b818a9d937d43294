"""`SchedulerCalls`: calls of an adapter, off the agent's loop where they may block."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from isthmus.core.errors import IsthmusError

_log = logging.getLogger("isthmus.agent")


@dataclass(frozen=True)
class _Call:
    make: Callable[[], Any]
    on_answer: Callable[[Any], object]
    on_error: Callable[[Exception], object]
    future: Future[Any] = field(default_factory=Future)


class SchedulerCalls:
    """Makes calls one after the other, in a thread if `blocks`; answers are handed over by `collect`.

    A key has one call at a time: a scheduler that hangs collects no queue of equal questions. Urgent calls are made
    before the others. `on_answer` is called in that thread when there is something to collect.
    """

    def __init__(
        self, *, blocks: bool, on_answer: Callable[[], object] = lambda: None, what: str = "scheduler"
    ) -> None:
        """`what` is called, for the log."""
        self._what = what
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="scheduler") if blocks else None
        self._waiting: deque[_Call] = deque()
        self._urgent: deque[_Call] = deque()
        self._on_answer = on_answer
        self._calls: dict[Hashable, _Call] = {}
        self._last_error = ""

    def is_open(self, key: Hashable) -> bool:
        """Return whether a call of `key` has not been answered yet."""
        return key in self._calls

    @property
    def busy(self) -> bool:
        """Whether a call has not been answered yet."""
        return bool(self._calls)

    def submit(
        self,
        key: Hashable,
        call: Callable[[], Any],
        on_answer: Callable[[Any], object] = lambda _answer: None,
        on_error: Callable[[Exception], object] | None = None,
        *,
        urgent: bool = False,
    ) -> None:
        """Make a call unless one of `key` is open; without a thread its answer is handed over at once."""
        if key in self._calls:
            return
        report = on_error or self._log_error
        if self._pool is not None:
            self._calls[key] = made = _Call(call, on_answer, report)
            made.future.add_done_callback(lambda _: self._on_answer())
            (self._urgent if urgent else self._waiting).append(made)
            self._pool.submit(self._make_next)
            return
        try:
            answer = call()
        except (IsthmusError, OSError) as error:
            report(error)
        else:
            on_answer(answer)

    def _make_next(self) -> None:
        """Make the most urgent call that waits: there is one for each task of the thread."""
        call = (self._urgent or self._waiting).popleft()
        try:
            answer = call.make()
        except BaseException as error:
            call.future.set_exception(error)
        else:
            call.future.set_result(answer)

    @property
    def has_failed(self) -> bool:
        """Whether the last answer was an error."""
        return bool(self._last_error)

    def collect(self) -> None:
        """Hand over the answers that have arrived."""
        for key, call in list(self._calls.items()):
            if not call.future.done():
                continue
            del self._calls[key]
            try:
                answer = call.future.result()
            except (IsthmusError, OSError) as error:
                call.on_error(error)
            else:
                self._last_error = ""
                call.on_answer(answer)

    def close(self) -> None:
        """Drop calls that have not begun."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _log_error(self, error: Exception) -> None:
        if str(error) != self._last_error:
            _log.error("%s: %s", self._what, error)
        self._last_error = str(error)
