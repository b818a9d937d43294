"""`CoordinatorActor`: serialises access to the coordinator and its log. It decides, appends, and then answers.

Threads queue requests; the thread that gets the lock executes the whole queue as one batch:

    1. each request proposes an event, which is admitted and handled: the state runs ahead of the disk,
    2. the events of the batch are appended with one flush,
    3. requests are answered and instructions executed only after the append.

Reads share the queue, so they return durable state only. If step 2 fails or handling an event raises, the
coordinator is discarded and rebuilt by replaying the log, and the requests not failed by it are decided
again. On a log shared with other servers a batch runs inside one `exclusive_access` and first applies their events.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar

from isthmus.control.coordinator.coordinator import Coordinator, CoordinatorConfig
from isthmus.control.state.events import Event, Instruction, NoticeDue
from isthmus.control.store.log_base import LogCompactedError
from isthmus.control.store.snapshot_codec import restore_base, serialize_state
from isthmus.control.store.snapshot_file import SnapshotFile
from isthmus.control.store.store_interface import LogMovedError, Store
from isthmus.core.errors import InputError, IsthmusError, UnavailableError
from isthmus.core.process.gc_pause import collection_paused
from isthmus.core.views.access_views import AuditRecord

MAX_BATCH_REQUESTS = 1000
"""Largest number of requests per batch."""

T = TypeVar("T")


class AppliedEvent(NamedTuple):
    """A durable event that the coordinator has handled, and the instructions that it returned.

    `live` is false for events replayed at the start; `appended_here` is true if this server appended the event.
    `coordinator` may be ahead of the event, never of the disk: read it only inside the observer.
    """

    number: int
    event: Event
    instructions: list[Instruction]
    coordinator: Coordinator
    live: bool
    appended_here: bool


AuditLines = Callable[[Coordinator, Event], Sequence[AuditRecord]]
"""Returns the audit lines of an event that was admitted, from the state before it."""
EventObserver = Callable[[AppliedEvent], None]
"""Called once per durable event, in order. It must neither raise nor call the actor."""


class ActorRequest:
    """One request to the coordinator: an optional event, then an answer. Both callables may run repeatedly.

    `make_event` returns the event to append or None; `answer` reads the coordinator after it. Once `done`,
    `result` is the answer, unless `error` is set: what a callable raised, or why the append failed. `audit` returns the
    audit lines of an admitted event, from the state before it; they are durable with the event.
    """

    def __init__(
        self,
        answer: Callable[[Coordinator], Any],
        make_event: Callable[[Coordinator], Event | None] | None = None,
        audit: AuditLines | None = None,
    ) -> None:
        self.answer, self.make_event, self.audit = answer, make_event, audit
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

    def __init__(self, request: ActorRequest, error: Exception) -> None:
        super().__init__(str(error))
        self.request, self.error = request, error


class _BatchDecision:
    """The outcome of a batch: its events with their instructions, and the ids of the proposing requests."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.audit: list[AuditRecord] = []
        self.instructions: list[list[Instruction]] = []
        self.proposer_ids: set[int] = set()


class CoordinatorActor:
    """Executes all requests to the coordinator. Raises `IsthmusError` if the log cannot be replayed.

    `on_append` is called after each append with its duration in seconds and its number of events. With
    `snapshot_file` a replay starts from the newest one; `on_snapshot_loaded` is called with a snapshot that was loaded.
    """

    def __init__(
        self,
        store: Store,
        observe: EventObserver,
        rules: CoordinatorConfig | None = None,
        on_append: Callable[[float, int], None] = lambda _seconds, _num_events: None,
        snapshot_file: SnapshotFile | None = None,
        on_snapshot_loaded: Callable[[int, Coordinator], None] = lambda _number, _coordinator: None,
    ) -> None:
        self._store, self._observe, self._rules, self._on_append = store, observe, rules, on_append
        self._snapshot_file, self._on_snapshot_loaded = snapshot_file, on_snapshot_loaded
        self._queue: list[ActorRequest] = []
        self._queue_lock, self._lock = threading.Lock(), threading.Lock()
        self._coordinator: Coordinator | None = None
        self._last_observed = 0
        self.last_event_number = 0
        with self._lock:
            self._caught_up_coordinator(live=False)

    def query(self, question: Callable[[Coordinator], T]) -> T:
        """Return the answer to a query on durable state."""
        return self.execute([ActorRequest(question)])[0].value()  # type: ignore[no-any-return]

    def propose(
        self,
        make_event: Callable[[Coordinator], Event | None],
        answer: Callable[[Coordinator], T],
        audit: AuditRecord | None = None,
    ) -> T:
        """Append the proposed event, with its audit line, if it is admitted; return the answer once it is durable."""
        lines = None if audit is None else lambda _coordinator, _event: (audit,)
        return self.execute([ActorRequest(answer, make_event, lines)])[0].value()  # type: ignore[no-any-return]

    def save_snapshot(self) -> int:
        """Save a snapshot of the durable state if configured; return the number of its last event."""
        if not self._snapshot_file or not self.last_event_number:
            return self.last_event_number
        number, body = self.durable_state()
        self._snapshot_file.save(self._store, number, body)
        return number

    def durable_state(self) -> tuple[int, bytes]:
        """Return the number of the last event and the state after it (`serialize_state`)."""
        with self._lock:
            coordinator = self._caught_up_coordinator()
            return self.last_event_number, serialize_state(coordinator.state)

    def execute(self, requests: Sequence[ActorRequest]) -> Sequence[ActorRequest]:
        """Execute requests in order, together with those already queued; return them done."""
        self.enqueue(requests)
        return self.complete(requests)

    def enqueue(self, requests: Sequence[ActorRequest]) -> None:
        """Queue requests; the next thread that executes a batch includes them."""
        with self._queue_lock:
            self._queue.extend(requests)

    def complete(self, requests: Sequence[ActorRequest]) -> Sequence[ActorRequest]:
        """Execute batches until all of `requests`, which must be queued, are done; return them."""
        with self._lock:
            while not all(request.done for request in requests):
                self._execute_next_batch()
        return requests

    def _execute_next_batch(self) -> None:
        with self._queue_lock:
            batch, self._queue = self._queue[:MAX_BATCH_REQUESTS], self._queue[MAX_BATCH_REQUESTS:]
        try:
            self._execute_batch(batch)
        finally:
            for request in batch:
                if not request.done:  # interrupted by a BaseException, such as KeyboardInterrupt
                    self._coordinator = None
                    request.done, request.error = True, UnavailableError("the request was interrupted")

    def _execute_batch(self, batch: Sequence[ActorRequest]) -> None:
        """Decide, append and answer a batch; repeat with the requests that remain after a failure."""
        left = list(batch)
        while left:
            decided = _BatchDecision()
            try:
                writes = any(request.make_event for request in left)
                with self._store.exclusive_access() if writes else nullcontext():
                    # Step 1: apply the events of other servers, then decide on the requests.
                    coordinator = self._caught_up_coordinator()
                    self._decide(coordinator, left, decided)
                    # Step 2: append the events with one flush.
                    decided_s = time.perf_counter()
                    if decided.events:
                        due = [one for asked in decided.instructions for one in asked if isinstance(one, NoticeDue)]
                        self._store.append(decided.events, self.last_event_number, decided.audit, due)
            except LogMovedError:
                self._coordinator = None
            except _BrokenError as broken:
                self._coordinator = None
                self._mark_done([broken.request], broken.error)
            except Exception as error:
                self._coordinator = None
                self._fail_requests(left, decided, error)
            else:
                # Step 3: notify the observer and answer the requests.
                if decided.events:
                    self._on_append(time.perf_counter() - decided_s, len(decided.events))
                for event, asked in zip(decided.events, decided.instructions, strict=True):
                    self._notify_observer(
                        AppliedEvent(
                            self.last_event_number + 1,
                            event,
                            asked,
                            coordinator,
                            live=True,
                            appended_here=True,
                        )
                    )
                self._mark_done(left)
            left = [request for request in left if not request.done]

    def _decide(self, coordinator: Coordinator, requests: Iterable[ActorRequest], decision: _BatchDecision) -> None:
        """Admit and handle the proposed events and record each request's answer."""
        for request in requests:
            request.error = None
            try:
                event = request.make_event(coordinator) if request.make_event else None
                if event is not None and coordinator.admit(event):
                    decision.proposer_ids.add(id(request))
                    lines = request.audit(coordinator, event) if request.audit else ()
                    decision.instructions.append(self._handle(coordinator, request, event))
                    decision.events.append(event)
                    decision.audit.extend(lines)
                request.result = request.answer(coordinator)
            except _BrokenError:
                raise
            except Exception as error:
                request.error = error

    def _handle(self, coordinator: Coordinator, request: ActorRequest, event: Event) -> list[Instruction]:
        try:
            return coordinator.handle(event)
        except Exception as error:
            raise _BrokenError(request, error) from error

    def _fail_requests(self, requests: list[ActorRequest], decision: _BatchDecision, error: Exception) -> None:
        """Fail the requests whose events could not be appended, or all if none had been decided.

        An error in one request's data must not fail the others: each is then executed by itself.
        """
        writers = [request for request in requests if id(request) in decision.proposer_ids]
        if len(writers) > 1 and isinstance(error, InputError | ValueError):
            for request in requests:
                self._execute_batch([request])
            return
        self._mark_done(writers or requests, error)

    def _mark_done(self, requests: Iterable[ActorRequest], error: Exception | None = None) -> None:
        for request in requests:
            request.done, request.error = True, error or request.error

    def _caught_up_coordinator(self, *, live: bool = True) -> Coordinator:
        """Return the coordinator with every durable event applied."""
        while True:
            try:
                if self._coordinator is None:
                    fresh = self._load_snapshot()
                    with collection_paused():
                        self._apply_log(fresh, live=live)
                    self._coordinator = fresh
                elif self._store.shared:
                    self._apply_log(self._coordinator, live=live)
            except LogCompactedError:  # another server has compacted the log meanwhile: begin again with its base
                self._coordinator = None
            else:
                return self._coordinator

    def _load_snapshot(self) -> Coordinator:
        """Return the coordinator of the newest snapshot, that of the log's base, or an empty one."""
        rules = self._rules or CoordinatorConfig()
        found = self._snapshot_file.load(self._store, rules) if self._snapshot_file else None
        if found is None and (base := self._store.bases.active()) is not None:
            found = base.end.number, restore_base(base, rules)
        self.last_event_number = found[0] if found else 0
        coordinator = Coordinator.from_state(found[1]) if found else Coordinator(self._rules)
        if self.last_event_number > self._last_observed:
            self._last_observed = self.last_event_number
            self._on_snapshot_loaded(self.last_event_number, coordinator)
        return coordinator

    def _apply_log(self, coordinator: Coordinator, *, live: bool) -> None:
        for number, event in self._store.events(self.last_event_number):
            try:
                asked = coordinator.handle(event)
            except Exception as error:
                self._coordinator = None
                raise IsthmusError(
                    f"event {number} of the log, '{event.kind}', cannot be replayed: {type(error).__name__}: {error}",
                    hint="this is a bug: keep the state folder, start the version that wrote it, report this",
                ) from error
            self._notify_observer(AppliedEvent(number, event, asked, coordinator, live, appended_here=False))

    def _notify_observer(self, applied: AppliedEvent) -> None:
        self.last_event_number = applied.number
        if applied.number > self._last_observed:
            self._last_observed = applied.number
            self._observe(applied)
