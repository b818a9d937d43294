"""What the server and a site's agent say to each other.

The protocol is level-triggered: in every exchange the agent reports what it *has* (`AgentReport`), and the
server answers with what it *should have* (`AgentOrders`). A lost, repeated or delayed exchange is mended by
the next one; nothing is ever ordered twice, since a part is named by (job, attempt, cluster).

A part's life at its site only moves forward (prepared or refused, running, succeeded or failed, released),
so a late or repeated report can never take it back. Two duties of the agent follow. It reports every part it
knows until the orders no longer name it. And it answers an order `released` for a part that it does not know
by reporting it `released`: silence about a part proves nothing, since the report may be older than the order.
Of one set of orders it carries out those to release first.
"""

from __future__ import annotations

from typing import Any, Literal

from isthmus.core.base import Count, Frozen, Index, Name, NotNegative
from isthmus.core.job import Job
from isthmus.core.plan import Plan
from isthmus.core.pool import Cluster
from isthmus.core.priority import Priority

PROTOCOL_VERSION = 1

PartState = Literal["queued", "ready", "prepared", "refused", "running", "succeeded", "failed", "released"]
"""What an agent observes. `queued`: it stands in the site's queue and holds nothing; `ready`: its cards are
free or those of victims that may be evicted for it, and kept for it under a lease, while nobody has been
evicted; `prepared`: cards are held under a lease; `refused`: they could not be had; `released`: nothing of
the part is left at the site, not a process and not a card."""

Desired = Literal["queued", "ready", "prepared", "running", "released"]
"""What the server wants of a part. From `prepared` on the victims of its order are evicted."""


Fault = Literal["peer", "evicted", "own", "permanent"]
"""Where the cause of a failure lies. `peer`: a rank here lost another one, so the cause is elsewhere;
`evicted`: the site's owner took the cards back for a local job of a higher level, and the part (protected
first if there was time) goes to `released` by itself; `own`: it is here; `permanent`: it is here, and another
attempt would end in the same way."""

_BY_WEIGHT: tuple[Fault | None, ...] = (None, "peer", "evicted", "own", "permanent")


def explains_more(one: Fault | None, other: Fault | None) -> bool:
    """Tell whether a failure of fault `one` is nearer to the root of the matter than one of `other`."""
    return _BY_WEIGHT.index(one) > _BY_WEIGHT.index(other)


class WorkerAddress(Frozen):
    """Where a rank listens inside its cluster."""

    rank: Index
    cluster: Name
    host: str
    port: Count


class RankMap(Frozen):
    """Every rank of a run with its address, once all have checked in."""

    workers: tuple[WorkerAddress, ...]


class Protection(Frozen):
    """A checkpoint that will survive the part: written, read back and verified, `num_bytes` large."""

    step: Index
    num_bytes: Index


class Victim(Frozen):
    """Whose cards a part may have: a part of another job of the pool, or (`attempt` 0) a local job."""

    job: Name
    attempt: Index = 0


class QueueEntry(Frozen):
    """One waiting job of a site's queue: a part of the pool, or (`attempt` 0) a local job."""

    job: Name
    attempt: Index = 0


class LocalJobSeen(Frozen):
    """A job of the site's own users, as far as the pool needs to know. `level` is one of the site's own.

    `preemptible` says that the owner's policy lets jobs of the pool of a higher level take its cards;
    `unsaved_s` is the work, in seconds, that it would lose.
    """

    name: Name
    chips: dict[Name, Count]
    level: Name
    running: bool
    preemptible: bool = False
    unsaved_s: NotNegative = 0.0


class ObservedPart(Frozen):
    """What an agent has of one part. `fault` says of one that failed where the cause lies, `detail` what.

    Both stay with the part until it is forgotten, so that a lost report loses no reason. `unsaved_s` is the
    work since its last checkpoint; `protection` answers an order to protect.
    """

    job: Name
    attempt: Count
    state: PartState
    detail: str = ""
    fault: Fault | None = None
    workers: tuple[WorkerAddress, ...] = ()
    unsaved_s: NotNegative = 0.0
    protection: Protection | None = None


class PartOrder(Frozen):
    """What an agent should have of one part. `lease_s` bounds how long `ready` and `prepared` hold cards.

    `user` is whose job it is. `protect` asks a running part for a checkpoint that survives it, before it is
    released. `victims` are those whose cards it is given from `prepared` on, as far as the policy of the
    site's owner allows. `files_at` names the clusters that have the job's files, where this one may not.
    """

    job: Name
    attempt: Count
    desired: Desired
    lease_s: NotNegative = 30.0
    user: str = ""
    priority: Priority = "middle"
    protect: bool = False
    victims: tuple[Victim, ...] = ()
    files_at: tuple[Name, ...] = ()
    spec: Job | None = None
    plan: Plan | None = None
    rank_map: RankMap | None = None


class AgentReport(Frozen):
    """One agent's half of an exchange. `incarnation` is new at each start of the agent.

    `queue` is the site's queue as it stands, first to start first; `local_jobs` are those of its own users.
    """

    protocol: Count = PROTOCOL_VERSION
    cluster: Cluster
    incarnation: str
    free_chips: dict[Name, Index]
    parts: tuple[ObservedPart, ...] = ()
    queue: tuple[QueueEntry, ...] = ()
    local_jobs: tuple[LocalJobSeen, ...] = ()
    free_storage_bytes: Index | None = None
    metrics: tuple[StepMetrics, ...] = ()
    logs: tuple[LogChunk, ...] = ()


class AgentOrders(Frozen):
    """The server's half: every part that should exist at the site, and when to report again.

    An answer also says that the metrics and logs of the report are on disk at the server. `fence` grows with
    every change of the server that speaks for the pool: an agent drops orders under a lower one than it has
    seen. `queue` is the order in which the pool's jobs should stand in the site's queue.
    """

    protocol: Count = PROTOCOL_VERSION
    fence: Index = 0
    parts: tuple[PartOrder, ...] = ()
    queue: tuple[Name, ...] = ()
    poll_after_s: NotNegative = 0.2


class StepMetrics(Frozen):
    """One rank's figures of one step. Loss is set by the last stage only; WAN bytes are those sent."""

    job: Name
    attempt: Count
    rank: Index
    step: Index
    values: dict[str, float | None]
    spans: tuple[Span, ...] = ()


class Span(Frozen):
    """One thing a stage did in a step, for the timeline: seconds since the epoch."""

    kind: str
    micro_batch: int
    start_s: float
    end_s: float


class LogChunk(Frozen):
    """Text of a worker's log from byte `offset` on."""

    job: Name
    attempt: Count
    rank: Index
    offset: Index
    text: str


def parse_protocol(message: dict[str, Any]) -> int:
    """Return the protocol version a message claims, 0 where it claims none."""
    version = message.get("protocol")
    return version if isinstance(version, int) else 0


AgentReport.model_rebuild()
StepMetrics.model_rebuild()
