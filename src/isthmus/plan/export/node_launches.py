"""`launches_of`: which node starts which ranks, so that a stage lands on the cluster it was planned for."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from isthmus.core.errors import PlanError
from isthmus.core.plan import Plan, Stage
from isthmus.core.pool import NodeGroup, Pool
from isthmus.plan.export.grid import Grid
from isthmus.plan.time.loads import group_of


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One `torchrun` on one node: ranks `first_rank` and on, one per device, of the named stages."""

    node_rank: int
    cluster: str
    node_group: str
    node: int
    devices: tuple[int, ...]
    first_rank: int
    stages: tuple[int, ...]

    @property
    def where(self) -> str:
        """The node in words."""
        return f"{self.cluster}/{self.node_group} node {self.node}"


@dataclass(frozen=True)
class _Seat:
    cluster: str
    node_group: str
    node: int
    device: int
    stage: int


def launches_of(plan: Plan, grid: Grid, pool: Pool) -> tuple[Launch, ...]:
    """Return the launches in order of ranks; a node that two runs of ranks share has two.

    Chips of one tensor-parallel group are on one node where they fit. Raises `InputError` for a place the
    pool does not have, `PlanError` where a group has too few nodes.
    """
    taken: dict[tuple[str, str], int] = {}
    seats: list[_Seat] = []
    for number in range(grid.pp):
        for replica in range(grid.dp):
            stage = plan.pipeline(replica)[number]
            for _ in range(grid.cp):
                seats += _seat_group(stage, number, grid.tp, group_of(pool, stage), taken)
    found: list[Launch] = []
    runs = itertools.groupby(seats, key=lambda seat: (seat.cluster, seat.node_group, seat.node))
    for (cluster, group, node), run in runs:
        here = list(run)
        found.append(
            Launch(
                node_rank=len(found),
                cluster=cluster,
                node_group=group,
                node=node,
                devices=tuple(seat.device for seat in here),
                first_rank=sum(len(one.devices) for one in found),
                stages=tuple(dict.fromkeys(seat.stage for seat in here)),
            )
        )
    return tuple(found)


def _seat_group(
    stage: Stage, number: int, tp: int, group: NodeGroup, taken: dict[tuple[str, str], int]
) -> list[_Seat]:
    """Take the next `tp` chips of a group, beginning a new node where the rest of one is too small."""
    place, size = (stage.cluster, stage.node_group), group.chips_per_node
    start = taken.get(place, 0)
    left = size - start % size
    if left < min(tp, size):
        start += left
    if start + tp > group.chips:
        raise PlanError(
            f"{stage.cluster}/{stage.node_group} has {group.nodes} nodes of {size} chips: too few",
            hint="give the pool that the plan was made for",
        )
    taken[place] = start + tp
    return [_Seat(*place, *divmod(start + i, size), number) for i in range(tp)]
