"""`QueueStatus`: queue position, missing resources and expected start of a job; `DryRun`."""

from __future__ import annotations

from pydantic import Field

from isthmus.core.base_model import FrozenModel, Name, NonNegativeInt, PositiveInt
from isthmus.core.messages.preflight import SitePreflight
from isthmus.core.plan import PlanSet, Refusal
from isthmus.core.priority import Priority
from isthmus.core.views.api_views import JobState, VictimView


class JobAhead(FrozenModel):
    """A job ahead in the queue. `job` is None if it belongs to another user."""

    job: Name | None = None
    state: JobState
    priority: Priority


class QueueStatus(FrozenModel):
    """Queue status of a job that has not started.

    `place` is its position among the jobs that wait for chips, from 1 (None: not in the queue, see `reason`).
    `refused` lists missing resources by co-scheduling filter and owner. `needs` counts the chips that it
    waits for, by cluster and node group. `ahead` lists the first jobs before it on the same node groups.
    `start_s` is the expected start; `earliest_s` to `latest_s` is the 90 % interval if run times deviate by
    up to 20 % (seconds since the epoch; None: unknown). `notes` state the assumptions.
    """

    id: Name
    name: Name
    user: Name
    state: JobState
    priority: Priority
    submitted_s: float
    reason: str = ""
    place: PositiveInt | None = None
    refused: tuple[Refusal, ...] = ()
    needs: dict[Name, dict[Name, NonNegativeInt]] = Field(default_factory=dict)
    ahead: tuple[JobAhead, ...] = ()
    start_s: float | None = None
    earliest_s: float | None = None
    latest_s: float | None = None
    notes: tuple[str, ...] = ()


class QueuePage(FrozenModel):
    """Jobs with a place in the queue that the caller sees, from the one at index `start` on; `length` in all."""

    start: NonNegativeInt
    length: NonNegativeInt
    jobs: tuple[QueueStatus, ...]


class DryRun(FrozenModel):
    """Result of a dry-run submission; the pool is unchanged.

    If no plan fits the free chips, `plans` are those that the job would wait for. `standing` is the queue
    status of the first plan; `victims` are the jobs it could preempt to start that plan at once (empty: no
    preemption needed, or none would suffice). `preflight` are the checks of its files at the sites of the first plan.
    """

    plans: PlanSet
    standing: QueueStatus
    victims: tuple[VictimView, ...] = ()
    preflight: tuple[SitePreflight, ...] = ()
