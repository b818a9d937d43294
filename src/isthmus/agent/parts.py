"""What an agent holds: parts of the pool's jobs and the site's own, with their workers. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from isthmus.core.job import Job
from isthmus.core.messages import Fault, PartState, Protection, RankMap, WorkerAddress
from isthmus.core.plan import Plan

State = Literal[
    "new",  # named for the first time
    "queued",  # waits for cards, and holds none
    "ready",  # of the pool: cards claimed under a lease; those of its victims are still theirs
    "evicting",  # cards claimed; waits until those that hold them are gone
    "prepared",  # cards held under a lease
    "refused",  # could not be had; `detail` says why
    "running",  # workers ordered to run
    "succeeded",  # every worker ended with 0
    "failed",  # a worker ended otherwise; the others are being stopped
    "stopping",  # workers are being stopped so that the part can be released, or queued again
    "released",  # no process and no card left
    "forgotten",  # the server no longer names it: its record and its files go
]

PartKey = tuple[str, int]
"""(job, attempt); a local job has attempt 0."""


@dataclass(kw_only=True)
class HeldWorker:
    """One rank of a part: the `chips` it needs, its cards once it has any, and what was last seen of it.

    `live` while a process of it may exist; `started` once this life of the agent has started it. `num_bytes`
    is what it has written, `wrote_s` when that was last seen to change, by the agent's clock. `unsaved_s` is
    the work since its last checkpoint, `protection` the last one that it has verified.
    """

    node_group: str
    chips: int
    cards: tuple[str, ...] = ()
    address: WorkerAddress | None = None
    exit_status: int | None = None
    live: bool = False
    started: bool = False
    num_bytes: int = 0
    wrote_s: float = 0.0
    unsaved_s: float = 0.0
    protection: Protection | None = None


@dataclass(kw_only=True)
class HeldPart:
    """One part of a job at this site. Times are seconds of the agent's clock and are not kept on disk.

    `reported` is what the server is told while `state` is `stopping`; `since_s` is when the part came into
    its state or its lease was last renewed, `claimed_s` when it got its cards. `detail` and `fault` say why
    it was refused, failed or evicted. `story` lists its latest states. `level` is one of the site's own; of a
    level, the lower `place` stands first in the queue, and `arrived` (larger for whoever came later) decides
    between the pool and the site's own. `fetching` while files of its job are brought here.

    `protect_after` is the step, while a checkpoint of a later one is wanted (`isthmus.agent.protection`), and
    `protection` that checkpoint; `evicted` says that it must go for a local job. Of local jobs only: `runs`
    is how often it was preempted, `requeue` that it is being, `preemptible` its own word on it, `withdrawn`
    that its user no longer wants it.
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
    level: str = ""
    arrived: int = 0
    place: int = 0
    victims: tuple[PartKey, ...] = ()
    protect_after: int | None = None
    protection: Protection | None = None
    evicted: bool = False
    preemptible: bool = True
    runs: int = 0
    requeue: bool = False
    withdrawn: bool = False
    exit_status: int | None = None
    rank_map: RankMap | None = None
    lease_s: float = 0.0
    since_s: float = 0.0
    force_at_s: float | None = None
    evict_at_s: float | None = None
    claimed_s: float = 0.0
    asked: bool = False
    fetching: bool = False
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

    @property
    def wanted(self) -> dict[str, int]:
        """The number of cards that it needs of each node group."""
        wanted: dict[str, int] = {}
        for worker in self.workers.values():
            wanted[worker.node_group] = wanted.get(worker.node_group, 0) + worker.chips
        return wanted
