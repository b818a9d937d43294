"""`Indexes`: who stands where, kept up step by step so that no event looks through all jobs.

Everything here follows from the records; `index_checks.indexes_agree` computes it anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from sortedcontainers import SortedDict, SortedList

from isthmus.core.messages.api_views import JobState
from isthmus.core.priority import Priority

Key = tuple[int, float, int]
"""A job's place in the queue: its priority's rank, when it was submitted, its number."""

RANK: dict[Priority, int] = {"high": 0, "middle": 1, "low": 2}


@dataclass(slots=True)
class Indexes:
    """Places of jobs. All times are seconds since the epoch.

    `numbers` maps a job's number to its id, `of_user` holds each user's numbers. `order` is the queue:
    the keys of the jobs that wait for chips, first to start first; `parked` those that not even an empty pool
    could hold now. `unplanned` are the keys of jobs that take their plan by themselves and want one,
    `curious` the numbers of those that want plans at once, `asked` the ids of the former about whom the
    planner is being asked; `undecided` the numbers of those that wait until their user has chosen
    a plan. `timed` holds (deadline, number) by state; `preparing`, `preempting` the ids of
    jobs in these states, `claiming` of those that have named victims; `ending` (when a running job should
    end, number); `pushed` the ids of the jobs that stand in sites' queues, in their order.

    Of the event in hand: `joined` are the keys that have come into the queue, `grown` says that something has
    become free that a waiting job may need, `widened` that the pool has more than before, `changed` that the
    queue is another, from the place `changed_from` on. `kept` is what is kept for the jobs that may not be
    overtaken, by resource, `keepers` are their numbers. `growths` counts the events after which something had
    become free, `inventory` those after which other chips were connected.
    """

    numbers: SortedDict = field(default_factory=SortedDict)
    of_user: dict[str, SortedList] = field(default_factory=dict)
    order: SortedList = field(default_factory=SortedList)
    parked: set[int] = field(default_factory=set)
    unplanned: SortedList = field(default_factory=SortedList)
    undecided: dict[int, None] = field(default_factory=dict)
    curious: dict[int, None] = field(default_factory=dict)
    timed: dict[JobState, SortedList] = field(default_factory=dict)
    preparing: dict[str, None] = field(default_factory=dict)
    preempting: dict[str, None] = field(default_factory=dict)
    claiming: dict[str, None] = field(default_factory=dict)
    ending: SortedList = field(default_factory=SortedList)
    asked: set[str] = field(default_factory=set)
    joined: dict[Key, None] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    keepers: frozenset[int] = frozenset()
    pushed: tuple[str, ...] = ()
    growths: int = 0
    inventory: int = 0
    grown: bool = False
    widened: bool = False
    changed: bool = False
    changed_from: Key | None = None

    def head(self, count: int) -> Iterator[Key]:
        """Yield the first `count` keys of the queue."""
        return islice(iter(self.order), count)

    def is_head(self, key: Key, count: int) -> bool:
        """Tell whether a key is among the first `count` of the queue."""
        return len(self.order) <= count or key <= self.order[count - 1]
