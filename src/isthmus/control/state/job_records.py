"""What the coordinator knows of jobs, and all that it knows together (`State`). Plain mutable records.

A part counts against its cluster from the moment it is promised there (`ledger`) until its site has said
`released`. What can be computed again from the records (`indexes`) is kept up by `lifecycle` and `ledger`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from isthmus.control.algorithms.global_order import Objective, Request
from isthmus.control.state.indexes import Indexes
from isthmus.control.state.packed_submission import Packed
from isthmus.control.state.rules import Rules
from isthmus.control.state.site_records import ClusterRecord, PartRecord
from isthmus.core.job import Job
from isthmus.core.messages.agent_messages import Fault, RankMap
from isthmus.core.messages.api_views import JobState, Submission
from isthmus.core.plan import Part, Plan, PlanSet
from isthmus.core.pool import Link
from isthmus.core.priority import Priority

Ending = Literal["waiting", "failed", "succeeded", "cancelled"]
FreeChips = dict[str, dict[str, int]]
"""Chips free by cluster and node group; only connected clusters appear."""

ENDED: frozenset[JobState] = frozenset({"succeeded", "failed", "cancelled"})
WAITING: frozenset[JobState] = frozenset({"waiting", "blocked"})
"""States in which a job stands in the queue with a plan, or without one that fits."""

STORY_LENGTH = 64


@dataclass(slots=True, kw_only=True)
class JobRecord:
    """A job. `parts` are those of the present attempt, and older ones whose release is still unconfirmed.

    `number` counts jobs in the order of their submission. `round` counts requests to the planner, `asked` is
    what was free when the request that is out was made (None: none is), `whole` says that it was about the
    whole pool, `tried_on` what was free when it was last asked for what is free, `tried_whole` what the pool
    had when it was last asked about that. `needs` is what the plan needs
    of every resource (`ledger`), `cuts` are its parts. A `pinned` plan stays the job's plan: its user chose
    it, or the job has trained under it (`ran`). `enqueued` says that parts stand in the queues of its sites.
    `setback` is why it last started again, `fault` where the cause of the present attempt's failure lies as
    far as is known. `ending` is where `stopping` leads. `deadline_s` is when the present state has lasted
    too long, `due_s` when its user wants it to have ended. `victims` are those whose chips a preempting job
    is to have, `victim_of` names the job that is to have this one's; `saved_step` is the checkpoint with
    which it made way, `trained_at` are the clusters at which it last trained, and which so have its files.
    `run_s` is how long the plan should take (0: unknown) and `ends_s` when a run should end, `ordered` that
    the job stands in `Indexes.order`. `request` is what the queue is told of it while it has this plan, and
    `holdable_in` the latest inventory of the pool (`Indexes.inventory`) known to hold it.
    """

    id: str
    number: int
    user: str
    packed: Packed
    submitted_s: float
    changed_s: float
    priority: Priority
    preemptible: bool
    auto: bool
    network: bool
    max_restarts: int
    due_s: float | None
    state: JobState = "planning"
    reason: str = ""
    setback: str = ""
    fault: Fault | None = None
    attempt: int = 0
    restarts: int = 0
    refusals: int = 0
    round: int = 0
    asked: Asked | None = None
    whole: bool = False
    tried_on: FreeChips | None = None
    tried_whole: FreeChips | None = None
    plans: PlanSet | None = None
    plan: Plan | None = None
    needs: dict[str, int] | None = None
    cuts: tuple[Part, ...] = ()
    pinned: bool = False
    ran: bool = False
    enqueued: bool = False
    parts: dict[tuple[int, str], PartRecord] = field(default_factory=dict)
    on_links: dict[str, int] = field(default_factory=dict)
    rank_map: RankMap | None = None
    trained_at: tuple[str, ...] = ()
    began_s: float = 0.0
    ending: Ending = "waiting"
    deadline_s: float | None = None
    victims: tuple[VictimAt, ...] = ()
    victim_of: str | None = None
    saved_step: int | None = None
    story: deque[str] | None = None
    run_s: float = 0.0
    ends_s: float | None = None
    ordered: bool = False
    request: Request | None = field(default=None, compare=False, repr=False)
    holdable_in: int = field(default=-1, compare=False, repr=False)

    @classmethod
    def of(cls, job_id: str, number: int, user: str, submission: Submission, now_s: float) -> JobRecord:
        """Return the record of a job that has just been submitted."""
        job = submission.job
        return cls(
            id=job_id,
            number=number,
            user=user,
            packed=Packed.of(submission),
            submitted_s=now_s,
            changed_s=now_s,
            priority=job.priority,
            preemptible=job.preemptible,
            auto=job.policy == "auto",
            network=job.placement.network,
            max_restarts=job.max_restarts,
            due_s=now_s + job.deadline_s if job.deadline_s else None,
        )

    @property
    def submission(self) -> Submission:
        """What the user asked for, with the dimensions of the model."""
        return self.packed.submission()

    @property
    def wanted(self) -> Job:
        """What the user asked for."""
        return self.packed.wanted()

    def tell(self, line: str) -> None:
        """Add a line to the job's story."""
        if self.story is None:
            self.story = deque(maxlen=STORY_LENGTH)
        self.story.append(line)

    def present(self) -> list[PartRecord]:
        """Return the parts of the present attempt, in the plan's order."""
        return [part for part in self.parts.values() if part.attempt == self.attempt]

    def unreleased(self) -> list[PartRecord]:
        """Return the parts of any attempt whose site has not yet said `released`."""
        return [part for part in self.parts.values() if part.state != "released"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What was free when the planner was asked, and how often that had grown: links are named `FROM>TO`."""

    free_chips: FreeChips
    free_storage_bytes: dict[str, int]
    free_gbps: dict[str, float]
    growths: int


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class VictimAt:
    """A victim at a cluster: a job of the pool, or (`attempt` 0) a local job of the site."""

    cluster: str
    job: str
    attempt: int = 0


@dataclass(slots=True, kw_only=True)
class State:
    """Everything the coordinator knows; jobs in the order of their submission, `live` those not ended.

    `epoch` counts the servers that have spoken for the pool, `submitted` the jobs ever taken in. `links` are
    the operator's, by `FROM>TO`, and `on_links` what is promised of them in kbit/s. `objective` and
    `patience_s` are the queue's. `touched` are the jobs whose view the event in hand has changed.
    """

    rules: Rules
    jobs: dict[str, JobRecord] = field(default_factory=dict)
    live: dict[str, JobRecord] = field(default_factory=dict)
    keys: dict[tuple[str, str], str] = field(default_factory=dict)
    epoch: int = 0
    submitted: int = 0
    clusters: dict[str, ClusterRecord] = field(default_factory=dict)
    links: dict[str, Link] = field(default_factory=dict)
    on_links: dict[str, int] = field(default_factory=dict)
    objective: Objective = "arrival"
    patience_s: float = 3600.0
    touched: set[str] = field(default_factory=set)
    indexes: Indexes = field(default_factory=Indexes, compare=False)

    def free(self) -> FreeChips:
        """Return the chips that could be promised now at every connected cluster."""
        return {name: record.free() for name, record in self.clusters.items() if record.connected}
