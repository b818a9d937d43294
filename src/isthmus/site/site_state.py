"""`SiteState`: the parts that one site holds, the rules it holds them by, and the indexes over them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from isthmus.core.policy import OwnerPolicy
from isthmus.core.priority import PriorityMap
from isthmus.site.devices.book import DeviceBook
from isthmus.site.machine_events import Instruction
from isthmus.site.parts import CLAIMING, LEASED, PartKey, SitePart


@dataclass(kw_only=True, eq=False)
class SiteState:
    """The state of a site machine. Times are in seconds."""

    # Name of the cluster.
    cluster: str
    devices: DeviceBook
    priorities: PriorityMap
    policy: OwnerPolicy
    # From SIGTERM to SIGKILL.
    stop_grace_s: float
    # How long a worker may take to check in, and how long one that trains may write nothing.
    checkin_timeout_s: float
    silence_timeout_s: float
    parts: dict[PartKey, SitePart] = field(default_factory=dict)
    # The highest fence that orders have come under, and the last one that was too low.
    fence: int = 0
    rejected_fence: int | None = None
    # Number of parts that have arrived so far.
    arrivals: int = 0
    # The owner lets the pool work at this hour.
    is_open: bool = True
    # The site has a storage of its own, to which files of jobs are copied.
    fetches: bool = False
    # The agent is shutting down.
    ending: bool = False
    # Instructions of the present event.
    out: list[Instruction] = field(default_factory=list)
    # Indexes: parts that wait, and parts that time or the end of another part may change.
    queued_local: dict[PartKey, SitePart] = field(default_factory=dict)
    queued_pool: dict[PartKey, SitePart] = field(default_factory=dict)
    time_dependent: dict[PartKey, SitePart] = field(default_factory=dict)
    # A local job that waits may be able to start now.
    may_start: bool = True
    # Counts changes that the server has to hear of.
    num_changes: int = 0

    def rank(self, part: SitePart) -> int:
        """Return the index of a part's level among the site's own, 0 the highest."""
        levels = self.priorities.levels
        return levels.index(part.level) if part.level in levels else len(levels)

    def add(self, part: SitePart) -> None:
        """Take a new part in, behind all that came before it."""
        self.arrivals += 1
        part.arrived = part.place = self.arrivals
        self.parts[part.key] = part

    def limit(self, node_group: str) -> int:
        """Return how many devices of `node_group` the owner lets the pool's jobs have, at its hours."""
        return self.policy.limit(node_group, self.devices.inventory.get(node_group, 0))

    def grace_s(self, part: SitePart) -> float:
        """Return how long `part` has between SIGTERM and SIGKILL."""
        return self.policy.grace_s if part.requeue else self.stop_grace_s

    def is_leased(self, part: SitePart) -> bool:
        """Tell whether `part` has devices under a lease of the pool."""
        return part.state in LEASED and not part.local

    def update(self, part: SitePart) -> None:
        """Record that `part` has changed in a way that the server or the queue has to hear of."""
        part.observation = None
        self.num_changes += 1
        self.may_start = True
        self.reindex(part)

    def reindex(self, part: SitePart) -> None:
        """Bring the indexes up to date after `part` has changed."""
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
        """Tell whether time, or the end of another part, may change `part`."""
        if part.state in CLAIMING or part.state in ("prepared", "stopping"):
            return True
        if part.local:
            return part.state in ("succeeded", "failed") or (part.state == "released" and part.withdrawn)
        return part.evicted or next(self.due_s(part), None) is not None

    def due_s(self, part: SitePart) -> Iterator[float]:
        """Yield the times at which time alone changes `part`."""
        if self.is_leased(part):
            yield min(part.since_s + part.lease_s, part.claimed_s + self.policy.hold_s)
        if part.force_at_s is not None:
            yield part.force_at_s
        if part.state == "stopping" and not part.live:
            yield part.since_s
        if part.evicted and part.evict_at_s is not None:
            yield part.evict_at_s
        if part.state == "running" and not part.local:
            live = [worker for worker in part.workers.values() if worker.live]
            if any(worker.address is None for worker in live):
                yield part.since_s + self.checkin_timeout_s
            if part.rank_map is not None and self.silence_timeout_s < math.inf and live:
                yield min(worker.last_write_s for worker in live) + self.silence_timeout_s
