"""Records of jobs, and the complete state of the coordinator (`PoolState`). Plain mutable data.

A part counts against its cluster from its allocation (`allocations`) until its site reports `released`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from isthmus.control.accounting.meter import Meter
from isthmus.control.accounts.account_book import AccountBook
from isthmus.control.algorithms.chip_use import ChipUse
from isthmus.control.algorithms.fair_share import FairShare
from isthmus.control.algorithms.global_order import Objective, WaitingJob
from isthmus.control.preflight.preflight_record import PreflightRecord
from isthmus.control.state.catalogue_records import EntryKey, EntryRecord, JobVersion, job_versions
from isthmus.control.state.coordinator_config import CoordinatorConfig
from isthmus.control.state.indexes import PRIORITY_RANK, Indexes
from isthmus.control.state.job_history import JobHistory
from isthmus.control.state.packed_submission import PackedSubmission
from isthmus.control.state.restored_log import RestoredLog
from isthmus.control.state.site_membership import InvitationRecord
from isthmus.control.state.site_records import ClusterRecord, PartRecord
from isthmus.core.job import Job
from isthmus.core.messages.agent_messages import FailureCause, RankMap
from isthmus.core.owner.accounts import Project
from isthmus.core.plan import Plan, PlanPart, PlanSet
from isthmus.core.pool import Link
from isthmus.core.pool_resource import PoolResource
from isthmus.core.priority import Priority, joint_priority
from isthmus.core.units import MILLIONTHS
from isthmus.core.views.api_views import JobState, Submission
from isthmus.core.views.notice_views import Subscription

StateAfterStop = Literal["waiting", "failed", "succeeded", "cancelled"]
"""The state that follows `stopping`."""

FreeChips = Mapping[str, Mapping[str, int]]
"""Free chips by cluster and node group; only connected clusters appear."""

TERMINAL_STATES: frozenset[JobState] = frozenset({"succeeded", "failed", "cancelled"})
MAX_PAST_PARTS = 64
"""Released parts of earlier attempts whose ranks a job keeps."""
WAITING_STATES: frozenset[JobState] = frozenset({"waiting", "blocked"})
"""States in which a job waits in the queue, with or without a plan."""


NO_PLAN_AT_ALL = "no plan of the whole pool can hold this job"
"""Begins the reason of a job that could not start even if nothing else ran."""


def project_rank(project: Project) -> int:
    """Return the rank of a project: -1 for `high`, 0 for `middle`, 1 for `low`."""
    return PRIORITY_RANK[project.priority] - 1


@dataclass(slots=True, kw_only=True)
class JobRecord:
    """A job. Times are seconds since the epoch unless a field says otherwise."""

    id: str
    # Submission number, from 1.
    number: int
    user: str
    packed: PackedSubmission
    submitted_s: float
    # When the job entered its current state.
    changed_s: float
    priority: Priority
    preemptible: bool
    # The coordinator chooses the plan (policy `auto_plan`); otherwise the user does.
    auto_plan: bool
    # Link bandwidth is allocated to the job (`placement.network`).
    reserves_network: bool
    max_restarts: int
    # Its project; "": none.
    project: str = ""
    # Rank of the project: -1 for `high`, 0 for `middle` and for none, 1 for `low`.
    project_rank: int = 0
    # The priority that its user asked for; `priority` is the one that follows from it and the project.
    own_priority: Priority | None = None
    # The most that it may cost, in millionths of the currency's unit.
    max_price_millionths: int | None = None
    # What it was predicted to cost when it first started; None: it has not, or its time is not known.
    quoted_millionths: int | None = None
    # The level of that price which it has passed: 0, 80 or 100 percent.
    price_percent: int = 0
    # The account whose limit keeps it out of the queue; "": none does.
    capped_by: str = ""
    # Why it is to be saved and stopped, and since when; "": it is not.
    pause_reason: str = ""
    pause_since_s: float = 0.0
    # The job for whose claim it is to stop; "": for a budget.
    pause_for: str = ""
    # The project in which it claims the chips that other jobs of it release for it; "": none.
    claims_in: str = ""
    # It takes back chips that its project is guaranteed (`victims`).
    reclaims: bool = False
    # The jobs that it takes chips from (`victims`) are moved to other devices of their site.
    moves: bool = False
    # The versions of the catalogue that it uses.
    versions: tuple[JobVersion, ...] = ()
    # The user's deadline.
    user_deadline_s: float | None
    state: JobState = "planning"
    # Why the job is in this state.
    reason: str = ""
    # Why the job last restarted.
    last_restart_reason: str = ""
    # Origin of the failure of the current attempt, as far as known.
    fault: FailureCause | None = None
    # The owner by whose fault the current attempt ended; "": by none.
    lost_by: str = ""
    attempt: int = 0
    restarts: int = 0
    # Refusals in a row; they set the back-off.
    refusals: int = 0
    # Number of planner requests.
    round: int = 0
    # Input of the open planner request; None: no request is open.
    planner_input: PlannerInput | None = None
    # The planner request is about all chips of the pool, not the free ones.
    for_whole_pool: bool = False
    # Free chips at the last planning on free chips.
    last_planned_free: FreeChips | None = None
    # Chips of the pool at the last planning on the whole pool.
    last_planned_total: FreeChips | None = None
    # Candidate plans.
    plans: PlanSet | None = None
    # The plan that the job waits for or trains under.
    plan: Plan | None = None
    # Amounts that the plan needs.
    needs: dict[PoolResource, int] | None = None
    # The plan's parts by cluster.
    plan_parts: tuple[PlanPart, ...] = ()
    # The plan must not change: the user chose it, or the job has trained under it.
    plan_fixed: bool = False
    # The job has trained under its plan.
    has_run: bool = False
    # Its parts are in the queues of its sites.
    in_site_queues: bool = False
    # By (attempt, cluster): the current attempt, and unreleased parts of earlier ones.
    parts: dict[tuple[int, str], PartRecord] = field(default_factory=dict)
    # Ranks by (attempt, cluster) of released parts that were ordered to run: their output may still arrive.
    past_ranks: dict[tuple[int, str], tuple[int, ...]] = field(default_factory=dict)
    # Allocated link bandwidth in kbit/s.
    allocated_kbps: dict[PoolResource, int] = field(default_factory=dict)
    rank_map: RankMap | None = None
    # Clusters of the last training, which have the job's files.
    file_clusters: tuple[str, ...] = ()
    # How many they were; sites that have left since are no longer among them.
    num_file_clusters: int = 0
    # When the job entered `running`.
    started_s: float = 0.0
    # The state that follows `stopping`.
    state_after_stop: StateAfterStop = "waiting"
    # The checks at the sites of the plan, before chips are held there.
    preflight: PreflightRecord | None = None
    # Number of preflights.
    num_preflights: int = 0
    # Sets of clusters that the job cannot use together, with the reason and the time of its preflight.
    conflicts: dict[frozenset[str], tuple[str, float]] = field(default_factory=dict)
    # When the current state times out.
    state_deadline_s: float | None = None
    # Jobs whose chips this job takes.
    victims: tuple[ClusterVictim, ...] = ()
    # Id of the job that takes this job's chips.
    preemptor: str | None = None
    # Step of the verified checkpoint with which the job was preempted.
    saved_step: int | None = None
    # Worker processes that were replaced within an attempt.
    worker_restarts: int = 0
    # What happened to the job.
    history: JobHistory = field(default_factory=JobHistory)
    # Predicted duration of the plan in seconds; 0: unknown.
    predicted_run_s: float = 0.0
    # When the running job should end.
    expected_end_s: float | None = None
    # Chips that the job holds, as counted in `PoolState.shares`.
    charged_chips: int = 0
    # The job is in `Indexes.order`.
    in_queue: bool = False
    # Cached input of `global_order` for the current plan.
    waiting_job: WaitingJob | None = field(default=None, compare=False, repr=False)
    # Latest `Indexes.inventory_version` for which the pool was found to hold the plan.
    fits_inventory_version: int = field(default=-1, compare=False, repr=False)

    @classmethod
    def create(
        cls,
        job_id: str,
        number: int,
        user: str,
        submission: Submission,
        now_s: float,
        project: Project | None = None,
    ) -> JobRecord:
        """Return the record of a newly submitted job of a project."""
        job = submission.job
        made = cls(
            id=job_id,
            number=number,
            user=user,
            packed=PackedSubmission.pack(submission),
            submitted_s=now_s,
            changed_s=now_s,
            priority=job.priority,
            own_priority=job.priority,
            project=project.name if project else "",
            max_price_millionths=None if job.max_price is None else int(job.max_price * MILLIONTHS),
            preemptible=job.preemptible,
            auto_plan=job.policy == "auto",
            reserves_network=job.placement.network,
            max_restarts=job.max_restarts,
            versions=job_versions(job),
            user_deadline_s=now_s + job.deadline_s if job.deadline_s else None,
        )
        if project:
            made.follow(project)
        return made

    def follow(self, project: Project) -> None:
        """Take the rank and the priority at sites that follow from those of the project and the job's own."""
        self.project_rank = project_rank(project)
        self.priority = joint_priority(project.priority, self.own_priority or self.priority)
        self.waiting_job = None

    @property
    def rank(self) -> int:
        """The rank in the queue, the lowest first: by the project's priority, then by the job's."""
        return 3 * self.project_rank + PRIORITY_RANK[self.own_priority or self.priority]

    @property
    def share_account(self) -> str:
        """Whose fair share the job uses: that of its project, otherwise that of its user."""
        return f"project:{self.project}" if self.project else self.user

    @property
    def num_chips(self) -> int:
        """The chips of its plan; 0 without one."""
        return sum(sum(part.chips.values()) for part in self.plan_parts)

    @property
    def submission(self) -> Submission:
        """The submission: the job spec with the dimensions of its model."""
        return self.packed.unpack()

    @property
    def spec(self) -> Job:
        """The job spec."""
        return self.packed.unpack_job()

    def ranks_ordered(self, attempt: int, cluster: str) -> tuple[int, ...]:
        """Return the ranks that `cluster` was ordered to run in an attempt; of old attempts the newest are known."""
        part = self.parts.get((attempt, cluster))
        if part is not None:
            return part.ranks if part.committed else ()
        return self.past_ranks.get((attempt, cluster), ())

    def current_parts(self) -> list[PartRecord]:
        """Return the parts of the current attempt, in the plan's order."""
        return [part for part in self.parts.values() if part.attempt == self.attempt]

    def remaining_parts(self) -> list[PartRecord]:
        """Return the parts of the current attempt without which it does not go on yet."""
        return [part for part in self.current_parts() if not part.left]

    def training_parts(self) -> list[PartRecord]:
        """Return the parts of the current attempt that train: all but those that only decode (`Plan.rollouts`)."""
        if self.plan is None or not self.plan.rollouts:
            return self.current_parts()
        first = len(self.plan.ranks)
        return [part for part in self.current_parts() if min(part.ranks) < first]

    def absent_clusters(self) -> list[str]:
        """Return the clusters of the plan that could decode for the current attempt and do not."""
        if self.plan is None or not self.plan.rollouts:
            return []
        names = dict.fromkeys(place.cluster for place in self.plan.rollouts)
        parts = {name: self.parts.get((self.attempt, name)) for name in names}
        return [name for name, part in parts.items() if part is None or part.left]

    def may_go_on_without(self, clusters: Collection[str]) -> bool:
        """Return whether the running job can do without its parts at `clusters`.

        They only decode, and `placement.least_rollouts` of the others that do are alive.
        """
        trains = self.training_parts()
        if self.state != "running" or any(part.cluster in clusters for part in trains):
            return False
        others = [one for one in self.remaining_parts() if one not in trains and one.cluster not in clusters]
        alive = [one for one in others if one.state in ("running", "succeeded")]
        return len(alive) >= self.spec.placement.least_rollouts

    def verified_step(self) -> int | None:
        """Return the step of the checkpoint that every part that trains has verified; None if there is none."""
        steps = {part.verified_checkpoint.step if part.verified_checkpoint else None for part in self.training_parts()}
        return steps.pop() if len(steps) == 1 else None

    def unreleased_parts(self) -> list[PartRecord]:
        """Return the parts of all attempts whose site has not reported `released`."""
        return [part for part in self.parts.values() if part.state != "released"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerInput:
    """The free resources that an open planner request is based on."""

    free_chips: dict[str, dict[str, int]]
    # By cluster.
    free_storage_bytes: dict[str, int]
    # By link, `FROM>TO`.
    free_gbps: dict[str, float]
    # `Indexes.freed_count` at the time of the request.
    freed_count: int


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ClusterVictim:
    """A victim at a cluster: a job of the pool, or (`attempt` 0) a local job of the site."""

    cluster: str
    job: str
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class SubscriptionRecord:
    """A subscription to notices, and since when it counts."""

    subscription: Subscription
    since_s: float


@dataclass(slots=True, kw_only=True)
class PoolState:
    """The complete state of the coordinator."""

    config: CoordinatorConfig
    # All jobs by id, in the order of submission.
    jobs: dict[str, JobRecord] = field(default_factory=dict)
    # The jobs that have not ended.
    live_jobs: dict[str, JobRecord] = field(default_factory=dict)
    # Job id by (user, submission key).
    ids_by_key: dict[tuple[str, str], str] = field(default_factory=dict)
    # Rises with each leader and each restore, above every fence that an agent has reported.
    epoch: int = 0
    # Number of jobs ever submitted.
    num_submitted: int = 0
    # Number of checks ever ordered of the way from one site to another.
    num_peer_checks: int = 0
    clusters: dict[str, ClusterRecord] = field(default_factory=dict)
    # Codes by which owners may join a cluster, by the id of the token.
    invitations: dict[str, InvitationRecord] = field(default_factory=dict)
    # Models and data sets by kind, owner and name.
    catalogue: dict[EntryKey, EntryRecord] = field(default_factory=dict)
    # By owner and version: the number of entries that have it.
    num_entries: dict[tuple[str, str], int] = field(default_factory=dict)
    # The operator's links.
    links: dict[PoolResource, Link] = field(default_factory=dict)
    # Allocated bandwidth of each link, in kbit/s.
    allocated_kbps: dict[PoolResource, int] = field(default_factory=dict)
    # See the event `PoolSet`.
    objective: Objective = "arrival"
    patience_s: float = 3600.0
    # What is not known since the log was last restored from a backup; None: it never was.
    restored: RestoredLog | None = None
    planner_turns: bool = False
    needs_free_chips: bool = False
    # What users have used; the order of the queue within a priority if it has a half-life.
    shares: FairShare = field(default_factory=FairShare)
    # What each owner has given and each user has taken, for accounting.
    chip_use: ChipUse = field(default_factory=ChipUse)
    # What jobs hold at what price, and the ledger of what they are charged.
    meter: Meter = field(default_factory=Meter)
    # Subscriptions by role and name; and the absent sites that made a notice.
    subscriptions: dict[tuple[str, str], SubscriptionRecord] = field(default_factory=dict)
    noticed_away: set[str] = field(default_factory=set)
    # The jobs that were stopped to be moved and do not run again yet, and since when.
    moved: dict[str, float] = field(default_factory=dict)
    # The sites that propose moves.
    proposing: set[str] = field(default_factory=set)
    # Projects, groups and users: what they hold, have used, and may.
    accounts: AccountBook = field(default_factory=AccountBook)
    # Ids of the jobs whose view the current event has changed.
    changed_jobs: set[str] = field(default_factory=set)
    indexes: Indexes = field(default_factory=Indexes, compare=False)

    def drained_site(self, job: JobRecord) -> ClusterRecord | None:
        """Return the first site with a part of the job's attempt that is being drained, None without one."""
        for part in job.current_parts():
            record = self.clusters.get(part.cluster)
            if part.state != "released" and not part.left and record is not None and record.drain is not None:
                return record
        return None

    def free_chips(self) -> FreeChips:
        """Return the chips that can be allocated now at every cluster that takes parts, read-only by node group."""
        return {name: record.free_by_group() for name, record in self.clusters.items() if record.takes_parts}
