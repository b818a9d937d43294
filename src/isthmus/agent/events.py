"""What happens to an agent (`Event`) and what it has done about it (`Instruction`): frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from isthmus.agent.parts import HeldPart, PartKey
from isthmus.core.messages import AgentOrders, Protection, RankMap, WorkerAddress


@dataclass(frozen=True, kw_only=True)
class LocalJob:
    """A job of the site's own users: `command` on `chips` cards of `node_group`.

    `level` is one of the site's own priorities; `preemptible` says that the job takes being preempted.
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


@dataclass(frozen=True, kw_only=True)
class SeenWorker:
    """What the adapter and the folder show of one worker.

    `num_bytes` is what it has written to its log and metrics; `unsaved_s` its work since the last checkpoint;
    `protection` the last checkpoint that it has verified; `last_words` ends its log.
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
class WorkersSeen:
    """All workers of live parts were looked at (perhaps none): also the tick of the machine's clock."""

    now_s: float
    workers: tuple[SeenWorker, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LocalJobsSeen:
    """Every local job that should exist now, oldest first; of those named in `unread` nothing is known."""

    now_s: float
    jobs: tuple[LocalJob, ...]
    unread: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class QueueSeen:
    """The site's queue as its scheduler has it, first to start first."""

    now_s: float
    entries: tuple[PartKey, ...]


@dataclass(frozen=True, kw_only=True)
class FilesSeen:
    """How far the files of a job are: `words` tell it, and why where it `failed`; `here` when all are."""

    now_s: float
    job: str
    words: str
    here: bool = False
    failed: bool = False


@dataclass(frozen=True, kw_only=True)
class HoursSeen:
    """Whether the owner lets the pool work at this hour."""

    now_s: float
    is_open: bool


@dataclass(frozen=True, kw_only=True)
class ShutdownAsked:
    """The agent is to end and to leave nothing behind."""

    now_s: float


Event = OrdersReceived | WorkersSeen | LocalJobsSeen | QueueSeen | FilesSeen | HoursSeen | ShutdownAsked


@dataclass(frozen=True, kw_only=True)
class StartWorker:
    """Write the folder of `rank` and start it on `cards`."""

    part: HeldPart
    rank: int


@dataclass(frozen=True, kw_only=True)
class StopWorker:
    """Ask `rank` to end, or end it."""

    part: HeldPart
    rank: int
    force: bool


@dataclass(frozen=True, kw_only=True)
class WriteRanks:
    """Hand every worker of the part the rank map."""

    part: HeldPart
    rank_map: RankMap


@dataclass(frozen=True, kw_only=True)
class AskProtection:
    """Ask every worker of the part for a verified checkpoint after more than `after` steps."""

    part: HeldPart
    after: int


@dataclass(frozen=True, kw_only=True)
class FetchFiles:
    """Bring the files of the part's job here from the first of `clusters` that has them."""

    part: HeldPart
    clusters: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class EndLocal:
    """Tell the user of a local job that it has ended, and how."""

    part: HeldPart
    exit_status: int


@dataclass(frozen=True, kw_only=True)
class OrderQueue:
    """Take `gone` out of the site's queue, then put each of `moves` directly behind another, or first."""

    moves: tuple[tuple[PartKey, PartKey | None], ...]
    gone: tuple[PartKey, ...]


@dataclass(frozen=True, kw_only=True)
class Complain:
    """Say in the log what somebody ought to look at, once."""

    text: str


Instruction = (
    StartWorker | StopWorker | WriteRanks | AskProtection | FetchFiles | EndLocal | OrderQueue | Complain
)
