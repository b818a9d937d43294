"""`SimulatedScheduler`: the batch scheduler of a simulated site. It assigns job ids and reuses them.

An agent identifies its jobs by name, never by id alone: a reply with an id may be lost, and an id may have
been reused for another job.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from isthmus.control.simulation.faults.fault_injector import FaultInjector
from isthmus.site import PartKey


@dataclass(eq=False)
class SchedulerJob:
    """A scheduler job named `key`. Its workers check in at `checked_in_s`."""

    key: PartKey
    state: Literal["running", "exited"] = "running"
    exit_status: int = 0
    checked_in_s: float = 0.0


class SimulatedScheduler:
    """Scheduler jobs by id. `start_counts` counts the starts of each name; more than one is an error."""

    def __init__(self, faults: FaultInjector) -> None:
        self._faults = faults
        self._jobs_by_id: dict[int, SchedulerJob] = {}
        self._id_by_key: dict[PartKey, int] = {}
        self._remembered_ids: dict[PartKey, int] = {}
        self._last_id = 1
        self.start_counts: dict[PartKey, int] = {}

    def start(self, key: PartKey, checked_in_s: float) -> bool:
        """Start a job unless its name is already taken; return whether it was started."""
        if self.find(key) is not None:
            return False
        self._add(SchedulerJob(key, checked_in_s=checked_in_s))
        self.start_counts[key] = self.start_counts.get(key, 0) + 1
        return True

    def block_start(self, key: PartKey) -> SchedulerJob:
        """Record an unused name as exited, so that it can never start."""
        return self._add(SchedulerJob(key, state="exited", exit_status=143))

    def _add(self, work: SchedulerJob) -> SchedulerJob:
        number = self._draw_id()
        self._jobs_by_id[number], self._id_by_key[work.key] = work, number
        if not self._faults.should_inject("lost local job id"):
            self._remembered_ids[work.key] = number
        return work

    def find(self, key: PartKey) -> SchedulerJob | None:
        """Return the job of a name: by the remembered id if that is still its own, else by name."""
        work = self._jobs_by_id.get(self._remembered_ids.get(key, 0))
        if work is not None and work.key == key:
            return work
        number = self._id_by_key.get(key)
        if number is None:
            return None
        self._remembered_ids[key] = number
        return self._jobs_by_id[number]

    def end(self, key: PartKey, status: int) -> bool:
        """End a running job; return whether there was one."""
        work = self.find(key)
        if work is None or work.state == "exited":
            return False
        work.state, work.exit_status = "exited", status
        return True

    def remove(self, key: PartKey) -> None:
        """Remove an ended job; its id becomes free."""
        number = self._id_by_key.pop(key, None)
        if number is not None:
            del self._jobs_by_id[number]

    def forget_ids(self) -> None:
        """Forget all remembered ids, as a crashed agent does."""
        self._remembered_ids.clear()

    def _draw_id(self) -> int:
        if self._faults.should_inject("re-used local job id"):
            free = [number for number in self._remembered_ids.values() if number not in self._jobs_by_id]
            if free:
                return free[0]
        self._last_id += 1
        return self._last_id
