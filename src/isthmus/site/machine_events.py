"""The events that the site machine takes in, and the instructions that it returns: frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from isthmus.core.messages.agent_messages import AgentOrders, Protection, RankMap, WorkerAddress
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
    """The server answered a report."""

    now_s: float
    orders: AgentOrders


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedWorker:
    """What the adapter and the worker's folder show of one worker.

    `num_bytes` is the size of its log and metrics; `unsaved_s` its work since the last checkpoint;
    `protection` the last checkpoint that it has verified; `last_words` the end of its log.
    """

    job: str
    attempt: int
    rank: int
    state: Literal["absent", "running", "exited"]
    exit_status: int | None = None
    address: WorkerAddress | None = None
    num_bytes: int = 0
    unsaved_s: float = 0.0
    protection: Protection | None = None
    last_words: str = ""


@dataclass(frozen=True, kw_only=True)
class WorkersObserved:
    """Workers of live parts were observed. Without any it is the tick of the machine's clock."""

    now_s: float
    workers: tuple[ObservedWorker, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LocalJobsObserved:
    """All local jobs that exist now, oldest first; nothing is known of those named in `unread`."""

    now_s: float
    jobs: tuple[LocalJob, ...]
    unread: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LocalJobSubmitted:
    """One local job more exists."""

    now_s: float
    job: LocalJob


@dataclass(frozen=True, kw_only=True)
class LocalJobWithdrawn:
    """The user of a local job no longer wants it, or has seen that it ended."""

    now_s: float
    name: str


@dataclass(frozen=True, kw_only=True)
class QueueObserved:
    """The site's queue as its scheduler has it, first to start first."""

    now_s: float
    entries: tuple[PartKey, ...]


@dataclass(frozen=True, kw_only=True)
class FetchObserved:
    """Progress of copying a job's files to this site: `words` describe it; `here` once all have arrived."""

    now_s: float
    job: str
    words: str
    here: bool = False
    failed: bool = False


@dataclass(frozen=True, kw_only=True)
class HoursObserved:
    """Whether the owner lets the pool work at this hour."""

    now_s: float
    is_open: bool


@dataclass(frozen=True, kw_only=True)
class ShutdownRequested:
    """The agent is to end and to leave no worker and no device held."""

    now_s: float


Event = (
    OrdersReceived
    | WorkersObserved
    | LocalJobsObserved
    | LocalJobSubmitted
    | LocalJobWithdrawn
    | QueueObserved
    | FetchObserved
    | HoursObserved
    | ShutdownRequested
)


@dataclass(frozen=True, kw_only=True)
class StartWorker:
    """Write the folder of `rank` and start it on its devices."""

    part: SitePart
    rank: int


@dataclass(frozen=True, kw_only=True)
class StopWorker:
    """Ask `rank` to end (SIGTERM), or with `force` kill it."""

    part: SitePart
    rank: int
    force: bool


@dataclass(frozen=True, kw_only=True)
class WriteRankMap:
    """Hand the rank map to every worker of the part."""

    part: SitePart
    rank_map: RankMap


@dataclass(frozen=True, kw_only=True)
class RequestCheckpoint:
    """Request of every worker of the part a verified checkpoint of a later step than `after`."""

    part: SitePart
    after: int


@dataclass(frozen=True, kw_only=True)
class FetchFiles:
    """Copy the files of the part's job here from the first of `clusters` that has them."""

    part: SitePart
    clusters: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ReportLocalExit:
    """Tell the user of a local job that it has ended, and its exit status."""

    part: SitePart
    exit_status: int


@dataclass(frozen=True, kw_only=True)
class ReorderQueue:
    """Remove `gone` from the site's queue, then put each of `moves` directly behind another, or first."""

    moves: tuple[tuple[PartKey, PartKey | None], ...]
    gone: tuple[PartKey, ...]


@dataclass(frozen=True, kw_only=True)
class LogWarning:
    """Log a warning once."""

    text: str


Instruction = (
    StartWorker
    | StopWorker
    | WriteRankMap
    | RequestCheckpoint
    | FetchFiles
    | ReportLocalExit
    | ReorderQueue
    | LogWarning
)
