"""The parts that a site holds, of the pool's jobs and of its own users' jobs, with their workers. Plain data.

An agent keeps them on disk (`PartTable`); a field whose name changed since the first version of that file
carries the name of the file as its alias.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from isthmus.core.job import Job
from isthmus.core.messages.agent_messages import (
    Fault,
    ObservedPart,
    PartState,
    Protection,
    RankMap,
    WorkerAddress,
)
from isthmus.core.plan import Plan

SitePartState = Literal[
    "new",  # named for the first time
    "queued",  # waits for devices, and holds none
    "ready",  # of the pool: devices claimed under a lease; victims may still hold them
    "evicting",  # devices claimed; waits until their holders are gone
    "prepared",  # devices held under a lease
    "refused",  # cannot be placed; `detail` says why
    "running",  # workers ordered to run
    "succeeded",  # every worker ended with status 0
    "failed",  # a worker ended otherwise; the others are being stopped
    "stopping",  # workers are being stopped so that the part can be released, or queued again
    "released",  # no process and no device left
    "forgotten",  # the server no longer names it: its record and its files are removed
]

PartKey = tuple[str, int]
"""(job, attempt); a local job has attempt 0."""

HOLDING: frozenset[SitePartState] = frozenset({"prepared", "running", "succeeded", "failed", "stopping"})
"""States in which a part holds its devices."""

CLAIMING: frozenset[SitePartState] = frozenset({"ready", "evicting"})
"""States in which devices are reserved for a part, although victims may still hold some of them."""

LEASED: frozenset[SitePartState] = frozenset({"ready", "evicting", "prepared"})
"""States in which a part of the pool has devices under a lease, and has done no work yet."""


@dataclass(kw_only=True, slots=True)
class SiteWorker:
    """One rank of a part."""

    node_group: str
    # Number of devices that the rank needs.
    chips: int
    # Ids of its devices, in the agent's device book; the simulator's book counts without ids.
    devices: Annotated[tuple[str, ...], Field(alias="cards")] = ()
    # Where it listens, once it has checked in.
    address: WorkerAddress | None = None
    exit_status: int | None = None
    # A process of it may exist.
    live: bool = False
    # This life of the agent has started it.
    started: bool = False
    # Bytes that it has written to its log and metrics, and when that number last changed.
    num_bytes: int = 0
    last_write_s: float = 0.0
    # Work since its last checkpoint, and the last checkpoint that it has verified.
    unsaved_s: float = 0.0
    protection: Protection | None = None


@dataclass(kw_only=True, slots=True)
class SitePart:
    """One part of a job at this site. Times are seconds of the clock that events carry."""

    job: str
    attempt: int
    state: SitePartState = "new"
    # The state that the server sees, where it differs from `state` (`stopping`, `evicting`).
    reported: PartState = "released"
    # Why it was refused, failed or evicted, and where the cause lies.
    detail: str = ""
    fault: Fault | None = None
    spec: Job | None = None
    plan: Plan | None = None
    # What a local job runs.
    command: tuple[str, ...] = ()
    workers: dict[int, SiteWorker] = field(default_factory=dict)
    # One of the site's own priority levels.
    level: str = ""
    # Sequence number of its arrival; decides between the pool's and local jobs of one level.
    arrived: int = 0
    # Position in the queue within its level; lower starts first.
    place: int = 0
    # Parts whose devices its claim may take.
    victims: tuple[PartKey, ...] = ()
    # While a checkpoint is requested: it must be of a later step than this.
    protect_after: int | None = None
    # The checkpoint that answers the request.
    protection: Protection | None = None
    # The owner takes its devices back: it saves its work and leaves.
    evicted: bool = False
    # A local job that allows its preemption by the pool's jobs.
    preemptible: bool = True
    # How often a local job was preempted.
    num_preemptions: Annotated[int, Field(alias="runs")] = 0
    # A local job that goes back to the queue once its workers have ended.
    requeue: bool = False
    # A local job that its user no longer wants.
    withdrawn: bool = False
    exit_status: int | None = None
    rank_map: RankMap | None = None
    # How long devices are held without renewal, and since when: of the state, or of the last renewal.
    lease_s: float = 0.0
    since_s: float = 0.0
    # When workers that were asked to stop are killed.
    force_at_s: float | None = None
    # When an evicted part leaves even without a checkpoint.
    evict_at_s: float | None = None
    # When it got its devices.
    claimed_s: float = 0.0
    # The present request for a checkpoint has been handed to the workers.
    checkpoint_requested: bool = False
    # Files of its job are being copied to this site.
    fetching: bool = False
    # Its latest states, for error messages.
    history: Annotated[tuple[str, ...], Field(alias="story")] = ()
    # What the server was last told of it, None once something of it has changed.
    observation: ObservedPart | None = None
    # The number of devices that it needs of each node group.
    wanted: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.set_workers(self.workers)

    def set_workers(self, workers: dict[int, SiteWorker]) -> None:
        """Give the part these workers, by rank."""
        self.workers, self.wanted = workers, {}
        for worker in workers.values():
            self.wanted[worker.node_group] = self.wanted.get(worker.node_group, 0) + worker.chips

    @property
    def key(self) -> PartKey:
        """The name of the part at this site."""
        return self.job, self.attempt

    @property
    def local(self) -> bool:
        """Whether it is a job of the site's own users, which the server does not manage."""
        return self.attempt == 0

    @property
    def live(self) -> bool:
        """Whether a process of it may exist."""
        return any(worker.live for worker in self.workers.values())

    @property
    def unsaved_s(self) -> float:
        """Seconds of work that would be lost now: those of the rank that has saved least."""
        return max((worker.unsaved_s for worker in self.workers.values()), default=0.0)
