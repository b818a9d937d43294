"""`LocalScheduler`: a simulated site's own scheduler. It knows work by ids of its own, which it uses again.

An agent finds its work by the name that it gave it, never by the id alone: an answer with an id may get lost,
and an id may by now be somebody else's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from isthmus.control.simulation.faults.fault_rates import Faults
from isthmus.site import PartKey


@dataclass(eq=False)
class Work:
    """What runs, or ran, under the name `key`. `checked_in_s` is when its workers can be reached."""

    key: PartKey
    state: Literal["running", "exited"] = "running"
    status: int = 0
    checked_in_s: float = 0.0


class LocalScheduler:
    """Work by local id. `starts` counts how often each name was started: once, or something is wrong."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._table: dict[int, Work] = {}
        self._names: dict[PartKey, int] = {}
        self._ids: dict[PartKey, int] = {}
        self._next = 1
        self.starts: dict[PartKey, int] = {}

    def start(self, key: PartKey, checked_in_s: float) -> bool:
        """Start work under a name that nothing was started under; tell whether it was started now."""
        if self.find(key) is not None:
            return False
        self._enter(Work(key, checked_in_s=checked_in_s))
        self.starts[key] = self.starts.get(key, 0) + 1
        return True

    def bar(self, key: PartKey) -> Work:
        """See to it that nothing will ever start under a name that nothing was started under."""
        return self._enter(Work(key, state="exited", status=143))

    def _enter(self, work: Work) -> Work:
        number = self._number()
        self._table[number], self._names[work.key] = work, number
        if not self._faults.strikes("lost local job id"):
            self._ids[work.key] = number
        return work

    def find(self, key: PartKey) -> Work | None:
        """Return the work of a name: by its id where that is still its own, else by its name."""
        work = self._table.get(self._ids.get(key, 0))
        if work is not None and work.key == key:
            return work
        number = self._names.get(key)
        if number is None:
            return None
        self._ids[key] = number
        return self._table[number]

    def end(self, key: PartKey, status: int) -> bool:
        """End running work; tell whether there was any."""
        work = self.find(key)
        if work is None or work.state == "exited":
            return False
        work.state, work.status = "exited", status
        return True

    def forget(self, key: PartKey) -> None:
        """Drop what is known of ended work; its id is free."""
        number = self._names.pop(key, None)
        if number is not None:
            del self._table[number]

    def forget_all(self) -> None:
        """Lose every id: the agent that knew them is dead."""
        self._ids.clear()

    def _number(self) -> int:
        if self._faults.strikes("re-used local job id"):
            free = [number for number in self._ids.values() if number not in self._table]
            if free:
                return free[0]
        self._next += 1
        return self._next
