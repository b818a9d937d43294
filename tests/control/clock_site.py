"""`ClockAdapter`: a scheduler whose workers end when a test says so; `POOL`: three sites of three owners."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

from isthmus.agent.adapters.scheduler_adapter import (
    Capabilities,
    CardNode,
    RankStart,
    SchedulerAdapter,
    SchedulerLook,
    WorkerStatus,
)
from isthmus.core.pool import Cluster, Link, NodeGroup, Owner, Pool, VirtualChip

SITES = ("east", "north", "west")
CHIPS = 8


def site_of(name: str) -> Cluster:
    """A site of virtual chips with an owner of its own."""
    group = NodeGroup(name="g", chip="H20", nodes=1, chips_per_node=CHIPS, virtual=VirtualChip())
    return Cluster(name=name, owner=f"owner-{name}", node_groups=(group,))


POOL = Pool(
    owners=tuple(Owner(name=f"owner-{name}", users=("ann",) if name == SITES[0] else ()) for name in SITES),
    clusters=tuple(map(site_of, SITES)),
    links=tuple(
        Link(source=a, target=b, bandwidth_gbps=10, delay_ms=5) for a, b in itertools.permutations(SITES, 2)
    ),
)  # fmt: skip


class ClockAdapter(SchedulerAdapter):
    """The scheduler of a site, which outlives its agents: workers are entries that end when `OwnersMonth` says so."""

    capabilities = Capabilities(holds="agent", blocks=False)

    def __init__(self, site: str, on_start: Callable[[str, Path], None]) -> None:
        self._site, self._on_start = site, on_start
        self.workers: dict[Path, WorkerStatus] = {}

    def observe(self) -> SchedulerLook:
        """Return the cards."""
        cards = tuple(f"g/0/{card}" for card in range(CHIPS))
        return SchedulerLook(nodes=(CardNode(name="g/0", node_group="g", cards=cards),))

    def start(self, rank: RankStart) -> None:
        """Start a worker once."""
        if rank.folder not in self.workers:
            self.workers[rank.folder] = WorkerStatus(state="running")
            self._on_start(self._site, rank.folder)

    def let_write(self) -> None:
        """Let the workers that run write: one that is silent for hours counts as failed."""
        for folder, status in self.workers.items():
            if status.state == "running" and folder.exists():
                with (folder / "log").open("a") as log:
                    log.write(".")

    def poll(self, folder: Path) -> WorkerStatus:
        """Return the status of a worker."""
        return self.workers.get(folder, WorkerStatus(state="absent"))

    def stop(self, folder: Path, *, force: bool) -> None:
        """End a worker."""
        self.end(folder, 143)

    def end(self, folder: Path, status: int) -> None:
        """End a worker by itself, unless it has ended."""
        if self.poll(folder).state != "exited":
            self.workers[folder] = WorkerStatus(state="exited", exit_status=status)

    def order(self, moves: object, removed: object = ()) -> None:
        """Keep no queue."""
