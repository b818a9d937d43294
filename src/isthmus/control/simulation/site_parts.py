"""What a simulated site holds (`SitePart`) and what it asks of its world (`Act`): plain data.

The names of states are those of the agent (see `docs/design/pool-simulator.md`): what is told of a part and
what it does on an order must be the same, which a conformance test compares. Cards are counted, not named.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from isthmus.core.messages import Fault, ObservedPart, PartState, Protection, RankMap, WorkerAddress
from isthmus.core.plan import Plan

PartKey = tuple[str, int]
"""(job, attempt); a local job has attempt 0."""

SiteState = Literal[
    "new",
    "queued",
    "ready",
    "evicting",
    "prepared",
    "refused",
    "running",
    "succeeded",
    "failed",
    "stopping",
    "released",
    "forgotten",
]

HOLDING = frozenset[SiteState]({"prepared", "running", "succeeded", "failed", "stopping"})
"""A part holds its cards."""

CLAIMING = frozenset[SiteState]({"ready", "evicting"})
"""A part's cards are kept for it, though victims may hold them still."""


class LocalJob(NamedTuple):
    """A job of the site's own users on `chips` cards of `node_group`; `level` is one of the site's own."""

    name: str
    node_group: str
    chips: int
    level: str = "middle"
    preemptible: bool = True


@dataclass(slots=True, kw_only=True, eq=False)
class SitePart:
    """One part of a job, or a local job. Times are seconds of the simulated clock.

    `chips` by node group; of them `taken_from` says how many victims hold still. `reported` is what is told
    while `state` is `stopping`. Of a level the lower `place` stands first in the queue, and `arrived` decides
    between the pool and the site's own. `protect_after` is the step, while a later checkpoint is wanted,
    `saved` the last one verified. `live` while processes of it may exist. Of local jobs only: `requeue` says
    that it is being preempted, `withdrawn` that its user no longer wants it.
    """

    job: str
    attempt: int
    state: SiteState = "new"
    reported: PartState = "released"
    detail: str = ""
    fault: Fault | None = None
    plan: Plan | None = None
    ranks: tuple[int, ...] = ()
    chips: dict[str, int] = field(default_factory=dict)
    taken_from: dict[PartKey, dict[str, int]] = field(default_factory=dict)
    level: str = ""
    arrived: int = 0
    place: int = 0
    victims: tuple[PartKey, ...] = ()
    addresses: tuple[WorkerAddress, ...] = ()
    rank_map: RankMap | None = None
    unsaved_s: float = 0.0
    saved: Protection | None = None
    protect_after: int | None = None
    protection: Protection | None = None
    asked: bool = False
    evicted: bool = False
    preemptible: bool = True
    requeue: bool = False
    withdrawn: bool = False
    exit_status: int | None = None
    live: bool = False
    lease_s: float = 0.0
    since_s: float = 0.0
    claimed_s: float = 0.0
    force_at_s: float | None = None
    evict_at_s: float | None = None
    told: ObservedPart | None = None

    @property
    def key(self) -> PartKey:
        """The name of the part at this site."""
        return self.job, self.attempt

    @property
    def local(self) -> bool:
        """Whether it is the site's own job and no business of the pool."""
        return self.attempt == 0


class Act(NamedTuple):
    """What the site has done at once: to start or stop processes, to hand out ranks, to ask for a checkpoint.

    A forced stop ends a process for certain; a checkpoint is wanted of a step after `after`.
    """

    what: Literal["start", "stop", "ranks", "protect"]
    part: SitePart
    force: bool = False
    after: int = 0
