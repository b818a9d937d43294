"""Events that the site machine handles and instructions that it returns, as frozen dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from isthmus.core.messages.agent_messages import AgentOrders, RankMap, VerifiedCheckpoint, WorkerAddress
from isthmus.core.messages.worker_folder import WorkerWait
from isthmus.site.parts import PartKey, SitePart


@dataclass(frozen=True, kw_only=True)
class LocalJob:
    """A job of the site's own users: `command` on `chips` devices of `node_group`.

    `level` is one of the site's own priority levels; `preemptible` allows its preemption by the pool's jobs.
    """

    name: str
    command: tuple[str, ...]
    node_group: str
    chips: int
    level: str = "middle"
    preemptible: bool = True


@dataclass(frozen=True, kw_only=True)
class OrdersReceived:
    """The server answered the report that was sent at `sent_s` (default: `now_s`).

    `objections` say, by part, why the site cannot start it as its job asks: no image fits, or a value cannot be passed.
    """

    now_s: float
    orders: AgentOrders
    sent_s: float | None = None
    objections: Mapping[PartKey, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedWorker:
    """One worker as seen through the adapter and the worker's folder."""

    job: str
    attempt: int
    rank: int
    # `absent`: never started.
    state: Literal["absent", "running", "exited"]
    exit_status: int | None = None
    # Where it listens, once it has checked in.
    address: WorkerAddress | None = None
    # Size of its log and metrics.
    output_bytes: int = 0
    # Work since its last checkpoint, and the last checkpoint that it has verified.
    unsaved_s: float = 0.0
    protection: VerifiedCheckpoint | None = None
    # What it waits for, if it reports that.
    wait: WorkerWait | None = None
    # End of its log.
    log_tail: str = ""


@dataclass(frozen=True, kw_only=True)
class WorkersObserved:
    """Workers of live parts were observed. Without workers it only advances the machine's time."""

    now_s: float
    workers: tuple[ObservedWorker, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LocalJobsObserved:
    """All local jobs that exist now, oldest first; `unreadable` names those that could not be read."""

    now_s: float
    jobs: tuple[LocalJob, ...]
    unreadable: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LocalJobSubmitted:
    """A local job was submitted."""

    now_s: float
    job: LocalJob


@dataclass(frozen=True, kw_only=True)
class LocalJobWithdrawn:
    """The user of a local job withdrew it, or acknowledged its end."""

    now_s: float
    name: str


@dataclass(frozen=True, kw_only=True)
class QueueObserved:
    """The queue as the site's scheduler holds it, in starting order."""

    now_s: float
    entries: tuple[PartKey, ...]


@dataclass(frozen=True, kw_only=True)
class FetchObserved:
    """Progress of copying a job's files to this site: `progress_text` describes it, `complete` marks completion."""

    now_s: float
    job: str
    progress_text: str
    complete: bool = False
    failed: bool = False


@dataclass(frozen=True, kw_only=True)
class ForeignPart:
    """A running job of the site's own users that the site's scheduler runs on `devices`, by node group."""

    name: str
    devices: Mapping[str, tuple[str, ...]]
    level: str
    preemptible: bool = False
    # When it ends at the latest, in seconds since the epoch (None: unknown).
    ends_at_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class InventoryObserved:
    """The site's devices by node group, and the jobs of others on them."""

    now_s: float
    devices: Mapping[str, tuple[str, ...]]
    foreign: tuple[ForeignPart, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HoldObserved:
    """What became of hold `number` of a part: `ended`: it holds nothing.

    Once it is granted, `devices` are those of each rank, and `granted_at_s` is since when (None: unknown).
    """

    now_s: float
    part: PartKey
    number: int
    state: Literal["waiting", "granted", "ended"]
    devices: tuple[tuple[str, ...], ...] = ()
    detail: str = ""
    granted_at_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class PathObserved:
    """What became of a part's paths on the network: `ended`: there is none, or no longer one."""

    now_s: float
    part: PartKey
    state: Literal["held", "ended"]
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class ProbeObserved:
    """The names of the jobs that the scheduler would preempt for a part, asked for when the part had `victims`."""

    now_s: float
    part: PartKey
    victims: tuple[PartKey, ...]
    preempted: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class HoursObserved:
    """Whether the owner admits the pool's jobs at this hour, and whether running ones may be moved."""

    now_s: float
    is_open: bool
    may_move: bool = True


@dataclass(frozen=True, kw_only=True)
class ShutdownRequested:
    """The agent shuts down: all workers must end and all devices be released.

    With `saves_first` parts of the pool that train have the owner's `protect_s` for a checkpoint; a later event
    without it ends that wait.
    """

    now_s: float
    saves_first: bool = False


SiteEvent = (
    OrdersReceived
    | WorkersObserved
    | LocalJobsObserved
    | LocalJobSubmitted
    | LocalJobWithdrawn
    | QueueObserved
    | FetchObserved
    | HoursObserved
    | InventoryObserved
    | HoldObserved
    | PathObserved
    | ProbeObserved
    | ShutdownRequested
)


@dataclass(frozen=True, kw_only=True)
class StartWorker:
    """Write the folder of `rank` and start it on its devices."""

    part: SitePart
    rank: int


@dataclass(frozen=True, kw_only=True)
class StopWorker:
    """Send SIGTERM to `rank`, or SIGKILL with `force`."""

    part: SitePart
    rank: int
    force: bool


@dataclass(frozen=True, kw_only=True)
class RenewRunLease:
    """Let the workers of the pool run until `until_s`, by the clock of the events; the lease is one of `lease_s`."""

    lease_s: float
    until_s: float


@dataclass(frozen=True, kw_only=True)
class WriteRankMap:
    """Write the rank map for every worker of the part."""

    part: SitePart
    rank_map: RankMap


@dataclass(frozen=True, kw_only=True)
class RequestCheckpoint:
    """Request a verified checkpoint of a step after `after` from every worker of the part."""

    part: SitePart
    after: int


@dataclass(frozen=True, kw_only=True)
class FetchFiles:
    """Copy the files of the part's job here from the first of `clusters` that has them.

    Without `with_checkpoints` other sites of the plan have the checkpoints, and their workers send what is needed.
    """

    part: SitePart
    clusters: tuple[str, ...]
    with_checkpoints: bool = True


@dataclass(frozen=True, kw_only=True)
class ReportLocalExit:
    """Report a local job's exit status to its user."""

    part: SitePart
    exit_status: int


@dataclass(frozen=True, kw_only=True)
class ReorderQueue:
    """Remove `removed` from the site's queue, then apply `moves`: (part, part to put it behind; None: first)."""

    moves: tuple[tuple[PartKey, PartKey | None], ...]
    removed: tuple[PartKey, ...]


@dataclass(frozen=True, kw_only=True)
class LogWarning:
    """Log a warning once."""

    text: str


SiteInstruction = (
    StartWorker
    | StopWorker
    | RenewRunLease
    | WriteRankMap
    | RequestCheckpoint
    | FetchFiles
    | ReportLocalExit
    | ReorderQueue
    | LogWarning
)
