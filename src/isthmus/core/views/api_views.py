"""Bodies of the REST API, shared by server and command line."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from isthmus.core.base_model import FrozenModel, Name, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from isthmus.core.job import Job
from isthmus.core.messages.agent_messages import LogChunk, StepMetrics
from isthmus.core.messages.preflight import SitePreflight
from isthmus.core.model import Model
from isthmus.core.plan import Plan, PlanSet
from isthmus.core.pool import Cluster, Link
from isthmus.core.views.site_views import DutyView

JobState = Literal[
    "planning",  # the plan search runs
    "choosing",  # candidate plans exist; the user or the policy chooses one
    "waiting",  # no plan fits now; retried when the pool changes
    "blocked",  # the chosen plan does not fit now; starts when it does
    "preempting",  # its sites reserve devices while its victims are checkpointed
    "preparing",  # every site of the chosen plan reserves devices
    "starting",  # all sites have committed; workers check in
    "running",
    "stopping",  # all parts are released, to restart, end or cancel
    "succeeded",
    "failed",
    "cancelled",
]


class Submission(FrozenModel):
    """A job and its model's dimensions, which the client reads. `key` is the idempotency key of retries."""

    job: Job
    model: Model
    key: str = ""


class PartView(FrozenModel):
    """One part of the current attempt: its desired state and the state last reported by its site.

    `waiting` says what a rank of it waits for, since `waiting_since_s` (epoch).
    """

    cluster: Name
    owner: Name
    ranks: tuple[NonNegativeInt, ...]
    desired: str
    observed: str
    detail: str = ""
    waiting: str = ""
    waiting_since_s: float | None = None


class VictimView(FrozenModel):
    """A preemption victim: a pool job, or (`attempt` 0) a local job of the site.

    `chips` counts the chips that it would release, by node group; `unsaved_s` is its work since the last
    checkpoint (a pool job is checkpointed before it is stopped).
    """

    cluster: Name
    owner: Name
    job: Name
    attempt: NonNegativeInt = 0
    chips: dict[Name, NonNegativeInt]
    unsaved_s: NonNegativeFloat = 0.0


class JobView(FrozenModel):
    """A job as shown to its user. `reason` says why it waits or how it ended.

    `restarts` counts attempts after the first that failures caused, `worker_restarts` worker processes that were
    replaced within an attempt. `place` is its queue position, from 1; `offer` lists the jobs that it could preempt
    now if its user agrees, and `victims` the jobs that it is preempting. `preflight` are the checks at the sites of
    its last plan.
    """

    id: Name
    name: Name
    user: Name
    state: JobState
    reason: str = ""
    attempt: NonNegativeInt = 0
    restarts: NonNegativeInt = 0
    worker_restarts: NonNegativeInt = 0
    submitted_s: float
    changed_s: float
    job: Job
    plan: Plan | None = None
    plans: PlanSet | None = None
    preflight: tuple[SitePreflight, ...] = ()
    parts: tuple[PartView, ...] = ()
    place: PositiveInt | None = None
    offer: tuple[VictimView, ...] = ()
    victims: tuple[VictimView, ...] = ()


HistoryKind = Literal[
    "submitted",
    "planned",  # candidate plans exist
    "waiting",  # it waits for a plan, a choice or resources
    "brought",  # every site of the plan has its copies of the catalogue's model and data
    "preempting",  # it takes the chips of other jobs, which save a checkpoint first
    "reserving",  # every site of the plan reserves devices
    "held",  # all sites hold their devices; workers start
    "started",  # all ranks have checked in
    "resumed",  # training continues from a snapshot or checkpoint
    "checkpoint",  # a checkpoint of all ranks is on disk
    "worker-lost",  # a worker process died; it is replaced while the others wait
    "stalled",  # a worker makes no progress
    "left",  # a site that decoded for it is gone; it goes on without
    "joined",  # a site decodes for it that had left, or whose chips were not free at its start
    "lost",  # an attempt failed after its start
    "refused",  # an attempt ended before its start
    "preempted",  # another job, or the site's owner, takes its chips
    "moved",  # it is stopped, with a checkpoint, and goes on at once on other devices of its sites
    "stopping",  # all sites release the job
    "finished",
    "failed",
    "cancelled",
]
"""What happened to a job."""


class HistoryEvent(FrozenModel):
    """One event of a job's history. `number` rises within the job, from 1; gaps are events that others replaced.

    `time_s` is when it happened, in seconds since the epoch: on the site's clock for what a worker reports, never
    after the server received it. `job` is the other job of a preemption; `step` counts finished steps.
    """

    number: PositiveInt
    time_s: float
    kind: HistoryKind
    attempt: NonNegativeInt = 0
    text: str = ""
    cluster: Name | None = None
    rank: NonNegativeInt | None = None
    step: NonNegativeInt | None = None
    seconds: NonNegativeFloat | None = None
    job: Name | None = None


class HistoryPage(FrozenModel):
    """Events of a job after a cursor, in order of arrival; request the next page with `after=next`.

    The server keeps the newest events of a job; `dropped` of the older ones are gone.
    """

    events: tuple[HistoryEvent, ...]
    next: NonNegativeInt
    dropped: NonNegativeInt = 0


class JobFilter(FrozenModel):
    """Which jobs a listing contains: those that meet every field that is given.

    `state` admits any of its states, `owner` jobs whose plan uses a cluster of that owner; `since_s` is the earliest
    time of submission (seconds since the epoch).
    """

    state: tuple[JobState, ...] = ()
    name: Name | None = None
    user: Name | None = None
    owner: Name | None = None
    since_s: NonNegativeFloat | None = None


NEXT_JOB_HEADER = "Isthmus-Next-Job"
"""Response header of a listing that continues: pass its value as `after`."""


class UnknownPart(FrozenModel):
    """A part that runs at a site and that the server's log does not have since it was restored from a backup."""

    job: Name
    attempt: PositiveInt


class AgentView(FrozenModel):
    """The agent that a cluster is bound to. `id` is a short form; `host` is where the site's workers listen.

    `run_lease_s`: its workers end themselves this long after the last contact with the server (0: they do not).
    """

    id: str
    enrolled_s: float
    session: NonNegativeInt
    session_s: float
    host: str | None = None
    gone: bool = False
    enrolling: bool = False
    run_lease_s: float = 0.0


class ClusterView(FrozenModel):
    """The pool's view of a cluster; `connected` while its agent reports regularly.

    `queue` is the desired order of pool jobs in its queue, `misplaced` the number of them out of order in the
    last report. `jobs` may have processes there; of a lost site the server counts them as ended at `released_at_s`.
    After a restore of the server from a backup, `awaited` sites have not reported since, and `unknown_parts` run
    although the log does not have them. `duty` says whether the site takes new parts.
    """

    cluster: Cluster
    connected: bool
    free_chips: dict[Name, NonNegativeInt]
    free_storage_bytes: NonNegativeInt | None = None
    queue: tuple[Name, ...] = ()
    misplaced: NonNegativeInt = 0
    last_report_s: float | None = None
    awaited: bool = False
    unknown_parts: tuple[UnknownPart, ...] = ()
    agent: AgentView | None = None
    released_at_s: float | None = None
    jobs: tuple[Name, ...] = ()
    duty: DutyView = DutyView()


class LinkUse(FrozenModel):
    """What jobs have reserved of one direction of a link of the operator's pool file, by their plans' predictions."""

    source: Name = Field(alias="from")
    target: Name = Field(alias="to")
    reserved_gbps: NonNegativeFloat


class PoolView(FrozenModel):
    """The current state of the pool: `links` are the operator's, `measured` those that the sites' agents measured.

    `use` lists the links of which jobs have reserved bandwidth.
    """

    clusters: tuple[ClusterView, ...]
    links: tuple[Link, ...]
    measured: tuple[Link, ...] = ()
    use: tuple[LinkUse, ...] = ()

    @property
    def known_links(self) -> tuple[Link, ...]:
        """Every link: no pair of clusters has both kinds."""
        return (*self.links, *self.measured)


class MetricsPage(FrozenModel):
    """Step metrics after a cursor; request the next page with `after=next`."""

    metrics: tuple[StepMetrics, ...]
    next: NonNegativeInt


class LogPage(FrozenModel):
    """Log text after a cursor; request the next page with `after=next`."""

    chunks: tuple[LogChunk, ...]
    next: NonNegativeInt


MAX_TOKEN_LIFE_S = 10 * 365 * 86400.0
"""Longest validity of a token."""


class TokenRequest(FrozenModel):
    """Request for a token (admin only): `owner` for the owner's agents, `user` to submit jobs.

    It expires `expires_in_s` after its creation; without it, never.
    """

    role: Literal["admin", "owner", "user"]
    name: Name
    expires_in_s: Annotated[PositiveFloat, Field(le=MAX_TOKEN_LIFE_S)] | None = None


class TokenView(FrozenModel):
    """A new token; shown once, stored as a hash. `id` is no secret; `expires_s` is in seconds since the epoch."""

    role: Literal["admin", "owner", "user"]
    name: Name
    token: str
    id: str = ""
    expires_s: float | None = None


class Health(FrozenModel):
    """Response of the unauthenticated endpoint `/v1/health`."""

    protocol: PositiveInt
    version: str
