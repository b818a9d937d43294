"""A discrete-event kernel: processes that wait for times and events, on one virtual clock.

    kernel = Kernel()

    def lorry(road: Resource) -> Steps:
        yield kernel.now + 2.0          # wait until a time (seconds on the kernel's clock)
        yield road.acquire()            # wait for an event
        yield kernel.now + 1.0
        road.release()

    kernel.start(lorry(Resource(kernel, 1)))
    kernel.run()

A process is a generator. It yields the time at which it wants to go on, or an `Event`, whose value it is then
sent. Things due at the same time happen in the order in which they were asked for, so that a run is a
function of its inputs alone. The kernel knows neither real time nor chance.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Generator, Iterable
from itertools import count
from typing import Any


class Event:
    """Something that happens at most once and then has a value for all who wait or will wait for it."""

    __slots__ = ("_kernel", "_waiting", "happened", "value")

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._waiting: list[Step] = []
        self.happened = False
        self.value: Any = None

    def trigger(self, value: Any = None) -> None:
        """Let it happen now; raise `RuntimeError` if it already has."""
        if self.happened:
            raise RuntimeError("an event happens once")
        self.happened, self.value = True, value
        for step in self._waiting:
            self._kernel.call(self._kernel.now, step, value)
        self._waiting.clear()

    def then(self, step: Step) -> None:
        """Call `step` with the value as soon as it happens: now, if it already has."""
        if self.happened:
            self._kernel.call(self._kernel.now, step, self.value)
        else:
            self._waiting.append(step)


Wish = float | Event | None
"""What a step asks for: to be called again at a time, at an event, or (None) not at all."""
Step = Callable[[Any], Wish]
Steps = Generator[float | Event, Any, Any]
"""The type of a process's generator."""


class Kernel:
    """The clock and what is due on it. `num_events` counts the steps taken so far."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._due: list[tuple[float, int, Step, Any]] = []
        self._order = count()

    def start(self, process: Steps) -> Event:
        """Start `process` now; return the event of its end, whose value is what it returns."""
        end = Event(self)
        self.call(self.now, _closing(process, end).send)
        return end

    def event(self) -> Event:
        """Return an event of this kernel."""
        return Event(self)

    def call(self, time_s: float, step: Step, value: Any = None) -> None:
        """Call `step(value)` at `time_s`; raise `ValueError` for a time that has passed."""
        if time_s < self.now:
            raise ValueError(f"it is {self.now} s; {time_s} s has passed")
        heapq.heappush(self._due, (time_s, next(self._order), step, value))

    def run(self, until_s: float = math.inf) -> float:
        """Run until nothing is due, or until `until_s`; return the time. What is due at `until_s` runs."""
        due, order = self._due, self._order
        pop, push, taken = heapq.heappop, heapq.heappush, 0
        while due and due[0][0] <= until_s:
            self.now, _, step, value = pop(due)
            taken += 1
            try:
                wish = step(value)
            except StopIteration:
                continue
            if wish.__class__ is float:
                if wish < self.now:
                    raise ValueError(f"it is {self.now} s; {wish} s has passed")
                push(due, (wish, next(order), step, None))
            elif wish is not None:
                wish.then(step)  # type: ignore[union-attr]
        self.num_events += taken
        if due:
            self.now = until_s
        return self.now


def _closing(process: Steps, end: Event) -> Steps:
    end.trigger((yield from process))


def all_of(kernel: Kernel, events: Iterable[Event]) -> Event:
    """Return the event of all `events` having happened; its value is the list of theirs, in their order."""
    waited = list(events)
    both, missing = kernel.event(), len(waited)

    def one_more(_: Any) -> None:
        nonlocal missing
        missing -= 1
        if missing <= 0:
            both.trigger([event.value for event in waited])

    for event in waited:
        event.then(one_more)
    if not waited:
        both.trigger([])
    return both


def first_of(kernel: Kernel, events: Iterable[Event]) -> Event:
    """Return the event of the first of `events`; its value is (index, value)."""
    first = kernel.event()

    def happened(index: int, value: Any) -> None:
        if not first.happened:
            first.trigger((index, value))

    for index, event in enumerate(events):
        event.then(lambda value, index=index: happened(index, value))  # type: ignore[misc]
    return first


class Resource:
    """`capacity` equal places, given to those who asked first."""

    def __init__(self, kernel: Kernel, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a resource of capacity {capacity}")
        self._kernel = kernel
        self._waiting: deque[Event] = deque()
        self.free = capacity
        self.capacity = capacity

    def acquire(self) -> Event:
        """Return the event of having a place."""
        event = self._kernel.event()
        if self.free:
            self.free -= 1
            event.trigger()
        else:
            self._waiting.append(event)
        return event

    def release(self) -> None:
        """Give a place back; raise `RuntimeError` if all are free."""
        if self._waiting:
            self._waiting.popleft().trigger()
        elif self.free == self.capacity:
            raise RuntimeError("every place is free already")
        else:
            self.free += 1


class Queue:
    """Items in order: whoever asked first gets the oldest."""

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
        """Return the event of getting an item."""
        event = self._kernel.event()
        if self._items:
            event.trigger(self._items.popleft())
        else:
            self._waiting.append(event)
        return event

    def __len__(self) -> int:
        return len(self._items)
