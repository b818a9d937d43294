"""What the server shows users: the bodies of the REST interface, shared by server and command line."""

from __future__ import annotations

from typing import Literal

from isthmus.core.base import Count, Frozen, Index, Name, NotNegative
from isthmus.core.job import Job
from isthmus.core.messages.agent_messages import LogChunk, StepMetrics
from isthmus.core.model import Model
from isthmus.core.plan import Plan, PlanSet
from isthmus.core.pool import Cluster, Link

JobState = Literal[
    "planning",  # the planner has been asked
    "choosing",  # candidate plans exist; the user (or the policy) chooses
    "waiting",  # no plan fits now; tried again when the pool changes
    "blocked",  # the plan it has to run by does not fit now; starts when it does
    "preempting",  # its sites get ready to take the place of others, who are being protected
    "preparing",  # cards are being held at every site of the chosen plan
    "starting",  # committed everywhere; workers check in
    "running",
    "stopping",  # releasing every part, to restart, to end or to be cancelled
    "succeeded",
    "failed",
    "cancelled",
]


class Submission(Frozen):
    """A job with the dimensions of its model, read where the user has it. `key` makes a retry harmless."""

    job: Job
    model: Model
    key: str = ""


class PartView(Frozen):
    """One part of the present attempt: what is wanted of it and what its site last reported."""

    cluster: Name
    owner: Name
    ranks: tuple[Index, ...]
    desired: str
    observed: str
    detail: str = ""


class VictimView(Frozen):
    """Whose chips a waiting job could have: a job of the pool, or (`attempt` 0) a local job of the site.

    `chips` are those that it would give up, by node group; `unsaved_s` is the work that it would lose if it
    were ended now (a job of the pool is protected before that).
    """

    cluster: Name
    owner: Name
    job: Name
    attempt: Index = 0
    chips: dict[Name, Index]
    unsaved_s: NotNegative = 0.0


class JobView(Frozen):
    """A job as its user sees it. `reason` says why it waits or how it ended.

    `place` is its place in the queue, 1 the first; `offer` names whose chips it could have now, if its user
    agrees, and `victims` those whose place it is taking.
    """

    id: Name
    name: Name
    user: Name
    state: JobState
    reason: str = ""
    attempt: Index = 0
    restarts: Index = 0
    submitted_s: float
    changed_s: float
    job: Job
    plan: Plan | None = None
    plans: PlanSet | None = None
    parts: tuple[PartView, ...] = ()
    place: Count | None = None
    offer: tuple[VictimView, ...] = ()
    victims: tuple[VictimView, ...] = ()


class ClusterView(Frozen):
    """A cluster as the pool knows it: `connected` while its agent has reported lately.

    `queue` is the order in which the pool's jobs should stand in its queue, `misplaced` the number of them
    that it last reported elsewhere.
    """

    cluster: Cluster
    connected: bool
    free_chips: dict[Name, Index]
    free_storage_bytes: Index | None = None
    queue: tuple[Name, ...] = ()
    misplaced: Index = 0
    last_report_s: float | None = None


class PoolView(Frozen):
    """The pool as it stands."""

    clusters: tuple[ClusterView, ...]
    links: tuple[Link, ...]


class MetricsPage(Frozen):
    """Step metrics after a cursor; ask again with `after=next`."""

    metrics: tuple[StepMetrics, ...]
    next: Index


class LogPage(Frozen):
    """Log text after a cursor; ask again with `after=next`."""

    chunks: tuple[LogChunk, ...]
    next: Index


class TokenRequest(Frozen):
    """Ask for a token of an owner (its agents) or of a user (submits jobs); only an admin may."""

    role: Literal["admin", "owner", "user"]
    name: Name


class TokenView(Frozen):
    """A new token: shown once, stored hashed."""

    role: Literal["admin", "owner", "user"]
    name: Name
    token: str


class Health(Frozen):
    """Answer of the open endpoint `/v1/health`."""

    protocol: Count
    version: str
