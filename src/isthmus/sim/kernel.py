"""A discrete-event kernel: processes that wait for times and events, on one virtual clock.

    kernel = Kernel()

    def lorry(road: Resource) -> Steps:
        yield kernel.now + 2.0          # wait until a time (seconds on the kernel's clock)
        yield road.acquire()            # wait for an event
        yield kernel.now + 1.0
        road.release()

    kernel.start(lorry(Resource(kernel, 1)))
    kernel.run()

A process is a generator. It yields the time at which it resumes, or an `Event`, which sends its value to the
process. Callbacks due at the same time run in the order in which they were scheduled, so a run is
deterministic. The kernel uses neither real time nor random numbers.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Generator, Iterable
from itertools import count
from typing import Any


class Event:
    """An event that is triggered at most once and then passes its value to present and future waiters."""

    __slots__ = ("_kernel", "_waiting", "happened", "value")

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._waiting: list[Step] = []
        self.happened = False
        self.value: Any = None

    def trigger(self, value: Any = None) -> None:
        """Trigger the event now; raise `RuntimeError` if it already was."""
        if self.happened:
            raise RuntimeError("the event is already triggered")
        self.happened, self.value = True, value
        for step in self._waiting:
            self._kernel.call(self._kernel.now, step, value)
        self._waiting.clear()

    def then(self, step: Step) -> None:
        """Call `step` with the value when the event is triggered, or now if it already is."""
        if self.happened:
            self._kernel.call(self._kernel.now, step, self.value)
        else:
            self._waiting.append(step)


Wish = float | Event | None
"""When a callback is to be called again: at a time, at an event, or (None) never."""
Step = Callable[[Any], Wish]
"""A function that the kernel calls with a value; it returns when to call it again."""
Steps = Generator[float | Event, Any, Any]
"""The generator of a process."""


class Kernel:
    """The virtual clock and its queue of callbacks. `num_events` counts the callbacks run so far."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._due: list[tuple[float, int, Step, Any]] = []
        self._order = count()

    def start(self, process: Steps) -> Event:
        """Start `process` now; return the event of its end, whose value is its return value."""
        end = Event(self)
        self.call(self.now, _closing(process, end).send)
        return end

    def event(self) -> Event:
        """Return a new event of this kernel."""
        return Event(self)

    def call(self, time_s: float, step: Step, value: Any = None) -> None:
        """Call `step(value)` at `time_s`; raise `ValueError` for a time in the past."""
        if time_s < self.now:
            raise ValueError(f"{time_s} s is in the past: it is {self.now} s")
        heapq.heappush(self._due, (time_s, next(self._order), step, value))

    def run(self, until_s: float = math.inf) -> float:
        """Run callbacks up to and including `until_s`, or until none is left; return the time."""
        due, order = self._due, self._order
        pop, push, num_run = heapq.heappop, heapq.heappush, 0
        while due and due[0][0] <= until_s:
            self.now, _, step, value = pop(due)
            num_run += 1
            try:
                wait = step(value)
            except StopIteration:
                continue
            if wait.__class__ is float:
                if wait < self.now:
                    raise ValueError(f"{wait} s is in the past: it is {self.now} s")
                push(due, (wait, next(order), step, None))
            elif wait is not None:
                wait.then(step)  # type: ignore[union-attr]
        self.num_events += num_run
        if due:
            self.now = until_s
        return self.now


def _closing(process: Steps, end: Event) -> Steps:
    end.trigger((yield from process))


def all_of(kernel: Kernel, events: Iterable[Event]) -> Event:
    """Return an event that is triggered after all `events`; its value is the list of theirs, in order."""
    waited = list(events)
    combined, missing = kernel.event(), len(waited)

    def one_more(_: Any) -> None:
        nonlocal missing
        missing -= 1
        if missing <= 0:
            combined.trigger([event.value for event in waited])

    for event in waited:
        event.then(one_more)
    if not waited:
        combined.trigger([])
    return combined


def first_of(kernel: Kernel, events: Iterable[Event]) -> Event:
    """Return an event that is triggered with the first of `events`; its value is (index, value)."""
    first = kernel.event()

    def happened(index: int, value: Any) -> None:
        if not first.happened:
            first.trigger((index, value))

    for index, event in enumerate(events):
        event.then(lambda value, index=index: happened(index, value))  # type: ignore[misc]
    return first


class Resource:
    """`capacity` equal slots, acquired first come, first served."""

    def __init__(self, kernel: Kernel, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self._kernel = kernel
        self._waiting: deque[Event] = deque()
        self.free = capacity
        self.capacity = capacity

    def acquire(self) -> Event:
        """Return an event that is triggered when a slot is acquired."""
        event = self._kernel.event()
        if self.free:
            self.free -= 1
            event.trigger()
        else:
            self._waiting.append(event)
        return event

    def release(self) -> None:
        """Release a slot; raise `RuntimeError` if all are free."""
        if self._waiting:
            self._waiting.popleft().trigger()
        elif self.free == self.capacity:
            raise RuntimeError("all slots are already free")
        else:
            self.free += 1


class Queue:
    """A first-in, first-out queue of items; waiting `get` calls are served in order."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._items: deque[Any] = deque()
        self._waiting: deque[Event] = deque()

    def put(self, item: Any) -> None:
        """Add an item; never blocks."""
        if self._waiting:
            self._waiting.popleft().trigger(item)
        else:
            self._items.append(item)

    def get(self) -> Event:
        """Return an event that is triggered with the next item."""
        event = self._kernel.event()
        if self._items:
            event.trigger(self._items.popleft())
        else:
            self._waiting.append(event)
        return event

    def __len__(self) -> int:
        return len(self._items)
