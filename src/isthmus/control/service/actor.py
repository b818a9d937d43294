"""The actor: the coordinator and its log, kept in step. It decides, appends, and only then answers.

Requests of many threads queue up; whoever gets the lock settles all that is there (no thread of its own):

    1. each request proposes an event, which is admitted and handled: the state runs ahead of the disk,
    2. the batch is appended with one flush,
    3. only now is anything answered, and only now is anything done that the decisions ask for.

Reads stand in the same queue, so nobody sees what is not yet durable. Where step 2 fails, or handling an
event breaks, the coordinator is thrown away and folded anew from the log, and the requests not failed by it
are decided again. On a log that other servers append to as well, a batch is one `turn`, and begins with what
they appended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar

from isthmus.control.coordinator.coordinator import Coordinator, Rules
from isthmus.control.state.events import Event, Instruction
from isthmus.control.store.snapshots import Snapshots, freeze, without_collection
from isthmus.control.store.store import LogMovedError, Store
from isthmus.core.errors import InputError, IsthmusError, UnavailableError

LARGEST_BATCH = 1000
"""Most requests settled with one flush."""

T = TypeVar("T")


class Folded(NamedTuple):
    """A durable event that was taken in, and what handling it asked for.

    `live` is false for events replayed at the start, `own` says that this server appended it. `coordinator`
    may be ahead of the event, never of the disk; it is to be read only, and only while this is looked at.
    """

    number: int
    event: Event
    asked: list[Instruction]
    coordinator: Coordinator
    live: bool
    own: bool


Observe = Callable[[Folded], None]
"""Is told of every event once it is durable, in order, each once. It must not raise, nor ask the actor."""


class Request:
    """One visit to the coordinator: perhaps an event, then an answer. Either callable may be called again.

    `propose` returns the event to take in, None for none; `answer` is given the coordinator after it. Once
    `done`, `error` is what either raised, or why it could not be made durable, else `result` is the answer.
    """

    def __init__(
        self,
        answer: Callable[[Coordinator], Any],
        propose: Callable[[Coordinator], Event | None] | None = None,
    ) -> None:
        self.answer, self.propose = answer, propose
        self.done = False
        self.result: Any = None
        self.error: Exception | None = None

    def value(self) -> Any:
        """Return the result or raise the error."""
        if self.error is not None:
            raise self.error
        return self.result


class _BrokenError(Exception):
    """Handling the event of `request` raised `error`: the coordinator cannot be used any more."""

    def __init__(self, request: Request, error: Exception) -> None:
        super().__init__(str(error))
        self.request, self.error = request, error


class _Decided:
    """What a batch came to: its events with what handling them asked for, and who proposed them."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.asked: list[list[Instruction]] = []
        self.writers: set[int] = set()


class Actor:
    """The one way to the coordinator. Raises `IsthmusError` where the log cannot be folded.

    `flushed` is told of every append: the seconds until it was on disk, and its number of events. With
    `snapshots` a fold begins behind the newest; `resumed` is told of one that the first fold began with.
    """

    def __init__(
        self,
        store: Store,
        observe: Observe,
        rules: Rules | None = None,
        flushed: Callable[[float, int], None] = lambda _seconds, _num_events: None,
        snapshots: Snapshots | None = None,
        resumed: Callable[[int, Coordinator], None] = lambda _number, _coordinator: None,
    ) -> None:
        self._store, self._observe, self._rules, self._flushed = store, observe, rules, flushed
        self._snapshots, self._resumed = snapshots, resumed
        self._queue: list[Request] = []
        self._queue_lock, self._lock = threading.Lock(), threading.Lock()
        self._coordinator: Coordinator | None = None
        self._told = 0
        self.number = 0
        with self._lock:
            self._current(live=False)

    def ask(self, question: Callable[[Coordinator], T]) -> T:
        """Return the answer to a question about durable state."""
        return self.settle([Request(question)])[0].value()  # type: ignore[no-any-return]

    def take(self, propose: Callable[[Coordinator], Event | None], answer: Callable[[Coordinator], T]) -> T:
        """Take an event in, durably, where it changes anything; return the answer."""
        return self.settle([Request(answer, propose)])[0].value()  # type: ignore[no-any-return]

    def save(self) -> int:
        """Keep a snapshot of the durable state, where there is a place; return its last event's number."""
        with self._lock:
            coordinator, number = self._current(), self.number
            body = freeze(coordinator) if self._snapshots and number else b""
        if self._snapshots and number:
            self._snapshots.save(self._store, number, body)
        return number

    def settle(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Settle requests in their order, together with whatever else waits; return them done."""
        self.put(requests)
        return self.finish(requests)

    def put(self, requests: Sequence[Request]) -> None:
        """Have requests wait: whoever settles next settles them too."""
        with self._queue_lock:
            self._queue.extend(requests)

    def finish(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Settle what waits until all of `requests`, which were put there, are done; return them."""
        with self._lock:
            while not all(request.done for request in requests):
                self._settle_batch()
        return requests

    def _settle_batch(self) -> None:
        with self._queue_lock:
            batch, self._queue = self._queue[:LARGEST_BATCH], self._queue[LARGEST_BATCH:]
        try:
            self._settle(batch)
        finally:
            for request in batch:
                if not request.done:  # an exception that is no Exception went through: a signal's
                    self._coordinator = None
                    request.done, request.error = True, UnavailableError("the request was interrupted")

    def _settle(self, batch: Sequence[Request]) -> None:
        """Bring every request of a batch to its end, whatever fails."""
        left = list(batch)
        while left:
            decided = _Decided()
            try:
                writes = any(request.propose for request in left)
                with self._store.turn() if writes else nullcontext():
                    coordinator = self._current()
                    self._decide(coordinator, left, decided)
                    decided_s = time.perf_counter()
                    if decided.events:
                        self._store.append(decided.events, expected=self.number)
            except LogMovedError:
                self._coordinator = None
            except _BrokenError as broken:
                self._coordinator = None
                self._finish([broken.request], broken.error)
            except Exception as error:
                self._coordinator = None
                self._fail(left, decided, error)
            else:
                if decided.events:
                    self._flushed(time.perf_counter() - decided_s, len(decided.events))
                for event, asked in zip(decided.events, decided.asked, strict=True):
                    self._tell(Folded(self.number + 1, event, asked, coordinator, live=True, own=True))
                self._finish(left)
            left = [request for request in left if not request.done]

    def _decide(self, coordinator: Coordinator, requests: Iterable[Request], decided: _Decided) -> None:
        """Admit and handle what the requests propose, and take their answers down."""
        for request in requests:
            request.error = None
            try:
                event = request.propose(coordinator) if request.propose else None
                if event is not None and coordinator.admit(event):
                    decided.writers.add(id(request))
                    decided.asked.append(self._handle(coordinator, request, event))
                    decided.events.append(event)
                request.result = request.answer(coordinator)
            except _BrokenError:
                raise
            except Exception as error:
                request.error = error

    def _handle(self, coordinator: Coordinator, request: Request, event: Event) -> list[Instruction]:
        try:
            return coordinator.handle(event)
        except Exception as error:
            raise _BrokenError(request, error) from error

    def _fail(self, requests: list[Request], decided: _Decided, error: Exception) -> None:
        """Fail those whose event could not be appended (all, where it did not come so far).

        An error about somebody's data fails nobody else: then each is settled by itself.
        """
        writers = [request for request in requests if id(request) in decided.writers]
        if len(writers) > 1 and isinstance(error, InputError | ValueError):
            for request in requests:
                self._settle([request])
            return
        self._finish(writers or requests, error)

    def _finish(self, requests: Iterable[Request], error: Exception | None = None) -> None:
        for request in requests:
            request.done, request.error = True, error or request.error

    def _current(self, *, live: bool = True) -> Coordinator:
        """Return the coordinator with every durable event folded in."""
        if self._coordinator is None:
            fresh = self._newest()
            with without_collection():
                self._fold(fresh, live=live)
            self._coordinator = fresh
        elif self._store.shared:
            self._fold(self._coordinator, live=live)
        return self._coordinator

    def _newest(self) -> Coordinator:
        """Return the coordinator to fold on: that of the newest snapshot, or an empty one."""
        found = self._snapshots.load(self._store, self._rules or Rules()) if self._snapshots else None
        self.number, coordinator = found or (0, Coordinator(self._rules))
        if self.number > self._told:
            self._told = self.number
            self._resumed(self.number, coordinator)
        return coordinator

    def _fold(self, coordinator: Coordinator, *, live: bool) -> None:
        for number, event in self._store.events(self.number):
            try:
                asked = coordinator.handle(event)
            except Exception as error:
                self._coordinator = None
                raise IsthmusError(
                    f"event {number} of the log, '{event.kind}', cannot be taken in again: "
                    f"{type(error).__name__}: {error}",
                    hint="this is a bug: keep the state folder, start the version that wrote it, report this",
                ) from error
            self._tell(Folded(number, event, asked, coordinator, live, own=False))

    def _tell(self, folded: Folded) -> None:
        self.number = folded.number
        if folded.number > self._told:
            self._told = folded.number
            self._observe(folded)
