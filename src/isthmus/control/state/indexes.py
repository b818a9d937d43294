"""`Indexes`: incremental indexes over the jobs, so that no event scans all of them.

They follow from the records; `check_indexes.indexes_agree` recomputes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from sortedcontainers import SortedDict, SortedList

from isthmus.core.messages.api_views import JobState
from isthmus.core.priority import Priority

Key = tuple[int, float, int]
"""A job's place in the queue: (priority rank, submission time in s, job number)."""

RANK: dict[Priority, int] = {"high": 0, "middle": 1, "low": 2}


@dataclass(slots=True)
class Indexes:
    """Indexes of the jobs, and what the current event has changed. Times are seconds since the epoch."""

    # Job id by job number.
    numbers: SortedDict = field(default_factory=SortedDict)
    # Job numbers by user.
    of_user: dict[str, SortedList] = field(default_factory=dict)
    # The queue: keys of the jobs that wait for chips, first to start first.
    order: SortedList = field(default_factory=SortedList)
    # Numbers of the jobs that even the empty pool could not hold now.
    parked: set[int] = field(default_factory=set)
    # Keys of the `auto` jobs that wait for the planner.
    unplanned: SortedList = field(default_factory=SortedList)
    # Numbers of the jobs that wait until their user has chosen a plan.
    undecided: dict[int, None] = field(default_factory=dict)
    # Numbers of the jobs whose user waits for plans.
    curious: dict[int, None] = field(default_factory=dict)
    # (deadline, job number) by state.
    timed: dict[JobState, SortedList] = field(default_factory=dict)
    # Ids of the jobs in state `preparing`.
    preparing: dict[str, None] = field(default_factory=dict)
    # Ids of the jobs in state `preempting`.
    preempting: dict[str, None] = field(default_factory=dict)
    # Ids of the jobs that have victims.
    claiming: dict[str, None] = field(default_factory=dict)
    # (expected end, job number) of the running jobs.
    ending: SortedList = field(default_factory=SortedList)
    # Ids of the `auto` jobs with an open planner request.
    asked: set[str] = field(default_factory=set)
    # Keys that the current event has added to the queue.
    joined: dict[Key, None] = field(default_factory=dict)
    # Amounts reserved for the jobs that must not be overtaken, by resource key.
    kept: dict[str, int] = field(default_factory=dict)
    # Numbers of these jobs.
    keepers: frozenset[int] = frozenset()
    # Ids of the jobs in the sites' queues, in order.
    pushed: tuple[str, ...] = ()
    # Number of events that freed capacity.
    growths: int = 0
    # Number of events that changed the connected chips, storage or links.
    inventory: int = 0
    # The current event freed something that a waiting job may need.
    grown: bool = False
    # The current event added capacity to the pool.
    widened: bool = False
    # The current event changed the queue, from `changed_from` on.
    changed: bool = False
    changed_from: Key | None = None

    def head(self, count: int) -> Iterator[Key]:
        """Yield the first `count` keys of the queue."""
        return islice(iter(self.order), count)

    def is_head(self, key: Key, count: int) -> bool:
        """Return whether a key is among the first `count` of the queue."""
        return len(self.order) <= count or key <= self.order[count - 1]
