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
from types import BuiltinMethodType, GeneratorType
from typing import Any


class Event:
    """An event that is triggered at most once and then passes its value to present and future waiters."""

    __slots__ = ("_callbacks", "_kernel", "triggered", "value")

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._callbacks: list[Callback] = []
        self.triggered = False
        self.value: Any = None

    def trigger(self, value: Any = None) -> None:
        """Trigger the event now; raise `RuntimeError` if it already was."""
        if self.triggered:
            raise RuntimeError("the event is already triggered")
        self.triggered, self.value = True, value
        for step in self._callbacks:
            self._kernel.call_at(self._kernel.now_s, step, value)
        self._callbacks.clear()

    def add_callback(self, callback: Callback) -> None:
        """Call `callback` with the value when the event is triggered, or now if it already is."""
        if self.triggered:
            self._kernel.call_at(self._kernel.now_s, callback, self.value)
        else:
            self._callbacks.append(callback)


Wait = float | Event | None
"""When a callback is to be called again: at a time, at an event, or (None) never."""
Callback = Callable[[Any], Wait]
"""A function that the kernel calls with a value; it returns when to call it again."""
ProcessGenerator = Generator[float | Event, Any, Any]
"""The generator of a process."""


class Kernel:
    """The virtual clock and its queue of callbacks. `num_events` counts the callbacks run so far."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self._queue: list[tuple[float, int, Callback, Any]] = []
        self._sequence = count()

    def start(self, process: ProcessGenerator) -> Event:
        """Start `process` now; return the event of its end, whose value is its return value."""
        end = Event(self)
        self.call_at(self.now_s, _run_to_end(process, end).send)
        return end

    def event(self) -> Event:
        """Return a new event of this kernel."""
        return Event(self)

    def call_at(self, time_s: float, callback: Callback, value: Any = None) -> None:
        """Call `callback(value)` at `time_s`; raise `ValueError` for a time in the past."""
        if time_s < self.now_s:
            raise ValueError(f"{time_s} s is in the past: it is {self.now_s} s")
        heapq.heappush(self._queue, (time_s, next(self._sequence), callback, value))

    def run(self, until_s: float = math.inf) -> float:
        """Run callbacks up to and including `until_s` (s), or until none is left; return the time.

        Raises `ValueError` for a wait until a time in the past, and `TypeError` for a wait that is neither a time
        nor an event; the `TypeError` names the file and line of the process that yields it.
        """
        due, order = self._queue, self._sequence
        pop, push, num_run = heapq.heappop, heapq.heappush, 0
        while due and due[0][0] <= until_s:
            self.now_s, _, step, value = pop(due)
            num_run += 1
            try:
                wait = step(value)
            except StopIteration:
                continue
            if wait.__class__ is float:
                if wait < self.now_s:
                    raise ValueError(f"{wait} s is in the past: it is {self.now_s} s")
                push(due, (wait, next(order), step, None))
            elif isinstance(wait, Event):
                wait.add_callback(step)
            elif wait is not None or (step.__class__ is BuiltinMethodType and _process_of(step)):
                raise TypeError(_describe_wrong_wait(step, wait))
        self.num_events += num_run
        if due:
            self.now_s = until_s
        return self.now_s


def _run_to_end(process: ProcessGenerator, end: Event) -> ProcessGenerator:
    end.trigger((yield from process))


def _process_of(step: Callback) -> GeneratorType[Any, Any, Any] | None:
    """Return the generator whose `send` is `step`; None for a callback that is a function."""
    process = getattr(step, "__self__", None)
    return process if isinstance(process, GeneratorType) else None


def _describe_wrong_wait(step: Callback, wait: object) -> str:
    """Return the message for a process or callback that returns `wait`, which is no `Wait`."""
    got, process = f"{wait!r} of type {type(wait).__name__}", _process_of(step)
    if process is None:
        return f"{step!r} returns {got}: return a time (a float in s), an Event, or None"
    while isinstance(process.gi_yieldfrom, GeneratorType):  # the generator that yields, below all `yield from`
        process = process.gi_yieldfrom
    line = process.gi_code.co_firstlineno if process.gi_frame is None else process.gi_frame.f_lineno
    where = f"{process.gi_code.co_filename}:{line}: process {process.gi_code.co_name!r}"
    return f"{where} yields {got}: yield a time (a float in s on the kernel's clock) or an Event"


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
        event.add_callback(one_more)
    if not waited:
        combined.trigger([])
    return combined


class Resource:
    """`capacity` equal slots, acquired first come, first served."""

    def __init__(self, kernel: Kernel, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self._kernel = kernel
        self._waiters: deque[Event] = deque()
        self.free = capacity
        self.capacity = capacity

    def acquire(self) -> Event:
        """Return an event that is triggered when a slot is acquired."""
        event = self._kernel.event()
        if self.free:
            self.free -= 1
            event.trigger()
        else:
            self._waiters.append(event)
        return event

    def release(self) -> None:
        """Release a slot; raise `RuntimeError` if all are free."""
        if self._waiters:
            self._waiters.popleft().trigger()
        elif self.free == self.capacity:
            raise RuntimeError("all slots are already free")
        else:
            self.free += 1
