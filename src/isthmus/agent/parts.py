"""What an agent holds (`HeldPart`), what it learns (events), what it has done (instructions): plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from isthmus.core.job import Job
from isthmus.core.messages import AgentOrders, Fault, PartState, RankMap, WorkerAddress
from isthmus.core.plan import Plan

State = Literal[
    "new",  # named for the first time
    "queued",  # a local job that waits for cards
    "prepared",  # cards held under a lease
    "refused",  # could not be held; `detail` says why
    "running",  # workers ordered to run
    "succeeded",  # every worker ended with 0
    "failed",  # a worker ended otherwise; the others are being stopped
    "stopping",  # workers are being stopped so that the part can be released
    "released",  # no process and no card left
    "forgotten",  # the server no longer names it: its record and its files go
]

PartKey = tuple[str, int]
"""(job, attempt); a local job has attempt 0."""


@dataclass(kw_only=True)
class HeldWorker:
    """One rank of a part: its cards, and what was last seen of it.

    `live` while a process of it may exist; `started` once this life of the agent has started it. `num_bytes`
    is what it has written, `wrote_s` when that was last seen to change, by the agent's clock.
    """

    node_group: str
    cards: tuple[str, ...]
    address: WorkerAddress | None = None
    exit_status: int | None = None
    live: bool = False
    started: bool = False
    num_bytes: int = 0
    wrote_s: float = 0.0


@dataclass(kw_only=True)
class HeldPart:
    """One part of a job at this site. Times are seconds of the agent's clock and are not kept on disk.

    `reported` is what the server is told while `state` is `stopping`. `detail` and `fault` say why it was
    refused or failed. `story` lists the states so far.
    """

    job: str
    attempt: int
    state: State = "new"
    reported: PartState = "released"
    detail: str = ""
    fault: Fault | None = None
    spec: Job | None = None
    plan: Plan | None = None
    command: tuple[str, ...] = ()
    workers: dict[int, HeldWorker] = field(default_factory=dict)
    rank_map: RankMap | None = None
    lease_s: float = 0.0
    since_s: float = 0.0
    force_at_s: float | None = None
    story: tuple[str, ...] = ()

    @property
    def key(self) -> PartKey:
        """The name of the part at this site."""
        return self.job, self.attempt

    @property
    def local(self) -> bool:
        """Whether it is the site's own job and no business of the server."""
        return self.attempt == 0

    @property
    def live(self) -> bool:
        """Whether a process of it may exist."""
        return any(worker.live for worker in self.workers.values())


@dataclass(frozen=True, kw_only=True)
class LocalJob:
    """A job of the site's own users: `command` on `chips` cards of `node_group`."""

    name: str
    command: tuple[str, ...]
    node_group: str
    chips: int


@dataclass(frozen=True, kw_only=True)
class OrdersReceived:
    """The server answered a report."""

    now_s: float
    orders: AgentOrders


@dataclass(frozen=True, kw_only=True)
class SeenWorker:
    """What the adapter and the folder show of one worker.

    `num_bytes` is what it has written to its log and metrics; `last_words` ends its log.
    """

    job: str
    attempt: int
    rank: int
    state: Literal["absent", "running", "exited"]
    exit_status: int | None = None
    address: WorkerAddress | None = None
    num_bytes: int = 0
    last_words: str = ""


@dataclass(frozen=True, kw_only=True)
class WorkersSeen:
    """All workers of live parts were looked at (perhaps none): also the tick of the machine's clock."""

    now_s: float
    workers: tuple[SeenWorker, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LocalJobsSeen:
    """Every local job that should exist now, oldest first."""

    now_s: float
    jobs: tuple[LocalJob, ...]


@dataclass(frozen=True, kw_only=True)
class ShutdownAsked:
    """The agent is to end and to leave nothing behind."""

    now_s: float


Event = OrdersReceived | WorkersSeen | LocalJobsSeen | ShutdownAsked


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


Instruction = StartWorker | StopWorker | WriteRanks
