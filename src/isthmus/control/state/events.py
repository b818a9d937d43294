"""The inputs (`Event`) and outputs (`Instruction`) of the coordinator, as frozen data.

Events are facts. The server stores an event before it acts on it or replies, so replaying the log always
rebuilds the pool state. Every event carries the time at which it was received, `now_s` (seconds since the
epoch); the coordinator has no clock.
"""

from __future__ import annotations

import json
from typing import Annotated, Literal, get_args

from pydantic import Field, TypeAdapter, ValidationError

from isthmus.control.algorithms.global_order import Objective
from isthmus.core.base import Count, Frozen, Index, Name, NotNegative
from isthmus.core.errors import ProtocolError
from isthmus.core.messages.agent_messages import AgentReport, LocalJobSeen, ObservedPart, QueueEntry
from isthmus.core.messages.api_views import Submission
from isthmus.core.plan import PlanSet
from isthmus.core.pool import Cluster, Link

EVENT_VERSION = 1
"""Version of the event encoding. Increase it with every change that an older server would misread."""


class _Fact(Frozen):
    now_s: float


class JobSubmitted(_Fact):
    """A user submitted a job; the server generated `job_id`. The same user and key mean the same job."""

    kind: Literal["job-submitted"] = "job-submitted"
    job_id: Name
    user: Name
    submission: Submission


class PlansMade(_Fact):
    """The planner answered the `MakePlans` request of this `round`."""

    kind: Literal["plans-made"] = "plans-made"
    job_id: Name
    round: Count
    plans: PlanSet


class PlanningFailed(_Fact):
    """The planner failed on this job (not: found no plan); the job fails with `reason`."""

    kind: Literal["planning-failed"] = "planning-failed"
    job_id: Name
    round: Count
    reason: str


class PlanChosen(_Fact):
    """The user chose one of the candidate plans."""

    kind: Literal["plan-chosen"] = "plan-chosen"
    job_id: Name
    plan_id: Name


class VictimNamed(Frozen):
    """A victim at a cluster: a job of the pool, or (`attempt` 0) a local job of the site."""

    cluster: Name
    job: Name
    attempt: Index = 0


class PreemptionAgreed(_Fact):
    """The user agreed that a waiting job takes the chips of exactly these victims (from `JobView.offer`)."""

    kind: Literal["preemption-agreed"] = "preemption-agreed"
    job_id: Name
    victims: tuple[VictimNamed, ...]


class JobCancelled(_Fact):
    """The user cancelled the job."""

    kind: Literal["job-cancelled"] = "job-cancelled"
    job_id: Name


class JobDeleted(_Fact):
    """The user deleted an ended job."""

    kind: Literal["job-deleted"] = "job-deleted"
    job_id: Name


class AgentReported(_Fact):
    """A report of a site's agent: inventory, free chips, parts, queue, and jobs of the site's own users."""

    kind: Literal["agent-reported"] = "agent-reported"
    cluster: Cluster
    incarnation: str
    free_chips: dict[Name, Index]
    parts: tuple[ObservedPart, ...] = ()
    queue: tuple[QueueEntry, ...] = ()
    local_jobs: tuple[LocalJobSeen, ...] = ()
    free_storage_bytes: Index | None = None

    @classmethod
    def of(cls, report: AgentReport, now_s: float) -> AgentReported:
        """Return the event of a report: the fields that affect decisions, without metrics and logs."""
        return cls(
            now_s=now_s,
            cluster=report.cluster,
            incarnation=report.incarnation,
            free_chips=report.free_chips,
            parts=report.parts,
            queue=report.queue,
            local_jobs=report.local_jobs,
            free_storage_bytes=report.free_storage_bytes,
        )


class AgentLost(_Fact):
    """A site has not reported for longer than `Rules.agent_lost_s`."""

    kind: Literal["agent-lost"] = "agent-lost"
    cluster: Name


class DeadlinePassed(_Fact):
    """The time limit of `state` in this `attempt` of a job has expired."""

    kind: Literal["deadline-passed"] = "deadline-passed"
    job_id: Name
    state: Literal["preempting", "preparing", "starting", "waiting"]
    attempt: Index


class EpochBegan(_Fact):
    """A server became the leader; orders and reports of earlier epochs are void from now on."""

    kind: Literal["epoch-began"] = "epoch-began"
    epoch: Count


class PoolSet(_Fact):
    """The operator's links and the objective of the queue (`isthmus.control.algorithms.global_order`).

    Under every objective, later jobs cannot overtake a job that has waited for `patience_s`.
    """

    kind: Literal["pool-set"] = "pool-set"
    links: tuple[Link, ...] = ()
    objective: Objective = "arrival"
    patience_s: NotNegative = 3600.0


class Restarted(_Fact):
    """The server started and rebuilt its state. Never logged.

    The coordinator repeats the instructions whose results may be lost with the old process.
    """

    kind: Literal["restarted"] = "restarted"


Event = Annotated[
    JobSubmitted
    | PlansMade
    | PlanningFailed
    | PlanChosen
    | PreemptionAgreed
    | JobCancelled
    | JobDeleted
    | AgentReported
    | AgentLost
    | DeadlinePassed
    | EpochBegan
    | PoolSet
    | Restarted,
    Field(discriminator="kind"),
]
"""Every event of the coordinator."""

_EVENTS: TypeAdapter[Event] = TypeAdapter(Event)
KINDS = frozenset(kind.model_fields["kind"].default for kind in get_args(get_args(Event)[0]))
"""The event kinds that this version knows."""


class MakePlans(Frozen):
    """Ask the planner for plans on the free resources; it answers with `PlansMade` or `PlanningFailed`.

    Resources that `free_storage_bytes` (by cluster) and `free_gbps` (by `FROM>TO`) do not name are free.
    """

    job_id: Name
    round: Count
    submission: Submission
    # The connected clusters.
    clusters: tuple[Cluster, ...]
    # By cluster and node group: chips neither in use nor allocated, by pool jobs or the owner's own.
    free_chips: dict[Name, dict[Name, Index]]
    free_storage_bytes: dict[Name, Index] = Field(default_factory=dict)
    free_gbps: dict[str, NotNegative] = Field(default_factory=dict)


class JobChanged(Frozen):
    """Notify the watchers of a job that its view has changed."""

    job_id: Name


class ForgetJob(Frozen):
    """Delete the metrics and logs of a deleted job."""

    job_id: Name


Instruction = MakePlans | JobChanged | ForgetJob
"""Every instruction of the coordinator to the server."""


_HEAD = f'{{"version":{EVENT_VERSION},'
"""The prefix of every encoded event of this version."""


def encode(event: Event) -> str:
    """Return an event as one line of JSON with its version and kind."""
    return _HEAD + event.model_dump_json(by_alias=True)[1:]


def decode(text: str) -> Event:
    """Return the decoded event; raise `ProtocolError` if its version, kind or fields are unknown."""
    if text.startswith(_HEAD):
        try:
            return _EVENTS.validate_json("{" + text[len(_HEAD) :])
        except ValidationError:
            pass  # `_decode_with_care` raises the precise error
    return _decode_with_care(text)


def _decode_with_care(text: str) -> Event:
    """Decode an event of any JSON layout; raise `ProtocolError` with the cause if it is invalid."""
    fields = json.loads(text)
    version, kind = fields.pop("version", 0), fields.get("kind")
    if version != EVENT_VERSION or kind not in KINDS:
        raise ProtocolError(
            f"the event log contains an event of kind '{kind}', version {version}; "
            f"this server supports version {EVENT_VERSION} of {', '.join(sorted(KINDS))}",
            hint="start the version of isthmus that wrote the log, or a newer one",
        )
    try:
        return _EVENTS.validate_python(fields)
    except ValidationError as error:
        raise ProtocolError(f"the event log contains an invalid '{kind}' event: {error}") from error
