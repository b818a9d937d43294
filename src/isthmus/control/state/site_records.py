"""Records of sites: clusters as last reported, and the parts of jobs there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from isthmus.control.state.site_membership import CordonRecord, DrainRecord, ProbationRecord
from isthmus.core.catalogue import HeldCopy
from isthmus.core.messages.agent_messages import (
    DesiredState,
    FailureCause,
    MoveProposal,
    ObservedLocalJob,
    ObservedPart,
    PeerAddress,
    QueueEntry,
    VerifiedCheckpoint,
    Victim,
    WorkerAddress,
)
from isthmus.core.pool import Cluster

PartState = Literal["ordered", "queued", "ready", "prepared", "refused", "running", "succeeded", "failed", "released"]
"""State of a part as the coordinator knows it; `ordered` until its site first reports it."""


@dataclass(slots=True, kw_only=True)
class PartRecord:
    """The part of one attempt of a job at one cluster."""

    # Id of the job.
    job: str
    attempt: int
    cluster: str
    ranks: tuple[int, ...]
    # By node group.
    chips: dict[str, int]
    storage_bytes: int = 0
    # The state that the site is ordered to reach.
    desired: DesiredState = "prepared"
    # The state that the site last reported.
    state: PartState = "ordered"
    # The site's message on a refusal or failure.
    detail: str = ""
    fault: FailureCause | None = None
    # The site was ordered to run the part: processes may exist until it is released.
    committed: bool = False
    # The part counts as allocated, without its `borrowed` chips, and since when.
    allocated: bool = False
    allocated_ms: int = 0
    # The chips of the part that count in `PoolState.chip_use`, and whose they are; "": it was never counted.
    used_chips: int = 0
    used_owner: str = ""
    # The free chips last reported by the site already exclude this part.
    held: bool = False
    # The site's scheduler has not granted the chips yet.
    ungranted: bool = False
    # The jobs whose chips the part takes.
    victims: tuple[Victim, ...] = ()
    # Chips by node group that pool victims still hold.
    borrowed: dict[str, int] = field(default_factory=dict)
    # Chips by node group that local jobs of the site must release.
    local_chips: dict[str, int] = field(default_factory=dict)
    # The attempt goes on without the part, which decoded for it: how often, and since when.
    left: bool = False
    num_left: int = 0
    left_s: float = 0.0
    # When the part was ordered, while the attempt ran; None: with the attempt.
    ordered_s: float | None = None
    # The part must save a checkpoint and verify it.
    checkpoint_requested: bool = False
    # The checkpoint that the part has verified.
    verified_checkpoint: VerifiedCheckpoint | None = None
    # What a rank of the part waits for, and since when.
    waiting: str = ""
    waiting_since_s: float | None = None
    # The workers that have checked in.
    workers: tuple[WorkerAddress, ...] = ()
    # By rank: the number of its last event in the job's history.
    last_events: dict[int, int] = field(default_factory=dict)
    # Observed state changes.
    history: list[str] = field(default_factory=list)
    # Work since the last checkpoint, in seconds, as last reported; not part of the log.
    unsaved_s: float = field(default=0.0, compare=False)
    # Cached order for the site, with the values it depends on.
    cached_order: tuple[Any, ...] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerResult:
    """The result of a check whether one site reaches another, when it arrived, and what was measured (None: not)."""

    reached: bool
    detail: str
    at_s: float
    round_trip_s: float | None = None
    gbps: float | None = None
    # The site that has not taken part in the check: neither reached nor closed.
    silent: str | None = None


@dataclass(slots=True, kw_only=True)
class EnrolledAgent:
    """The agent that a cluster is bound to; the only one whose reports count."""

    id: str
    machine: str
    # Start of the machine in which it last reported.
    boot: str
    enrolled_s: float
    # The latest session, when it began, and the saves of its part table as last logged.
    session: int = 0
    session_s: float = 0.0
    saves: int = 0
    # Where the site's workers listen; None: its agent has named no address.
    host: str | None = None


@dataclass(slots=True, kw_only=True)
class ClusterRecord:
    """A site as last reported, and the pool's parts there."""

    cluster: Cluster
    # The agent process that reported last.
    incarnation: str
    # By node group, as reported.
    free_chips: dict[str, int]
    # The parts as last reported, by (job, attempt).
    reported_parts: dict[tuple[str, int], ObservedPart] = field(default_factory=dict)
    # The site's queue as last reported.
    reported_queue: tuple[QueueEntry, ...] = ()
    # The site's own jobs by name, as last reported; their unsaved work is not part of the log.
    local_jobs: dict[str, ObservedLocalJob] = field(default_factory=dict)
    free_storage_bytes: int | None = None
    # Copies of versions of the catalogue by owner and version, as last reported; None: its agent fetches none.
    copies: dict[tuple[str, str], HeldCopy] | None = None
    # The rate at which it has fetched versions lately; None: it has fetched none.
    fetch_gbps: float | None = None
    # Its agent executes the checks of jobs.
    checks: bool = False
    connected: bool = True
    # When the last report arrived.
    last_report_s: float | None = None
    # The same on the server's monotonic clock, which measures leases; not part of the log.
    last_contact_s: float | None = field(default=None, compare=False)
    # The lease that the site's workers end themselves on, as last reported; 0: they run without limit.
    run_lease_s: float = 0.0
    # The agent that the cluster is bound to; None: agents without an identity report for it.
    agent: EnrolledAgent | None = None
    # Ids of agents that were declared gone.
    gone_agents: set[str] = field(default_factory=set)
    # A person agreed that the next new agent takes the place of the enrolled one.
    enrolling: bool = False
    # It takes no new parts; None: it does.
    cordon: CordonRecord | None = None
    # Its jobs are saved and stopped; a site that is drained is cordoned.
    drain: DrainRecord | None = None
    # It is new, and takes one job at a time; None: it has proven itself.
    probation: ProbationRecord | None = None
    # Every agent process that ever reported.
    incarnations: set[str] = field(default_factory=set)
    # The unreleased parts, by (job, attempt).
    parts: dict[tuple[str, int], PartRecord] = field(default_factory=dict)
    # Allocated chips by node group.
    allocated_chips: dict[str, int] = field(default_factory=dict)
    # Allocated chips by node group that the site still reports as free.
    unheld_chips: dict[str, int] = field(default_factory=dict)
    # Allocated storage.
    allocated_bytes: int = 0
    # Allocated storage that the site still reports as free.
    unwritten_bytes: int = 0
    # Where its workers listen, as last reported; None: the agent takes no part in the checks.
    peer_address: PeerAddress | None = None
    # The last results of its checks of other sites, by their names.
    peer_results: dict[str, PeerResult] = field(default_factory=dict)
    # The sites that it is to check: number of the order by name.
    to_check: dict[str, int] = field(default_factory=dict)
    # Of these, the checks that a job waits for, and since when.
    check_waits: dict[str, float] = field(default_factory=dict)
    # The sites that are to check it.
    checked_by: set[str] = field(default_factory=set)
    # The moves that its agent proposes.
    moves: tuple[MoveProposal, ...] = ()
    # Cached result of `free_by_group`.
    cached_free: dict[str, int] | None = field(default=None, compare=False, repr=False)

    @property
    def takes_parts(self) -> bool:
        """Whether new parts may start at the site."""
        return self.connected and self.cordon is None

    @property
    def may_run(self) -> tuple[PartRecord, ...]:
        """The parts that may have processes at the site."""
        return tuple(part for part in self.parts.values() if part.committed)

    def capacity(self, group: str) -> int:
        """Return the total chips of a node group; 0 for an unknown group."""
        for one in self.cluster.node_groups:
            if one.name == group:
                return one.num_chips
        return 0

    def active_chips(self, group: str) -> int:
        """Return the chips of a node group allocated to parts that are not being released."""
        parts = (part for part in self.parts.values() if part.allocated and part.desired != "released")
        return sum(part.chips.get(group, 0) - part.borrowed.get(group, 0) for part in parts)

    def free_in_group(self, group: str) -> int:
        """Return the chips of a node group that can be allocated now.

        The smaller of the inventory less the allocations, and the reported free chips (which exclude the
        owner's own work) less the allocations that the report does not include yet. None while a site on probation
        has a job.
        """
        if self.probation is not None and self.allocated_chips:
            return 0
        left = self.capacity(group) - self.allocated_chips.get(group, 0)
        return max(0, min(left, self.free_chips.get(group, 0) - self.unheld_chips.get(group, 0)))

    def free_by_group(self) -> Mapping[str, int]:
        """Return the chips by node group that can be allocated now: a read-only view, unchanged by later events."""
        if self.cached_free is None:
            self.cached_free = {group.name: self.free_in_group(group.name) for group in self.cluster.node_groups}
        return MappingProxyType(self.cached_free)

    def free_bytes(self) -> int:
        """Return the bytes of storage that can be allocated now.

        The storage of held parts is assumed to be part of the reported used storage.
        """
        left = self.cluster.storage_bytes - self.allocated_bytes
        if self.free_storage_bytes is not None:
            left = min(left, self.free_storage_bytes - self.unwritten_bytes)
        return max(0, left)
