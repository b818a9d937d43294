"""`Indexes`: incremental indexes over the jobs, so that no event scans all of them.

They follow from the records; `check_indexes.index_violations` recomputes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from sortedcontainers import SortedDict, SortedList

from isthmus.control.algorithms.fair_order import FairOrder
from isthmus.core.pool_resource import PoolResource
from isthmus.core.priority import Priority
from isthmus.core.views.api_views import JobState

QueueKey = tuple[int, float, int]
"""A job's place in the queue: (rank of project and job, submission time in s, job number)."""

PRIORITY_RANK: dict[Priority, int] = {"high": 0, "middle": 1, "low": 2}


@dataclass(slots=True)
class Indexes:
    """Indexes of the jobs, and what the current event has changed. Times are seconds since the epoch.

    The sorted containers are annotated with the types of their items, which a snapshot checks.
    """

    # Job id by job number.
    ids_by_number: Annotated[SortedDict, int, str] = field(default_factory=SortedDict)
    # Job numbers by user.
    numbers_by_user: dict[str, Annotated[SortedList, int]] = field(default_factory=dict)
    # Number of jobs that have not ended, by user.
    live_by_user: dict[str, int] = field(default_factory=dict)
    # Bytes of the jobs of a user with their models, ended ones included.
    stored_by_user: dict[str, int] = field(default_factory=dict)
    # The queue: keys of the jobs that wait for chips, by arrival; `queue_order` says which starts first.
    order: Annotated[SortedList, QueueKey] = field(default_factory=SortedList)
    # The same keys by user.
    queued_by_user: dict[str, Annotated[SortedList, QueueKey]] = field(default_factory=dict)
    # The same keys by account of fair share: project, or user without one.
    queued_by_share: dict[str, Annotated[SortedList, QueueKey]] = field(default_factory=dict)
    # Keys of the jobs that a limit keeps out of the queue, by the account of the limit.
    capped: dict[str, Annotated[SortedList, QueueKey]] = field(default_factory=dict)
    # Accounts of which the current event has released chips, or changed the limits.
    released_accounts: set[str] = field(default_factory=set)
    # Numbers of the jobs that even the empty pool could not hold now.
    parked: set[int] = field(default_factory=set)
    # The `auto_plan` jobs that wait for the planner, by priority; users take turns (`PoolSet.planner_turns`).
    unplanned: FairOrder = field(default_factory=FairOrder)
    # Numbers of the jobs that wait until their user has chosen a plan.
    awaiting_choice: dict[int, None] = field(default_factory=dict)
    # Numbers of the jobs whose user waits for plans.
    interactive: dict[int, None] = field(default_factory=dict)
    # (deadline, job number) by state.
    deadlines: dict[JobState, Annotated[SortedList, tuple[float, int]]] = field(default_factory=dict)
    # Ids of the jobs in state `preparing`.
    preparing: dict[str, None] = field(default_factory=dict)
    # Ids of the jobs in state `preempting`.
    preempting: dict[str, None] = field(default_factory=dict)
    # Ids of the running jobs that more of their parts may join.
    elastic: dict[str, None] = field(default_factory=dict)
    # Ids of the waiting jobs whose sites have not answered their checks.
    checking: dict[str, None] = field(default_factory=dict)
    # Ids of the jobs that have victims.
    preemptors: dict[str, None] = field(default_factory=dict)
    # (expected end, job number) of the running jobs.
    expected_ends: Annotated[SortedList, tuple[float, int]] = field(default_factory=SortedList)
    # Ids of the `auto_plan` jobs with an open planner request.
    auto_planning: set[str] = field(default_factory=set)
    # Keys that the current event has added to the queue.
    newly_queued: dict[QueueKey, None] = field(default_factory=dict)
    # Amounts reserved for the jobs that must not be overtaken.
    reserved: dict[PoolResource, int] = field(default_factory=dict)
    # Numbers of these jobs.
    reservers: frozenset[int] = frozenset()
    # Ids of the jobs in the sites' queues, in order.
    advertised: tuple[str, ...] = ()
    # Number of events that freed capacity.
    freed_count: int = 0
    # Number of events that changed the connected chips, storage or links.
    inventory_version: int = 0
    # The current event freed something that a waiting job may need.
    capacity_freed: bool = False
    # The current event added capacity to the pool.
    capacity_added: bool = False
    # The current event changed the queue, from `queue_changed_from` on.
    queue_changed: bool = False
    queue_changed_from: QueueKey | None = None

    def in_head(self, key: QueueKey, count: int) -> bool:
        """Return whether a key is among the first `count` of the queue by arrival."""
        return len(self.order) <= count or key <= self.order[count - 1]
