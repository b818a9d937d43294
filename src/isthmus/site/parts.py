"""`SitePart` and `SiteWorker`: parts of the pool's jobs and local jobs at a site. Plain data.

An agent stores them in a file (`PartTable`); a field renamed since the first version of that file keeps its
name in the file as alias.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from isthmus.core.job import Job
from isthmus.core.messages.agent_messages import (
    FailureCause,
    ObservedPart,
    PartState,
    RankMap,
    VerifiedCheckpoint,
    WorkerAddress,
)
from isthmus.core.messages.worker_folder import WorkerWait
from isthmus.core.plan import Plan
from isthmus.core.pool import Aggregators, Link

SitePartState = Literal[
    "new",  # just named by an order or a submission
    "queued",  # waits for devices, and holds none
    "ready",  # of the pool: devices claimed under a lease; victims may still hold them
    "evicting",  # devices claimed; waits until their holders have released them
    "prepared",  # devices held under a lease
    "refused",  # cannot be placed; `detail` says why
    "running",  # workers ordered to run
    "succeeded",  # every worker ended with status 0
    "failed",  # a worker ended with another status; the others are being stopped
    "stopping",  # workers are being stopped; the part is then released or requeued
    "released",  # has no processes and no devices
    "forgotten",  # no longer ordered: its record and its files are removed
]

PartKey = tuple[str, int]
"""(job, attempt); a local job has attempt 0."""

HOLDING: frozenset[SitePartState] = frozenset({"prepared", "running", "succeeded", "failed", "stopping"})
"""States in which a part holds its devices."""

CLAIMING: frozenset[SitePartState] = frozenset({"ready", "evicting"})
"""States in which devices are reserved for a part, although victims may still hold some of them."""

LEASED: frozenset[SitePartState] = frozenset({"ready", "evicting", "prepared"})
"""States in which a part of the pool has devices under a lease and has not started yet."""


@dataclass(kw_only=True, slots=True)
class SiteWorker:
    """One rank of a part."""

    node_group: str
    # Number of devices that the rank needs.
    chips: int
    # Ids of its devices; empty in the simulator, which only counts devices.
    devices: Annotated[tuple[str, ...], Field(alias="cards")] = ()
    # The node that placement by topology chose last, which a site's scheduler is asked for.
    node: str = ""
    # Where it listens, once it has checked in.
    address: WorkerAddress | None = None
    exit_status: int | None = None
    # A process of it may exist.
    live: bool = False
    # The present agent process has started it.
    started: bool = False
    # Size of its log and metrics, and when it last changed.
    num_bytes: int = 0
    last_write_s: float = 0.0
    # Work since its last checkpoint, and the last checkpoint that it has verified.
    unsaved_s: float = 0.0
    protection: VerifiedCheckpoint | None = None
    # What it waits for, as last observed.
    wait: WorkerWait | None = None


@dataclass(kw_only=True, slots=True)
class SitePart:
    """One part of a job at this site. Times are in seconds, by the clock of the events."""

    job: str
    attempt: int
    state: SitePartState = "new"
    # The state that the server sees, where it differs from `state` (`stopping`, `evicting`).
    reported: PartState = "released"
    # Why it was refused, failed or evicted, and where the cause lies.
    detail: str = ""
    fault: FailureCause | None = None
    # The user that submitted the job.
    user: str = ""
    spec: Job | None = None
    plan: Plan | None = None
    # The links to the other sites of its plan.
    links: tuple[Link, ...] = ()
    # The switches that sum its gradients.
    switches: tuple[Aggregators, ...] = ()
    # An earlier attempt of the job has trained.
    has_trained: bool = False
    # What a local job runs.
    command: tuple[str, ...] = ()
    workers: dict[int, SiteWorker] = field(default_factory=dict)
    # One of the site's own priority levels.
    level: str = ""
    # Sequence number of its arrival; decides between the pool's and local jobs of one level.
    arrived: int = 0
    # Position in the queue within its level; lower starts first.
    place: int = 0
    # Parts whose devices it may claim.
    victims: tuple[PartKey, ...] = ()
    # Step that a requested checkpoint must be later than; None without a request.
    protect_after: int | None = None
    # The checkpoint that answers the request.
    protection: VerifiedCheckpoint | None = None
    # The owner takes its devices back: it saves a checkpoint and is released.
    evicted: bool = False
    # A local job that the pool's jobs may preempt.
    preemptible: bool = True
    # How often a local job was preempted.
    num_preemptions: Annotated[int, Field(alias="runs")] = 0
    # A local job that is requeued once its workers have ended.
    requeue: bool = False
    # A local job withdrawn by its user.
    withdrawn: bool = False
    exit_status: int | None = None
    rank_map: RankMap | None = None
    # Duration of the lease, and time of the last state change or lease renewal.
    lease_s: float = 0.0
    since_s: float = 0.0
    # When stopping workers are killed.
    force_at_s: float | None = None
    # When an evicted part is released even without a checkpoint.
    evict_at_s: float | None = None
    # When it got its devices.
    claimed_s: float = 0.0
    # Its workers end themselves with the site's run lease.
    has_run_lease: bool = False
    # The checkpoint request has been passed to the workers.
    checkpoint_requested: bool = False
    # Files of its job are being copied to this site.
    fetching: bool = False
    # Where a scheduler holds the devices: what is asked of it, and the number of holds of the part so far.
    hold: Literal["", "asked", "granted"] = ""
    num_holds: int = 0
    # What the scheduler said that the hold waits for, while `detail` says it.
    hold_detail: str = ""
    # The devices of each rank in the granted hold, and since when it is granted (None: unknown).
    held: tuple[tuple[str, ...], ...] = ()
    granted_at_s: float | None = None
    # When a rank was ended by a signal that this agent did not send, while a scheduler holds its devices: what becomes
    # of the hold says whether the scheduler took them.
    unexplained_s: float | None = None
    # The hold may preempt the jobs of others.
    commits: bool = False
    # Whether the scheduler agrees that the part costs its `victims` and no other job.
    probe: Literal["", "asked", "agreed"] = ""
    # Where a decision centre books the network: whether it holds the paths that leave this site for the part.
    path: Literal["", "asked", "held"] = ""
    # A job of the site's own users that the site's scheduler runs.
    foreign: bool = False
    # When such a job ends at the latest, in seconds since the epoch (None: unknown).
    ends_at_s: float | None = None
    # Its latest states, for error messages.
    history: Annotated[tuple[str, ...], Field(alias="story")] = ()
    # Its last report to the server, None after a change.
    observation: ObservedPart | None = None
    # Number of devices that it needs, by node group.
    wanted: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.set_workers(self.workers)

    def set_workers(self, workers: dict[int, SiteWorker]) -> None:
        """Set the part's workers by rank, and `wanted` from them."""
        self.workers, self.wanted = workers, {}
        for worker in workers.values():
            self.wanted[worker.node_group] = self.wanted.get(worker.node_group, 0) + worker.chips

    @property
    def key(self) -> PartKey:
        """The part's key at this site."""
        return self.job, self.attempt

    @property
    def local(self) -> bool:
        """Whether it is a local job, which the server does not manage."""
        return self.attempt == 0

    @property
    def ungranted(self) -> bool:
        """Whether it claims devices that the site's scheduler has not granted."""
        claims = self.hold == "asked" or (self.probe == "agreed" and not self.hold)
        return claims and self.state in CLAIMING

    @property
    def live(self) -> bool:
        """Whether a process of it may exist."""
        return any(worker.live for worker in self.workers.values())

    @property
    def unsaved_s(self) -> float:
        """Seconds of unsaved work: the maximum over its ranks."""
        return max((worker.unsaved_s for worker in self.workers.values()), default=0.0)
