"""What the coordinator knows of sites: clusters as last reported, and the parts of jobs there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from isthmus.core.messages.agent_messages import (
    Desired,
    Fault,
    LocalJobSeen,
    ObservedPart,
    Protection,
    QueueEntry,
    Victim,
    WorkerAddress,
)
from isthmus.core.pool import Cluster

PartLife = Literal[
    "ordered", "queued", "ready", "prepared", "refused", "running", "succeeded", "failed", "released"
]
"""A part as the coordinator knows it: `ordered` until its site has said anything about it."""


@dataclass(slots=True, kw_only=True)
class PartRecord:
    """The piece of one attempt at one cluster; `chips` by node group.

    `committed` says that the site was ever told to run it: processes may exist until it is released.
    `promised` says that it is in the ledger: its chips, less those `borrowed` from victims of the pool that
    hold them still. `held` says that what the site last reported free does not contain its chips; `local`
    are chips that local jobs are to give up for it. `unsaved_s` is as last heard, not part of the log.
    """

    job: str
    attempt: int
    cluster: str
    ranks: tuple[int, ...]
    chips: dict[str, int]
    storage_bytes: int = 0
    desired: Desired = "prepared"
    state: PartLife = "ordered"
    detail: str = ""
    fault: Fault | None = None
    committed: bool = False
    promised: bool = False
    held: bool = False
    victims: tuple[Victim, ...] = ()
    borrowed: dict[str, int] = field(default_factory=dict)
    local: dict[str, int] = field(default_factory=dict)
    protect: bool = False
    protection: Protection | None = None
    workers: tuple[WorkerAddress, ...] = ()
    story: list[str] = field(default_factory=list)
    unsaved_s: float = field(default=0.0, compare=False)
    order: tuple[Any, ...] | None = field(default=None, compare=False, repr=False)


@dataclass(slots=True, kw_only=True)
class ClusterRecord:
    """A site as last reported. `parts` are the unreleased parts there, by (job, attempt).

    `taken` and `unheld` are the chips promised, and those of them that the site does not hold yet, by node
    group; `taken_bytes` and `unwritten_bytes` the same of storage. `free_now` is what `free` last found.
    `incarnations` are all that ever reported; `heard_s` is when a report last came, and `local` the site's
    own jobs as last heard (their unsaved work is not part of the log).
    """

    cluster: Cluster
    incarnation: str
    free_chips: dict[str, int]
    reported: dict[tuple[str, int], ObservedPart] = field(default_factory=dict)
    queue: tuple[QueueEntry, ...] = ()
    local: dict[str, LocalJobSeen] = field(default_factory=dict)
    free_storage_bytes: int | None = None
    connected: bool = True
    heard_s: float | None = None
    incarnations: set[str] = field(default_factory=set)
    parts: dict[tuple[str, int], PartRecord] = field(default_factory=dict)
    taken: dict[str, int] = field(default_factory=dict)
    unheld: dict[str, int] = field(default_factory=dict)
    taken_bytes: int = 0
    unwritten_bytes: int = 0
    free_now: dict[str, int] | None = field(default=None, compare=False)

    def capacity(self, group: str) -> int:
        """Return the chips of a node group in all; 0 where there is no such group."""
        for one in self.cluster.node_groups:
            if one.name == group:
                return one.chips
        return 0

    def wanted(self, group: str) -> int:
        """Return the chips of a node group promised to parts that are not being released."""
        parts = (part for part in self.parts.values() if part.promised and part.desired != "released")
        return sum(part.chips.get(group, 0) - part.borrowed.get(group, 0) for part in parts)

    def free_of(self, group: str) -> int:
        """Return the chips of a node group that could be promised now.

        The smaller of what the promises leave of the inventory, and what the site reports free less what
        it has been promised to hold but did not yet hold when it reported: the owner's own work counts.
        """
        left = self.capacity(group) - self.taken.get(group, 0)
        return max(0, min(left, self.free_chips.get(group, 0) - self.unheld.get(group, 0)))

    def free(self) -> dict[str, int]:
        """Return the chips by node group that could be promised now; not to be changed."""
        if self.free_now is None:
            self.free_now = {group.name: self.free_of(group.name) for group in self.cluster.node_groups}
        return self.free_now

    def free_bytes(self) -> int:
        """Return the storage that could be promised now, in bytes.

        What running parts were promised is taken to be in what the site reports used.
        """
        left = self.cluster.storage_bytes - self.taken_bytes
        if self.free_storage_bytes is not None:
            left = min(left, self.free_storage_bytes - self.unwritten_bytes)
        return max(0, left)
