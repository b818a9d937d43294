"""`Actor`: serialises access to the coordinator and its log. It decides, appends, and then answers.

Threads queue requests; the thread that gets the lock executes the whole queue as one batch:

    1. each request proposes an event, which is admitted and handled: the state runs ahead of the disk,
    2. the events of the batch are appended with one flush,
    3. requests are answered and instructions executed only after the append.

Reads share the queue, so they return durable state only. If step 2 fails or handling an event raises, the
coordinator is discarded and rebuilt by replaying the log, and the requests not failed by it are decided
again. On a log shared with other servers a batch runs inside one `turn` and first applies their events.
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
"""Largest number of requests per batch."""

T = TypeVar("T")


class Folded(NamedTuple):
    """A durable event that the coordinator has handled, and the instructions that it returned.

    `live` is false for events replayed at the start; `own` is true if this server appended the event.
    `coordinator` may be ahead of the event, never of the disk: read it only inside the observer.
    """

    number: int
    event: Event
    asked: list[Instruction]
    coordinator: Coordinator
    live: bool
    own: bool


Observe = Callable[[Folded], None]
"""Called once per durable event, in order. It must neither raise nor call the actor."""


class Request:
    """One request to the coordinator: an optional event, then an answer. Both callables may run repeatedly.

    `propose` returns the event to append or None; `answer` reads the coordinator after it. Once `done`,
    `result` is the answer, unless `error` is set: what a callable raised, or why the append failed.
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
    """Handling the event of `request` raised `error`: the coordinator's state is invalid."""

    def __init__(self, request: Request, error: Exception) -> None:
        super().__init__(str(error))
        self.request, self.error = request, error


class _Decided:
    """The outcome of a batch: its events with their instructions, and the ids of the proposing requests."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.asked: list[list[Instruction]] = []
        self.writers: set[int] = set()


class Actor:
    """Executes all requests to the coordinator. Raises `IsthmusError` if the log cannot be replayed.

    `flushed` is called after each append with its duration in seconds and its number of events. With
    `snapshots` a replay starts from the newest one; `resumed` is called with a snapshot that was loaded.
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
        """Return the answer to a query on durable state."""
        return self.settle([Request(question)])[0].value()  # type: ignore[no-any-return]

    def take(self, propose: Callable[[Coordinator], Event | None], answer: Callable[[Coordinator], T]) -> T:
        """Append the proposed event if it is admitted; return the answer once it is durable."""
        return self.settle([Request(answer, propose)])[0].value()  # type: ignore[no-any-return]

    def save(self) -> int:
        """Save a snapshot of the durable state if configured; return the number of its last event."""
        with self._lock:
            coordinator, number = self._current(), self.number
            body = freeze(coordinator) if self._snapshots and number else b""
        if self._snapshots and number:
            self._snapshots.save(self._store, number, body)
        return number

    def settle(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Execute requests in order, together with those already queued; return them done."""
        self.put(requests)
        return self.finish(requests)

    def put(self, requests: Sequence[Request]) -> None:
        """Queue requests; the next thread that executes a batch includes them."""
        with self._queue_lock:
            self._queue.extend(requests)

    def finish(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Execute batches until all of `requests`, which must be queued, are done; return them."""
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
                if not request.done:  # interrupted by a BaseException, such as KeyboardInterrupt
                    self._coordinator = None
                    request.done, request.error = True, UnavailableError("the request was interrupted")

    def _settle(self, batch: Sequence[Request]) -> None:
        """Decide, append and answer a batch; repeat with the requests that remain after a failure."""
        left = list(batch)
        while left:
            decided = _Decided()
            try:
                writes = any(request.propose for request in left)
                with self._store.turn() if writes else nullcontext():
                    # Step 1: apply the events of other servers, then decide on the requests.
                    coordinator = self._current()
                    self._decide(coordinator, left, decided)
                    # Step 2: append the events with one flush.
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
                # Step 3: notify the observer and answer the requests.
                if decided.events:
                    self._flushed(time.perf_counter() - decided_s, len(decided.events))
                for event, asked in zip(decided.events, decided.asked, strict=True):
                    self._tell(Folded(self.number + 1, event, asked, coordinator, live=True, own=True))
                self._finish(left)
            left = [request for request in left if not request.done]

    def _decide(self, coordinator: Coordinator, requests: Iterable[Request], decided: _Decided) -> None:
        """Admit and handle the proposed events and record each request's answer."""
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
        """Fail the requests whose events could not be appended, or all if none had been decided.

        An error in one request's data must not fail the others: each is then executed by itself.
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
        """Return the coordinator with every durable event applied."""
        if self._coordinator is None:
            fresh = self._newest()
            with without_collection():
                self._fold(fresh, live=live)
            self._coordinator = fresh
        elif self._store.shared:
            self._fold(self._coordinator, live=live)
        return self._coordinator

    def _newest(self) -> Coordinator:
        """Return the coordinator of the newest snapshot, or an empty one."""
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
                    f"event {number} of the log, '{event.kind}', cannot be replayed: "
                    f"{type(error).__name__}: {error}",
                    hint="this is a bug: keep the state folder, start the version that wrote it, report this",
                ) from error
            self._tell(Folded(number, event, asked, coordinator, live, own=False))

    def _tell(self, folded: Folded) -> None:
        self.number = folded.number
        if folded.number > self._told:
            self._told = folded.number
            self._observe(folded)
