"""`LocalScheduler`: the batch scheduler of a simulated site. It assigns job ids and reuses them.

An agent identifies its jobs by name, never by id alone: a reply with an id may be lost, and an id may have
been reused for another job.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from isthmus.control.simulation.faults.fault_rates import Faults
from isthmus.site import PartKey


@dataclass(eq=False)
class Work:
    """A scheduler job named `key`. Its workers check in at `checked_in_s`."""

    key: PartKey
    state: Literal["running", "exited"] = "running"
    status: int = 0
    checked_in_s: float = 0.0


class LocalScheduler:
    """Scheduler jobs by id. `starts` counts the starts of each name; more than one is an error."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._table: dict[int, Work] = {}
        self._names: dict[PartKey, int] = {}
        self._ids: dict[PartKey, int] = {}
        self._next = 1
        self.starts: dict[PartKey, int] = {}

    def start(self, key: PartKey, checked_in_s: float) -> bool:
        """Start a job unless its name is already taken; return whether it was started."""
        if self.find(key) is not None:
            return False
        self._enter(Work(key, checked_in_s=checked_in_s))
        self.starts[key] = self.starts.get(key, 0) + 1
        return True

    def bar(self, key: PartKey) -> Work:
        """Record an unused name as exited, so that it can never start."""
        return self._enter(Work(key, state="exited", status=143))

    def _enter(self, work: Work) -> Work:
        number = self._number()
        self._table[number], self._names[work.key] = work, number
        if not self._faults.strikes("lost local job id"):
            self._ids[work.key] = number
        return work

    def find(self, key: PartKey) -> Work | None:
        """Return the job of a name: by the remembered id if that is still its own, else by name."""
        work = self._table.get(self._ids.get(key, 0))
        if work is not None and work.key == key:
            return work
        number = self._names.get(key)
        if number is None:
            return None
        self._ids[key] = number
        return self._table[number]

    def end(self, key: PartKey, status: int) -> bool:
        """End a running job; return whether there was one."""
        work = self.find(key)
        if work is None or work.state == "exited":
            return False
        work.state, work.status = "exited", status
        return True

    def forget(self, key: PartKey) -> None:
        """Remove an ended job; its id becomes free."""
        number = self._names.pop(key, None)
        if number is not None:
            del self._table[number]

    def forget_all(self) -> None:
        """Forget all remembered ids, as a crashed agent does."""
        self._ids.clear()

    def _number(self) -> int:
        if self._faults.strikes("re-used local job id"):
            free = [number for number in self._ids.values() if number not in self._table]
            if free:
                return free[0]
        self._next += 1
        return self._next
