"""The inputs (`Event`) and outputs (`Instruction`) of the coordinator, as frozen data.

Events are facts. The server stores an event before it acts on it or replies, so replaying the log always
rebuilds the pool state. Every event carries the time at which it was received, `now_s` (seconds since the
epoch); the coordinator has no clock.
"""

from __future__ import annotations

import hashlib
import json
import operator
from typing import Annotated, Literal, get_args

from pydantic import Field, TypeAdapter, ValidationError

from isthmus.control.algorithms.global_order import Objective
from isthmus.control.state.site_membership import ActorRole
from isthmus.core.base_model import FrozenModel, Name, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from isthmus.core.catalogue import ContentDigest, EntryKind, FileManifest, HeldCopy, SourceUrl
from isthmus.core.errors import ProtocolError
from isthmus.core.messages.agent_messages import (
    MAX_DETAIL_CHARS,
    AgentIdentity,
    AgentReport,
    Digest,
    Fence,
    MoveProposal,
    ObservedLocalJob,
    ObservedPart,
    PeerAddress,
    PeerCheck,
    QueueEntry,
)
from isthmus.core.messages.preflight import PreflightAnswer
from isthmus.core.messages.site_fetch import SiteFetch
from isthmus.core.model import Model
from isthmus.core.owner.accounts import Accounts
from isthmus.core.owner.tariff import Tariff
from isthmus.core.plan import PlanSet, with_stored_rank_order
from isthmus.core.pool import Cluster, Link
from isthmus.core.views.api_views import Submission
from isthmus.core.views.notice_views import NoticeChannel, PoolNotice, Role, Subscription

EVENT_VERSION = 1
"""Version of the event encoding. Increase it with every change that an older server would misread."""


class _EventBase(FrozenModel):
    now_s: float


class JobSubmitted(_EventBase):
    """A user submitted a job; the server generated `job_id`. Only the same user and key mean the same job."""

    kind: Literal["job-submitted"] = "job-submitted"
    job_id: Name
    user: Name
    submission: Submission


class PlansMade(_EventBase):
    """The planner answered the `MakePlans` request of this `round`."""

    kind: Literal["plans-made"] = "plans-made"
    job_id: Name
    round: PositiveInt
    plans: PlanSet


class PlanningFailed(_EventBase):
    """The planner failed on this job (not: found no plan); the job fails with `reason`."""

    kind: Literal["planning-failed"] = "planning-failed"
    job_id: Name
    round: PositiveInt
    reason: str


class PlanChosen(_EventBase):
    """The user chose one of the candidate plans."""

    kind: Literal["plan-chosen"] = "plan-chosen"
    job_id: Name
    plan_id: Name


class VictimNamed(FrozenModel):
    """A victim at a cluster: a job of the pool, or (`attempt` 0) a local job of the site."""

    cluster: Name
    job: Name
    attempt: NonNegativeInt = 0


class PreemptionAgreed(_EventBase):
    """The user agreed that a waiting job takes the chips of exactly these victims (from `JobView.offer`)."""

    kind: Literal["preemption-agreed"] = "preemption-agreed"
    job_id: Name
    victims: tuple[VictimNamed, ...]


class JobCancelled(_EventBase):
    """The user cancelled the job; `by` is the role and name of another caller that did."""

    kind: Literal["job-cancelled"] = "job-cancelled"
    job_id: Name
    by: Annotated[str, Field(max_length=80, exclude_if=operator.not_)] = ""


class JobDeleted(_EventBase):
    """The user deleted an ended job."""

    kind: Literal["job-deleted"] = "job-deleted"
    job_id: Name


class AgentSession(FrozenModel):
    """The identity of a reporting agent as the log keeps it: `AgentIdentity` with the digest of its key as `id`."""

    id: Digest
    machine: Digest
    boot: Digest
    session: PositiveInt
    saves: NonNegativeInt = 0
    enrols: bool = False

    @classmethod
    def from_identity(cls, identity: AgentIdentity) -> AgentSession:
        """Return the session of an identity; the key stays out of it."""
        fields = identity.model_dump(exclude={"key"})
        return cls(id=hashlib.sha256(bytes.fromhex(identity.key)).hexdigest(), **fields)


class AgentReported(_EventBase):
    """A report of a site's agent: inventory, free chips, parts, queue, and jobs of the site's own users."""

    kind: Literal["agent-reported"] = "agent-reported"
    cluster: Cluster
    incarnation: str
    agent: AgentSession | None = None
    run_lease_s: NonNegativeFloat = 0.0
    free_chips: dict[Name, NonNegativeInt]
    parts: tuple[ObservedPart, ...] = ()
    queue: tuple[QueueEntry, ...] = ()
    local_jobs: tuple[ObservedLocalJob, ...] = ()
    free_storage_bytes: NonNegativeInt | None = None
    peer_address: PeerAddress | None = None
    peer_checks: tuple[PeerCheck, ...] = ()
    checks: bool = False
    copies: Annotated[tuple[HeldCopy, ...] | None, Field(exclude_if=lambda copies: copies is None)] = None
    fetch_gbps: Annotated[PositiveFloat | None, Field(exclude_if=operator.not_)] = None
    clock_s: Annotated[NonNegativeFloat | None, Field(exclude_if=lambda clock_s: clock_s is None)] = None
    moves: Annotated[tuple[MoveProposal, ...], Field(exclude_if=operator.not_)] = ()

    @classmethod
    def from_report(cls, report: AgentReport, now_s: float) -> AgentReported:
        """Return the event of a report: the fields that affect decisions, without metrics and logs."""
        return cls(
            now_s=now_s,
            cluster=report.cluster,
            incarnation=report.incarnation,
            agent=AgentSession.from_identity(report.identity) if report.identity else None,
            run_lease_s=report.run_lease_s,
            free_chips=report.free_chips,
            parts=tuple(_shortened(part) for part in report.parts),
            queue=report.queue,
            local_jobs=report.local_jobs,
            free_storage_bytes=report.free_storage_bytes,
            peer_address=report.peer_address,
            peer_checks=report.peer_checks,
            checks=report.checks,
            copies=report.copies,
            fetch_gbps=report.fetch_gbps,
            clock_s=report.clock_s,
            moves=report.moves,
        )


def _shortened(part: ObservedPart) -> ObservedPart:
    """Return a part with the first characters of its detail: the log keeps every change of it."""
    if len(part.detail) <= MAX_DETAIL_CHARS:
        return part
    return part.model_copy(update={"detail": part.detail[:MAX_DETAIL_CHARS] + "..."})


class SiteChecked(_EventBase):
    """A site answered the checks of a waiting job."""

    kind: Literal["site-checked"] = "site-checked"
    cluster: Name
    answer: PreflightAnswer


class PreflightTimedOut(_EventBase):
    """A site of a waiting job has not answered its checks in time."""

    kind: Literal["preflight-timed-out"] = "preflight-timed-out"
    job_id: Name
    round: PositiveInt


class PeerCheckTimedOut(_EventBase):
    """The check whether `source` reaches `target`, for which a job waits, has had no result in time."""

    kind: Literal["peer-check-timed-out"] = "peer-check-timed-out"
    source: Name
    target: Name
    number: PositiveInt


class AgentLost(_EventBase):
    """A site has not reported for longer than `CoordinatorConfig.agent_timeout_s`."""

    kind: Literal["agent-lost"] = "agent-lost"
    cluster: Name


class RunLeaseEnded(_EventBase):
    """The run lease of a lost site has ended: its workers have ended themselves, so its parts count as released."""

    kind: Literal["run-lease-ended"] = "run-lease-ended"
    cluster: Name


class SiteGone(_EventBase):
    """The operator declared that nothing of the pool runs at a lost site; its agent is never admitted again."""

    kind: Literal["site-gone"] = "site-gone"
    cluster: Name
    by: Name


class SiteEnrolling(_EventBase):
    """The operator or the owner agreed that the next new agent of a cluster takes the place of the enrolled one."""

    kind: Literal["site-enrolling"] = "site-enrolling"
    cluster: Name
    by: Name


class SiteInvited(_EventBase):
    """The operator invited an owner to join a cluster; `id` is that of the token, whose secret is the code."""

    kind: Literal["site-invited"] = "site-invited"
    id: str
    owner: Name
    by: Name
    expires_s: float
    cluster: Name | None = None
    max_chips: PositiveInt | None = None
    probation: bool = True


class InvitationRevoked(_EventBase):
    """The operator took an invitation back that was not used."""

    kind: Literal["invitation-revoked"] = "invitation-revoked"
    id: str


class SiteJoined(_EventBase):
    """An owner joined a cluster by an invitation; `key` is the digest of the first key of its agent."""

    kind: Literal["site-joined"] = "site-joined"
    invitation: str
    cluster: Cluster
    key: Digest


class SiteAccepted(_EventBase):
    """The operator ended the probation of a site."""

    kind: Literal["site-accepted"] = "site-accepted"
    cluster: Name
    by: Name


class ProbationEnded(_EventBase):
    """The probation of a site has lasted as long as it may."""

    kind: Literal["probation-ended"] = "probation-ended"
    cluster: Name


class SiteCordoned(_EventBase):
    """The operator or the owner closed a site to new parts, or opened it again."""

    kind: Literal["site-cordoned"] = "site-cordoned"
    cluster: Name
    by: Name
    role: ActorRole
    cordoned: bool


class SiteDraining(_EventBase):
    """The operator or the owner wants every job away from a site by `deadline_s`, saved; `leaves`: then the site."""

    kind: Literal["site-draining"] = "site-draining"
    cluster: Name
    by: Name
    role: ActorRole
    deadline_s: float
    leaves: bool = False


class DrainTimedOut(_EventBase):
    """The deadline of a drain has passed: jobs that have not saved a checkpoint by now are stopped without."""

    kind: Literal["drain-timed-out"] = "drain-timed-out"
    cluster: Name


class SiteLeft(_EventBase):
    """A drained site has left the pool: its agent has ended, or is silent."""

    kind: Literal["site-left"] = "site-left"
    cluster: Name


class DeadlinePassed(_EventBase):
    """The time limit of `state` in this `attempt` of a job has expired."""

    kind: Literal["deadline-passed"] = "deadline-passed"
    job_id: Name
    state: Literal["preempting", "preparing", "starting", "waiting", "running"]
    attempt: NonNegativeInt


class EpochBegan(_EventBase):
    """A server became the leader; orders and reports of earlier epochs are void from now on."""

    kind: Literal["epoch-began"] = "epoch-began"
    epoch: PositiveInt


class LogRestored(_EventBase):
    """The log is that of a backup: later epochs, attempts and jobs may exist that it does not have.

    An operator has restored it (`fence` 0), or the agent of `cluster` has obeyed orders with a `fence` above the epoch.
    The sites `gone` will not report again.
    """

    kind: Literal["log-restored"] = "log-restored"
    fence: Fence = 0
    cluster: Name | None = None
    gone: tuple[Name, ...] = ()


class LogCompacted(_EventBase):
    """The events up to `number` were replaced by the state after them; nothing else changes.

    `digest` is the hash of the chain at that event, `state` the SHA-256 of the stored state.
    """

    kind: Literal["log-compacted"] = "log-compacted"
    number: PositiveInt
    digest: Digest
    state: Digest


class UnknownJobEnded(_EventBase):
    """An operator ended a job that runs at sites and that this log does not have."""

    kind: Literal["unknown-job-ended"] = "unknown-job-ended"
    job_id: Name


class VersionAdded(_EventBase):
    """A user added a version to an entry of its own, which may be new; `model` are the dimensions of a model."""

    kind: Literal["version-added"] = "version-added"
    entry_kind: EntryKind
    owner: Name
    name: Name
    source: SourceUrl
    manifest: FileManifest
    model: Model | None = None


class EntryGranted(_EventBase):
    """The owner of an entry granted it to `user`, or took the grant back."""

    kind: Literal["entry-granted"] = "entry-granted"
    entry_kind: EntryKind
    owner: Name
    name: Name
    user: Name
    granted: bool


class VersionRemoved(_EventBase):
    """The owner of an entry removed a version, or with None the entry."""

    kind: Literal["version-removed"] = "version-removed"
    entry_kind: EntryKind
    owner: Name
    name: Name
    version: ContentDigest | None = None


class PoolSet(_EventBase):
    """The operator's links and the objective of the queue (`isthmus.control.algorithms.global_order`).

    Under every objective, later jobs cannot overtake a job that has waited for `patience_s`.
    """

    kind: Literal["pool-set"] = "pool-set"
    links: tuple[Link, ...] = ()
    objective: Objective = "arrival"
    patience_s: NonNegativeFloat = 3600.0
    # Users take turns at the planner; logs of earlier versions were written without.
    planner_turns: bool = False
    # A job is planned on the free chips only if it may use some of them; likewise.
    needs_free_chips: bool = False
    # Fair share of users (`FairShare`): half-life of usage, 0 for a queue by arrival, and weights that differ from 1.
    half_life_s: NonNegativeFloat = 0.0
    share_weights: tuple[tuple[Name, Annotated[float, Field(gt=0)]], ...] = ()
    # Projects share by their tree (`FairShare.by_tree`); logs of earlier versions were written without.
    share_by_tree: bool = False


class TariffPublished(_EventBase):
    """An owner published prices of its clusters; `owner` is "" for the operator, which may price all and links."""

    kind: Literal["tariff-published"] = "tariff-published"
    by: Name
    owner: Name | Literal[""] = ""
    tariff: Tariff


class SubscriptionSet(_EventBase):
    """A user, an owner or an admin subscribed to notices; None: no longer."""

    kind: Literal["subscription-set"] = "subscription-set"
    role: Role
    name: Name
    subscription: Subscription | None


class AccountsSet(_EventBase):
    """The operator set the pool's projects, groups and limits; those before are replaced."""

    kind: Literal["accounts-set"] = "accounts-set"
    by: Name
    accounts: Accounts
    # Jobs that wait follow the priorities of their projects; logs of earlier versions were written without.
    ranks_waiting: bool = False


class BudgetsDue(_EventBase):
    """Amounts of the month, or the cost of a job, have passed 80 or 100 % of a limit, or a month has begun."""

    kind: Literal["budgets-due"] = "budgets-due"


class Restarted(_EventBase):
    """The server started and rebuilt its state. Never logged.

    The coordinator repeats the instructions whose results may be lost with the old process. `steady_s` is the time on
    the clock of `Coordinator.record_report` that measures leases (default: `now_s`).
    """

    kind: Literal["restarted"] = "restarted"
    steady_s: float | None = None


Event = Annotated[
    JobSubmitted
    | PlansMade
    | PlanningFailed
    | PlanChosen
    | PreemptionAgreed
    | JobCancelled
    | JobDeleted
    | AgentReported
    | SiteChecked
    | PreflightTimedOut
    | PeerCheckTimedOut
    | AgentLost
    | RunLeaseEnded
    | SiteGone
    | SiteEnrolling
    | SiteInvited
    | InvitationRevoked
    | SiteJoined
    | SiteAccepted
    | ProbationEnded
    | SiteCordoned
    | SiteDraining
    | DrainTimedOut
    | SiteLeft
    | DeadlinePassed
    | EpochBegan
    | LogCompacted
    | LogRestored
    | UnknownJobEnded
    | VersionAdded
    | EntryGranted
    | VersionRemoved
    | PoolSet
    | TariffPublished
    | SubscriptionSet
    | AccountsSet
    | BudgetsDue
    | Restarted,
    Field(discriminator="kind"),
]
"""Every event of the coordinator."""

_EVENT_ADAPTER: TypeAdapter[Event] = TypeAdapter(Event)
EVENT_KINDS = frozenset(kind.model_fields["kind"].default for kind in get_args(get_args(Event)[0]))
"""The event kinds that this version knows."""


class MakePlans(FrozenModel):
    """Ask the planner for plans on the free resources; it answers with `PlansMade` or `PlanningFailed`.

    Resources that `free_storage_bytes` (by cluster) and `free_gbps` (by `FROM>TO`) do not name are free.
    """

    job_id: Name
    round: PositiveInt
    submission: Submission
    # Whose turn at the planner it takes.
    user: str = ""
    # The connected clusters.
    clusters: tuple[Cluster, ...]
    # By cluster and node group: chips neither in use nor allocated, by pool jobs or the owner's own.
    free_chips: dict[Name, dict[Name, NonNegativeInt]]
    free_storage_bytes: dict[Name, NonNegativeInt] = Field(default_factory=dict)
    free_gbps: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    # Links between them as their agents measured them, where the operator's file has none.
    links: tuple[Link, ...] = ()
    # What clusters would have to bring first; those without an entry nothing.
    fetches: dict[Name, SiteFetch] = Field(default_factory=dict)


class JobChanged(FrozenModel):
    """Notify the watchers of a job that its view has changed."""

    job_id: Name


class ForgetJob(FrozenModel):
    """Delete the metrics and logs of a deleted job."""

    job_id: Name


class NoticeDue(FrozenModel):
    """Deliver a notice to a subscriber by a channel; it is stored with the event that it follows from."""

    role: Role
    name: Name
    channel: NoticeChannel
    notice: PoolNotice


class BudgetReached(FrozenModel):
    """Notify the operator that an account, or a job by its `max_price`, has passed 80 or 100 percent of a budget.

    `account` is `user:NAME`, `group:NAME`, `project:NAME` or `job:ID`.
    """

    account: str
    percent: PositiveInt
    text: str


Instruction = MakePlans | JobChanged | ForgetJob | NoticeDue | BudgetReached
"""Every instruction of the coordinator to the server."""


_JSON_PREFIX = f'{{"version":{EVENT_VERSION},'
"""The prefix of every encoded event of this version."""


def encode_event(event: Event) -> str:
    """Return an event as one line of JSON with its version and kind."""
    return _JSON_PREFIX + event.model_dump_json(by_alias=True)[1:]


def decode_event(text: str) -> Event:
    """Return the decoded event; raise `ProtocolError` if its version, kind or fields are unknown."""
    if text.startswith(_JSON_PREFIX):
        try:
            return _with_stored_rank_orders(_EVENT_ADAPTER.validate_json("{" + text[len(_JSON_PREFIX) :]))
        except ValidationError:
            pass  # `_decode_or_explain` raises the precise error
    return _decode_or_explain(text)


def _decode_or_explain(text: str) -> Event:
    """Decode an event of any JSON layout; raise `ProtocolError` with the cause if it is invalid."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the event log contains what is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ProtocolError(f"the event log contains what is no event: {text[:80]}")
    version, kind = fields.pop("version", 0), fields.get("kind")
    if version != EVENT_VERSION or not isinstance(kind, str) or kind not in EVENT_KINDS:
        raise ProtocolError(
            f"the event log contains an event of kind '{str(kind)[:80]}', version {str(version)[:20]}; "
            f"this server supports version {EVENT_VERSION} of {', '.join(sorted(EVENT_KINDS))}",
            hint="start the version of isthmus that wrote the log, or a newer one",
        )
    try:
        return _with_stored_rank_orders(_EVENT_ADAPTER.validate_python(fields))
    except ValidationError as error:
        raise ProtocolError(f"the event log contains an invalid '{kind}' event: {error}") from error


def _with_stored_rank_orders(event: Event) -> Event:
    """Return an event of the log; the plans of one that an earlier release wrote number their ranks as it did."""
    if not isinstance(event, PlansMade):
        return event
    plans = tuple(map(with_stored_rank_order, event.plans.plans))
    return event.model_copy(update={"plans": event.plans.model_copy(update={"plans": plans})})
