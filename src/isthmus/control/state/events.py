"""What happens to the coordinator (`Event`) and what it asks for (`Instruction`): frozen data, nothing else.

Events are facts. The server's shell does and answers nothing before the event behind it is in the store, so
that the state of the pool is always the fold of the log. Every event carries the time at which it was
taken in, `now_s` (seconds since the epoch); the coordinator has no clock of its own.
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
"""Version of the written form of events. A change that an older server would misread raises it."""


class _Fact(Frozen):
    now_s: float


class JobSubmitted(_Fact):
    """A user asked for a job; `job_id` was drawn by the shell. The same user and key mean the same job."""

    kind: Literal["job-submitted"] = "job-submitted"
    job_id: Name
    user: Name
    submission: Submission


class PlansMade(_Fact):
    """The planner answered the request `MakePlans` of this `round`."""

    kind: Literal["plans-made"] = "plans-made"
    job_id: Name
    round: Count
    plans: PlanSet


class PlanningFailed(_Fact):
    """The planner could not work on this job at all (not: found no plan); the job ends with `reason`."""

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
    """The user has a job that waits take the chips of just these victims (`JobView.offer` names them)."""

    kind: Literal["preemption-agreed"] = "preemption-agreed"
    job_id: Name
    victims: tuple[VictimNamed, ...]


class JobCancelled(_Fact):
    """The user wants the job stopped."""

    kind: Literal["job-cancelled"] = "job-cancelled"
    job_id: Name


class JobDeleted(_Fact):
    """The user wants an ended job forgotten."""

    kind: Literal["job-deleted"] = "job-deleted"
    job_id: Name


class AgentReported(_Fact):
    """What a site's agent has: its inventory, what is free, its parts, its queue, its own users' jobs."""

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
        """Return the event of a report: what bears on decisions, without metrics and logs."""
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
    """A site has not reported for longer than the rules allow."""

    kind: Literal["agent-lost"] = "agent-lost"
    cluster: Name


class DeadlinePassed(_Fact):
    """A job has been in `state` of `attempt` for as long as the rules allow."""

    kind: Literal["deadline-passed"] = "deadline-passed"
    job_id: Name
    state: Literal["preempting", "preparing", "starting", "waiting"]
    attempt: Index


class EpochBegan(_Fact):
    """A server began to speak for the pool: what was said under an earlier epoch is void from now on."""

    kind: Literal["epoch-began"] = "epoch-began"
    epoch: Count


class PoolSet(_Fact):
    """The operator's links, and by what the queue is ordered (`isthmus.control.algorithms.global_order`).

    Under every objective a job that has waited for `patience_s` is not overtaken any more.
    """

    kind: Literal["pool-set"] = "pool-set"
    links: tuple[Link, ...] = ()
    objective: Objective = "arrival"
    patience_s: NotNegative = 3600.0


class Restarted(_Fact):
    """The server came up and rebuilt its state: nothing has happened, so it is never logged.

    It answers with the instructions whose answers may have been lost with the old process.
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
"""Everything that can happen to the coordinator."""

_EVENTS: TypeAdapter[Event] = TypeAdapter(Event)
KINDS = frozenset(kind.model_fields["kind"].default for kind in get_args(get_args(Event)[0]))
"""The kinds of event this version knows."""


class MakePlans(Frozen):
    """Ask the planner for plans of a job on what is free now; answer with `PlansMade` or `PlanningFailed`.

    `clusters` are those connected; `free_chips` maps cluster and node group to the chips that neither a
    job of the pool nor the owner's own work holds or has been promised. `free_storage_bytes` by cluster and
    `free_gbps` by `FROM>TO` say what is left of storage and links; what they do not name is all there.
    """

    job_id: Name
    round: Count
    submission: Submission
    clusters: tuple[Cluster, ...]
    free_chips: dict[Name, dict[Name, Index]]
    free_storage_bytes: dict[Name, Index] = Field(default_factory=dict)
    free_gbps: dict[str, NotNegative] = Field(default_factory=dict)


class JobChanged(Frozen):
    """Tell whoever watches the job that its view has changed."""

    job_id: Name


class ForgetJob(Frozen):
    """Drop the metrics and logs of a deleted job."""

    job_id: Name


Instruction = MakePlans | JobChanged | ForgetJob
"""Everything the coordinator can ask of its shell."""


_HEAD = f'{{"version":{EVENT_VERSION},'
"""How the written form of every event of this version begins."""


def encode(event: Event) -> str:
    """Return the written form of an event: one line of JSON that names its version and kind."""
    return _HEAD + event.model_dump_json(by_alias=True)[1:]


def decode(text: str) -> Event:
    """Read an event back; raise `ProtocolError` where this version does not know its kind or form."""
    if text.startswith(_HEAD):
        try:
            return _EVENTS.validate_json("{" + text[len(_HEAD) :])
        except ValidationError:
            pass  # what is wrong with it is said below
    return _decode_with_care(text)


def _decode_with_care(text: str) -> Event:
    """Read an event of whatever layout, or say in words why not."""
    fields = json.loads(text)
    version, kind = fields.pop("version", 0), fields.get("kind")
    if version != EVENT_VERSION or kind not in KINDS:
        raise ProtocolError(
            f"the event log holds an event of kind '{kind}', version {version}; "
            f"this server knows version {EVENT_VERSION} of {', '.join(sorted(KINDS))}",
            hint="start the version of isthmus that wrote the log, or a newer one",
        )
    try:
        return _EVENTS.validate_python(fields)
    except ValidationError as error:
        raise ProtocolError(f"the event log holds a '{kind}' that does not read: {error}") from error
