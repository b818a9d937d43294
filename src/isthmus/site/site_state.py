"""`SiteState`: a site's parts, its settings and its indexes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from isthmus.core.messages.agent_messages import MoveProposal
from isthmus.core.owner.owner_policy import OwnerPolicy
from isthmus.core.priority import PriorityMap
from isthmus.site.devices.device_allocator import DeviceAllocator
from isthmus.site.machine_events import SiteInstruction
from isthmus.site.parts import CLAIMING, LEASED, PartKey, SitePart

VERDICT_S = 15.0
"""How long a part whose rank an unknown signal ended is kept for its scheduler to say that it took the devices."""


@dataclass(kw_only=True, slots=True)
class PlaceLack:
    """A waiting part of the pool, without devices, that lacks nothing but a place in node group `group`."""

    part: SitePart
    group: str
    # Since when, and when it last asked.
    since_s: float
    seen_s: float


@dataclass(kw_only=True, eq=False)
class SiteState:
    """The state of a site machine. Times are in seconds."""

    # Name of the cluster.
    cluster: str
    devices: DeviceAllocator
    priorities: PriorityMap
    policy: OwnerPolicy
    # From SIGTERM to SIGKILL.
    stop_grace_s: float
    # Longest time until a worker checks in, and longest time that a training one writes nothing.
    checkin_timeout_s: float
    silence_timeout_s: float
    parts: dict[PartKey, SitePart] = field(default_factory=dict)
    # The highest fencing token of all orders so far, and the last one rejected as too low.
    fence: int = 0
    rejected_fence: int | None = None
    # Number of parts added so far.
    num_arrivals: int = 0
    # The lease that the pool's workers end themselves on, and its end; 0: they run without limit.
    run_lease_s: float = 0.0
    run_lease_until_s: float = math.inf
    # Time by which its end must move, at the latest, for it to be written again.
    renewal_s: float = math.inf
    # The owner admits the pool's jobs at this hour.
    is_open: bool = True
    # The site has its own storage, to which files of jobs are copied.
    has_own_storage: bool = False
    # The site's scheduler holds the devices.
    asks_for_holds: bool = False
    # A decision centre books the paths of parts that are promised bandwidth.
    asks_for_paths: bool = False
    # And can say beforehand which jobs a part would preempt.
    asks_for_probes: bool = False
    # Why parts of the present orders cannot be started here as their jobs ask.
    objections: Mapping[PartKey, str] = field(default_factory=dict)
    # What devices there are is known; before the first look at the scheduler it is not.
    knows_inventory: bool = True
    # The agent is shutting down.
    shutting_down: bool = False
    # Parts that train may save a checkpoint before.
    saves_first: bool = False
    # Instructions of the present event.
    instructions: list[SiteInstruction] = field(default_factory=list)
    # Indexes: queued parts, and parts that time or another part's end may change.
    queued_local: dict[PartKey, SitePart] = field(default_factory=dict)
    queued_pool: dict[PartKey, SitePart] = field(default_factory=dict)
    time_dependent: dict[PartKey, SitePart] = field(default_factory=dict)
    # A queued local job may be able to start now.
    may_start_local: bool = True
    # Parts that lack nothing but a place, by job; moves for them, as proposed to the server; when they are made again.
    lacks: dict[str, PlaceLack] = field(default_factory=dict)
    proposals: tuple[MoveProposal, ...] = ()
    moves_due_s: float = math.inf
    # The owner's rules allow moves at this hour; and when the latest of the last hour began.
    may_move: bool = True
    moved_at_s: list[float] = field(default_factory=list)
    # Number of changes that must be reported to the server.
    num_changes: int = 0

    def level_index(self, part: SitePart) -> int:
        """Return the index of a part's level among the site's own, 0 the highest."""
        levels = self.priorities.levels
        return levels.index(part.level) if part.level in levels else len(levels)

    def add(self, part: SitePart) -> None:
        """Add a new part behind all earlier ones."""
        self.num_arrivals += 1
        part.arrived = part.place = self.num_arrivals
        self.parts[part.key] = part

    def pool_limit(self, node_group: str) -> int:
        """Return how many devices of `node_group` the owner lets the pool use, during its hours."""
        return self.policy.max_pool_chips(node_group, self.devices.inventory.get(node_group, 0))

    def grace_s(self, part: SitePart) -> float:
        """Return the seconds between SIGTERM and SIGKILL for `part`."""
        return self.policy.grace_s if part.requeue else self.stop_grace_s

    def is_leased(self, part: SitePart) -> bool:
        """Tell whether `part` holds or claims devices under a lease."""
        return part.state in LEASED and not part.local

    def is_held(self, part: SitePart) -> bool:
        """Tell whether `part` may start as far as the site's scheduler is concerned."""
        return part.local or not self.asks_for_holds or part.hold == "granted"

    def mark_changed(self, part: SitePart) -> None:
        """Record a change of `part` that concerns the server or the queue."""
        part.observation = None
        self.num_changes += 1
        self.may_start_local = True
        self.update_indexes(part)

    def update_indexes(self, part: SitePart) -> None:
        """Update the indexes after a change of `part`."""
        waiting = self.queued_local if part.local else self.queued_pool
        if part.state == "queued":
            waiting[part.key] = part
        else:
            waiting.pop(part.key, None)
        if part.state != "forgotten" and self.is_time_dependent(part):
            self.time_dependent[part.key] = part
        else:
            self.time_dependent.pop(part.key, None)

    def is_time_dependent(self, part: SitePart) -> bool:
        """Tell whether time or another part's end may change `part`."""
        if part.state in CLAIMING or part.state in ("prepared", "stopping"):
            return True
        if part.foreign:
            return part.withdrawn
        if part.local:
            return part.state in ("succeeded", "failed") or (part.state == "released" and part.withdrawn)
        return part.evicted or next(self.due_times_s(part), None) is not None

    def verdict_due_s(self, part: SitePart) -> float:
        """Return until when an ended part waits for what became of its hold; `-inf` if it does not."""
        if part.unexplained_s is None or part.hold != "granted" or self.shutting_down:
            return -math.inf
        return part.unexplained_s + VERDICT_S

    def silence_limit_s(self, part: SitePart) -> float:
        """Return how long a worker of the part may write nothing; a command has no limit unless its job sets one."""
        if part.spec is None or part.spec.command is None:
            return self.silence_timeout_s
        return part.spec.command.silence_s or math.inf

    def due_times_s(self, part: SitePart) -> Iterator[float]:
        """Yield the times in seconds at which timers of `part` expire."""
        if self.is_leased(part):
            yield min(part.since_s + part.lease_s, part.claimed_s + self.policy.hold_s)
        if part.force_at_s is not None:
            yield part.force_at_s
        if part.state == "stopping" and not part.live:
            yield max(part.since_s, self.verdict_due_s(part))
        if part.evicted and part.evict_at_s is not None:
            yield part.evict_at_s
        if part.state == "running" and not part.local:
            if part.has_run_lease and self.run_lease_until_s < math.inf:
                yield self.run_lease_until_s
            live = [worker for worker in part.workers.values() if worker.live]
            if any(worker.address is None for worker in live):
                yield part.since_s + self.checkin_timeout_s
            if part.rank_map is not None and (silence_s := self.silence_limit_s(part)) < math.inf and live:
                yield min(worker.last_write_s for worker in live) + silence_s
