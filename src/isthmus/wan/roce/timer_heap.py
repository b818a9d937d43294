"""`TimerHeap`: the earliest due time of many objects, each with one timer."""

from __future__ import annotations

import heapq
import math
from typing import Generic, Protocol, TypeVar


class Timed(Protocol):
    """An object with a timer; the heap alone writes `timer_s`, infinite while none is set."""

    timer_s: float


T = TypeVar("T", bound=Timed)


class TimerHeap(Generic[T]):
    """Timers of objects of one kind."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._count = 0

    @property
    def next_s(self) -> float:
        """When the first timer is due, infinite for never."""
        heap = self._heap
        while heap and heap[0][2].timer_s != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else math.inf

    def set(self, owner: T, due_s: float) -> None:
        """Set the timer of `owner`, unless it is due earlier."""
        if due_s < owner.timer_s:
            owner.timer_s = due_s
            self._count += 1
            heapq.heappush(self._heap, (due_s, self._count, owner))

    def pop_due(self, now_s: float) -> list[T]:
        """Return the objects whose timers are due; they have none now."""
        found: list[T] = []
        while self.next_s <= now_s and self._heap:
            owner = heapq.heappop(self._heap)[2]
            owner.timer_s = math.inf
            found.append(owner)
        return found
