"""Messages between the server and a site's agent.

The protocol is level-triggered: each sync carries the agent's observed state (`AgentReport`) and the server's
desired state (`AgentOrders`). The next sync repairs a lost, repeated or delayed one. Orders are idempotent,
because (job, attempt, cluster) identifies a part.

A part's state at its site only moves forward (prepared or refused, running, succeeded or failed, released),
so a late or repeated report cannot revert it. The agent therefore

1. reports every part it knows until the orders no longer list it;
2. reports `released` for an unknown part that the server orders `released`, because a part's absence from a
   report proves nothing: the report may be older than the order;
3. executes the release orders of a sync first.
"""

from __future__ import annotations

import operator
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field, model_validator

from isthmus.core.base_model import MAX_INTEGER, FrozenModel, Name, NonNegativeFloat, NonNegativeInt, PositiveInt
from isthmus.core.catalogue import CopyKey, HeldCopy, NeededVersion
from isthmus.core.job import Job
from isthmus.core.messages.preflight import PreflightAnswer, PreflightOrder
from isthmus.core.plan import Plan
from isthmus.core.pool import Aggregators, Cluster, Link, Rate
from isthmus.core.priority import Priority

PROTOCOL_VERSION = 1

PartState = Literal["queued", "ready", "prepared", "refused", "running", "succeeded", "failed", "released"]
"""Observed state of a part. `queued`: in the site's queue, without devices; `ready`: free devices, or those
of evictable victims, are reserved under a lease and no victim is evicted yet; `prepared`: devices are held
under a lease; `refused`: devices were not available; `released`: the site has no process or device of it."""

DesiredState = Literal["queued", "ready", "prepared", "running", "released"]
"""State that the server wants for a part. From `prepared` on, the victims in its order are evicted."""


FailureCause = Literal["peer", "evicted", "own", "permanent"]
"""Cause of a part's failure. `peer`: a rank lost a peer, so the cause is elsewhere; `evicted`: a local job of
a higher level took the devices (after a checkpoint if time allowed), and the part becomes `released` without
an order, or the site's scheduler took them; `own`: an error at this site; `permanent`: an error here that a
restart would repeat."""

_CAUSES_BY_PRECEDENCE: tuple[FailureCause | None, ...] = (None, "peer", "evicted", "own", "permanent")


def is_closer_to_root_cause(one: FailureCause | None, other: FailureCause | None) -> bool:
    """Return whether fault `one` is closer to the root cause than `other`."""
    return _CAUSES_BY_PRECEDENCE.index(one) > _CAUSES_BY_PRECEDENCE.index(other)


class WorkerAddress(FrozenModel):
    """The address where a rank listens inside its cluster; the agent adds its first device, `group/node/device`."""

    rank: NonNegativeInt
    cluster: Name
    host: Annotated[str, Field(max_length=255)]
    port: Annotated[PositiveInt, Field(le=65535)]
    device: Annotated[str, Field(max_length=200)] = ""


class RankMap(FrozenModel):
    """The address of every rank of a run; complete once all have checked in."""

    workers: tuple[WorkerAddress, ...]


class VerifiedCheckpoint(FrozenModel):
    """A checkpoint that was written, read back and verified, and survives the part."""

    step: NonNegativeInt
    num_bytes: NonNegativeInt


class Victim(FrozenModel):
    """A preemption victim: a part of another pool job, or (`attempt` 0) a local job."""

    job: Name
    attempt: NonNegativeInt = 0


class QueueEntry(FrozenModel):
    """A waiting job in a site's queue: a part of a pool job, or (`attempt` 0) a local job."""

    job: Name
    attempt: NonNegativeInt = 0


MAX_TIME_S = 1e12
"""Latest time that a message may name, in seconds since the epoch: beyond every year of four digits."""
TimeS = Annotated[float, Field(ge=0, le=MAX_TIME_S)]
"""A time in seconds, since the epoch or on an agent's own clock."""


MAX_MOVED, MAX_PROPOSALS = 20, 8
"""Largest numbers of jobs that a proposal moves, and of proposals in a report."""


class MoveProposal(FrozenModel):
    """Parts of running jobs that a site would move to other devices of it, so that a waiting job has a place there.

    `loss_card_s` is what the waiting job has lost so far by lacking nothing but a place, `cost_card_s` what the moves
    cost: card-seconds.
    """

    job: Name
    moved: Annotated[tuple[QueueEntry, ...], Field(min_length=1, max_length=MAX_MOVED)]
    cost_card_s: NonNegativeFloat
    loss_card_s: NonNegativeFloat


class ObservedLocalJob(FrozenModel):
    """A local job of the site, as reported to the pool. `level` is one of the site's own.

    `preemptible`: the owner's policy lets pool jobs of a higher level preempt it; `unsaved_s`: the work in
    seconds that it would lose. `ends_at_s` is when a running one ends at the latest, in seconds since the epoch, by the
    site's scheduler (None: unknown).
    """

    name: Name
    chips: dict[Name, PositiveInt]
    level: Name
    running: bool
    preemptible: bool = False
    unsaved_s: NonNegativeFloat = 0.0
    ends_at_s: TimeS | None = None


PartEventKind = Literal["died", "restarted", "frozen", "stalled", "resumed", "saved", "refused"]
"""Kinds of `WorkerEvent` that sites report: for the history of the job, `refused` callers for the audit log."""

MAX_ENTRIES = 65_536
"""Largest number of entries in a list of a report."""
MAX_ANSWERS, MAX_LINES = 4_096, 16_384
"""Largest numbers of answers to checks, and of lines of workers' output, in a report: agents send fewer."""
MAX_COPIES = 4_096
"""Largest number of copies of versions in a report."""
MAX_DETAIL_CHARS = 2_000
"""Longest detail of a part that the server keeps."""
MAX_PART_EVENTS = 16
"""Newest events of a part in a report."""
MAX_REFUSED_EVENTS = 4
"""Newest of them that are about refused callers, so that a stranger hides no other event."""
MAX_EVENT_CHARS = 300
"""Longest description of an event in a report."""


class PartEvent(FrozenModel):
    """An event of a worker, as it logged it. `number` rises within the log of a rank in one attempt."""

    rank: NonNegativeInt
    number: NonNegativeInt
    kind: PartEventKind
    time_s: TimeS
    detail: Annotated[str, Field(max_length=MAX_EVENT_CHARS)] = ""
    step: NonNegativeInt | None = None
    seconds: NonNegativeFloat | None = None


def _is_none(value: object) -> bool:
    return value is None


class ObservedPart(FrozenModel):
    """The observed state of one part. After a failure `fault` classifies the cause and `detail` describes it.

    Both are reported until the part is dropped, so a lost report loses no reason. `unsaved_s` is the work
    since the last checkpoint; `protection` is the checkpoint taken for an order with `protect`. `waiting` says
    what the part's rank that has waited longest waits for, since `waiting_since_s` (epoch). `events` are the
    newest events of its workers; reports repeat them. `ungranted`: the site's scheduler has not granted the devices
    of a `ready` part yet, so that the part holds none. By the clock of `AgentReport.clock_s`, `granted_at_s` is when it
    granted them (None: unknown), and `released_at_s` when the devices of a released part became free.
    """

    job: Name
    attempt: PositiveInt
    state: PartState
    detail: str = ""
    fault: FailureCause | None = None
    workers: tuple[WorkerAddress, ...] = ()
    unsaved_s: NonNegativeFloat = 0.0
    protection: VerifiedCheckpoint | None = None
    waiting: Annotated[str, Field(max_length=400)] = ""
    waiting_since_s: TimeS | None = None
    events: Annotated[tuple[PartEvent, ...], Field(max_length=MAX_PART_EVENTS)] = ()
    ungranted: Annotated[bool, Field(exclude_if=operator.not_)] = False
    granted_at_s: Annotated[TimeS | None, Field(exclude_if=_is_none)] = None
    released_at_s: Annotated[TimeS | None, Field(exclude_if=_is_none)] = None


PortNumber = Annotated[int, Field(ge=1, le=65535)]
HostName = Annotated[str, Field(min_length=1, max_length=255)]
Nonce = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
ShortText = Annotated[str, Field(max_length=300)]


class PeerAddress(FrozenModel):
    """Where the workers of a site listen: at `host`, from `first_port` to `last_port` (None: any free port).

    While the server wants other sites to check this address, `port` is that of a listener which answers to `nonce`.
    `problem` says why it could not be opened.
    """

    host: HostName
    first_port: PortNumber | None = None
    last_port: PortNumber | None = None
    port: PortNumber | None = None
    nonce: Nonce | None = None
    problem: ShortText = ""


class PeerToCheck(FrozenModel):
    """An order to dial the open listener of site `cluster`; `number` identifies the order in the answer."""

    cluster: Name
    number: PositiveInt
    host: HostName
    port: PortNumber
    nonce: Nonce


class PeerCheck(FrozenModel):
    """The answer to a `PeerToCheck`: whether this site has `reached` `cluster`, or why not.

    `round_trip_s` and `gbps`, the rate of one connection, are what it measured (None: not measured).
    """

    cluster: Name
    number: PositiveInt
    reached: bool
    detail: ShortText = ""
    round_trip_s: Annotated[float, Field(gt=0, le=10)] | None = None
    gbps: Annotated[float, Field(gt=0, le=1000)] | None = None


LinkKey = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""A key of 256 bits. Messages that hold one print it in no representation."""


class RunKeys(FrozenModel):
    """The keys of an attempt that a site holds: one shared with each site of the plan, and one for its own ranks.

    No other site has a key of a pair without it. `copies` is the key of the job's copies in an object store, the same
    in all attempts; `switch` is that of its packets to switches. Agents hand them to workers; they go into no log and
    no event.
    """

    job: Name
    attempt: PositiveInt
    keys: Annotated[dict[Name, LinkKey], Field(repr=False)]
    copies: Annotated[LinkKey | None, Field(repr=False)] = None
    switch: Annotated[LinkKey | None, Field(repr=False)] = None


class PartOrder(FrozenModel):
    """The desired state of one part. `lease_s` limits how long `ready` and `prepared` hold devices.

    `user` submitted the job. `protect` requests a verified checkpoint of a running part before its release.
    `victims` are evicted for the part from `prepared` on, as far as the owner's policy allows. `files_at`
    lists the clusters that have the job's files, in case this one has not; `versions` are those of the catalogue that
    the part needs here, which the site brings as soon as the part is queued. `links` are those between this cluster and
    the others of the plan, as the server knows them: the operator's and the measured ones. `switches` are those of the
    plan's clusters that have addresses, for a job that sums by them.
    """

    job: Name
    attempt: PositiveInt
    desired: DesiredState
    lease_s: NonNegativeFloat = 30.0
    user: str = ""
    priority: Priority = "middle"
    protect: bool = False
    victims: tuple[Victim, ...] = ()
    files_at: tuple[Name, ...] = ()
    versions: tuple[NeededVersion, ...] = ()
    links: tuple[Link, ...] = ()
    switches: tuple[Aggregators, ...] = ()
    spec: Job | None = None
    plan: Plan | None = None
    rank_map: RankMap | None = None


Fence = Annotated[int, Field(ge=0, le=2**62)]
"""A fencing token in a report or an event: bounded, so that an agent cannot exhaust the numbers."""
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class AgentIdentity(FrozenModel):
    """What binds an agent to its state folder and machine; the server records it when the agent is enrolled.

    `key` is the secret of the state folder, whose digest is the agent's id. `machine` identifies the machine and the
    folder on it, `boot` the present start of the machine. `session` counts the starts of agents on the folder, `saves`
    the changes of its part table: both only grow, so a copied or restored folder is noticed. `enrols`: the owner
    agreed that this agent takes the place of an earlier one.
    """

    key: Digest
    machine: Digest
    boot: Digest
    session: PositiveInt
    saves: NonNegativeInt = 0
    enrols: bool = False


class AgentReport(FrozenModel):
    """The request of a sync: the state of one site. `incarnation` is a new id at each start of the agent.

    `queue` is the site's queue in start order; `local_jobs` are the jobs of the site's own users. An agent
    without `peer_address` takes no part in the checks of the way between sites. `checks`: the agent
    executes the checks of `AgentOrders.preflights`, whose answers are `preflights`. `run_lease_s`: every worker of the
    site ends itself this long after the last contact with the server; 0: not all workers do. `fence` is the highest
    one of the orders that the agent has obeyed. `copies` are the site's copies of versions of the catalogue (None: the
    agent fetches none), and `fetch_gbps` the rate at which it has fetched lately. `clock_s` is the time on the
    agent's own clock, which is never set (None: not told): only differences to it count. `moves` are proposals of the
    owner's agent, the first alone if several name the same parts.
    """

    protocol: PositiveInt = PROTOCOL_VERSION
    cluster: Cluster
    incarnation: Annotated[str, Field(max_length=64)]
    identity: AgentIdentity | None = None
    run_lease_s: TimeS = 0.0
    free_chips: Annotated[dict[Name, NonNegativeInt], Field(max_length=MAX_ENTRIES)]
    parts: Annotated[tuple[ObservedPart, ...], Field(max_length=MAX_ENTRIES), FailFast()] = ()
    queue: Annotated[tuple[QueueEntry, ...], Field(max_length=MAX_ENTRIES), FailFast()] = ()
    local_jobs: Annotated[tuple[ObservedLocalJob, ...], Field(max_length=MAX_ENTRIES), FailFast()] = ()
    free_storage_bytes: NonNegativeInt | None = None
    peer_address: PeerAddress | None = None
    peer_checks: Annotated[tuple[PeerCheck, ...], Field(max_length=MAX_ANSWERS), FailFast()] = ()
    checks: bool = False
    preflights: Annotated[tuple[PreflightAnswer, ...], Field(max_length=MAX_ANSWERS), FailFast()] = ()
    copies: Annotated[tuple[HeldCopy, ...], Field(max_length=MAX_COPIES)] | None = None
    fetch_gbps: Rate | None = None
    fence: Fence = 0
    clock_s: TimeS | None = None
    moves: Annotated[tuple[MoveProposal, ...], Field(max_length=MAX_PROPOSALS, exclude_if=operator.not_)] = ()
    metrics: Annotated[tuple[StepMetrics, ...], Field(max_length=MAX_LINES), FailFast()] = ()
    logs: Annotated[tuple[LogChunk, ...], Field(max_length=MAX_LINES), FailFast()] = ()

    @model_validator(mode="after")
    def _check_workers(self) -> AgentReport:
        if sum(len(part.workers) for part in self.parts) > MAX_ENTRIES:
            raise ValueError(f"a report names at most {MAX_ENTRIES} workers")
        return self


class AgentOrders(FrozenModel):
    """The response of a sync: every part that should exist at the site, and when to sync again.

    A response also acknowledges that the metrics and logs of the report are durable at the server. `fence` is
    a fencing token that grows at each leader change: an agent ignores orders with a lower one than it has
    seen. `queue` is the desired order of pool jobs in the site's queue. `opens_listener`: other sites are to check
    that they reach this one; `peers_to_check` are the sites that this one is to dial. `preflights` are listed until
    the preflight has ended at all sites of the job. `drop_copies` are reported copies of versions that the catalogue
    no longer has. `run_keys` belong to parts that are to run and do not yet.
    `run_lease_s`: workers may run this long after the report that this answers was sent (0: without limit); the server
    counts them as ended some time after that. `leaves`: the site is drained and leaves the pool, so its agent ends.
    """

    protocol: PositiveInt = PROTOCOL_VERSION
    fence: NonNegativeInt = 0
    parts: tuple[PartOrder, ...] = ()
    queue: tuple[Name, ...] = ()
    opens_listener: bool = False
    peers_to_check: tuple[PeerToCheck, ...] = ()
    preflights: tuple[PreflightOrder, ...] = ()
    run_keys: tuple[RunKeys, ...] = ()
    drop_copies: tuple[CopyKey, ...] = ()
    run_lease_s: NonNegativeFloat = 0.0
    leaves: bool = False
    poll_after_s: NonNegativeFloat = 0.2


class StepMetrics(FrozenModel):
    """The metrics of one rank and step. Only the last stage sets the loss; WAN bytes are bytes sent.

    The server sets `cluster`, the site that reported them.
    """

    job: Name
    attempt: PositiveInt
    rank: NonNegativeInt
    step: NonNegativeInt
    values: dict[str, float | None]
    spans: tuple[Span, ...] = ()
    messages: tuple[ReceivedMessage, ...] = ()
    cluster: Name | None = None


MicroBatch = Annotated[int, Field(ge=-1, le=MAX_INTEGER)]
"""Number of a micro-batch; -1: none."""


class Span(FrozenModel):
    """An activity of a rank in a step, for the timeline; times in seconds since the epoch."""

    kind: str
    micro_batch: MicroBatch
    start_s: TimeS
    end_s: TimeS


class ReceivedMessage(FrozenModel):
    """A message from another cluster in a step, for the timeline, as the receiving rank recorded it.

    `kind` is `forward` (activations), `backward` (their gradients) or `reduce` (gradients of parameters, without a
    micro-batch: -1). Times are seconds since the epoch on the receiver's clock: passed to the sender's transport, first
    and last fragment written to a connection, last byte received. `clock_offset_s` is the sender's clock minus the
    receiver's, as estimated when they connected.
    """

    kind: str
    micro_batch: MicroBatch
    source: NonNegativeInt
    num_bytes: NonNegativeInt
    sent_s: TimeS
    first_left_s: TimeS
    last_left_s: TimeS
    arrived_s: TimeS
    clock_offset_s: Annotated[float, Field(ge=-MAX_TIME_S, le=MAX_TIME_S)] = 0.0


class LogChunk(FrozenModel):
    """Text of a worker's log, starting at byte `offset`. The server sets `cluster`, the site that reported it."""

    job: Name
    attempt: PositiveInt
    rank: NonNegativeInt
    offset: NonNegativeInt
    text: str
    cluster: Name | None = None


def protocol_version_of(message: dict[str, Any]) -> int:
    """Return the protocol version of a message, 0 if absent."""
    version = message.get("protocol")
    return version if isinstance(version, int) else 0


AgentReport.model_rebuild()
StepMetrics.model_rebuild()
