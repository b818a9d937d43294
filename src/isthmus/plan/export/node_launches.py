"""`node_launches`: the ranks that each node launches, so that each stage runs on its planned cluster.

`device_incompatibilities`: whether a framework runs on the chips of these nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from isthmus.core.errors import PlanError
from isthmus.core.plan import Plan, Stage
from isthmus.core.pool import NodeGroup, Pool
from isthmus.plan.export.incompatibility import Incompatibility
from isthmus.plan.export.rank_grid import RankGrid
from isthmus.plan.search.costs.framework_rules import FrameworkRules


@dataclass(frozen=True, kw_only=True)
class NodeLaunch:
    """One `torchrun` on one node, with consecutive ranks from `first_rank`, one per device."""

    node_rank: int
    cluster: str
    node_group: str
    node: int
    """Index of the node in its group."""
    devices: tuple[int, ...]
    """Device indices on the node."""
    first_rank: int
    stages: tuple[int, ...]
    """Stages of its ranks."""

    @property
    def node_name(self) -> str:
        """The node, as text."""
        return f"{self.cluster}/{self.node_group} node {self.node}"


@dataclass(frozen=True)
class _DeviceSlot:
    """A device and the stage that it runs."""

    cluster: str
    node_group: str
    node: int
    device: int
    stage: int


def node_launches(plan: Plan, grid: RankGrid, pool: Pool) -> tuple[NodeLaunch, ...]:
    """Return the launches in rank order; a node with two separate ranges of ranks has two.

    A tensor-parallel group is on one node if it fits. Raises `InputError` for an unknown cluster or node
    group, `PlanError` if a group has too few nodes.
    """
    taken: dict[tuple[str, str], int] = {}
    slots: list[_DeviceSlot] = []
    for number in range(grid.pp):
        for replica in range(grid.dp):
            stage = plan.pipeline(replica)[number]
            group = pool.node_group(stage.cluster, stage.node_group)
            for _ in range(grid.cp):
                slots += _place_tensor_group(stage, number, grid.tp, group, taken)
    launches: list[NodeLaunch] = []
    runs = itertools.groupby(slots, key=lambda seat: (seat.cluster, seat.node_group, seat.node))
    for (cluster, group, node), run in runs:
        members = list(run)
        launches.append(
            NodeLaunch(
                node_rank=len(launches),
                cluster=cluster,
                node_group=group,
                node=node,
                devices=tuple(seat.device for seat in members),
                first_rank=sum(len(one.devices) for one in launches),
                stages=tuple(dict.fromkeys(seat.stage for seat in members)),
            )
        )
    return tuple(launches)


def _place_tensor_group(
    stage: Stage, number: int, tp: int, group: NodeGroup, taken: dict[tuple[str, str], int]
) -> list[_DeviceSlot]:
    """Return the next `tp` chips of a node group, on a new node if the current one has too few left."""
    place, size = (stage.cluster, stage.node_group), group.chips_per_node
    start = taken.get(place, 0)
    left = size - start % size
    if left < min(tp, size):
        start += left
    if start + tp > group.num_chips:
        raise PlanError(
            f"{stage.cluster}/{stage.node_group} has too few chips: {group.nodes} nodes of {size}",
            hint="give the pool for which the plan was made",
        )
    taken[place] = start + tp
    return [_DeviceSlot(*place, *divmod(start + i, size), number) for i in range(tp)]


def device_incompatibilities(plan: Plan, pool: Pool, rules: FrameworkRules) -> Iterator[Incompatibility]:
    """Yield the chips of a plan that the framework does not run on, and more than one collective library.

    Raises `InputError` for a cluster or node group that the pool lacks.
    """
    used = {
        (stage.cluster, stage.node_group): pool.node_group(stage.cluster, stage.node_group) for stage in plan.stages
    }
    final = "" if _has_devices(pool, rules) else no_devices_text(rules)
    libraries: dict[str, str] = {}
    for (cluster, name), group in used.items():
        chip = pool.chip(group)
        where = f"{cluster}/{name} ({chip.vendor} {chip.name})"
        if group.virtual is not None:
            yield Incompatibility(f"the chips of {where} are virtual: no device is there", final=final)
        elif not rules.runs_on(chip, group):
            text = f"{where} communicates by {chip.collective_library}, it by {_names(rules)}"
            yield Incompatibility(text, final=final)
        libraries.setdefault(chip.collective_library, where)
    if len(libraries) > 1:
        text = ", ".join(f"{library} on {where}" for library, where in libraries.items())
        yield Incompatibility(f"one job with several collective libraries: {text}", final=final)


def no_devices_text(rules: FrameworkRules) -> str:
    """Return the statement that a pool has nothing to run on."""
    return f"{rules.name} needs devices with {_names(rules)}; no cluster of the pool has any"


def _names(rules: FrameworkRules) -> str:
    return " or ".join(sorted(rules.collective_libraries))


def _has_devices(pool: Pool, rules: FrameworkRules) -> bool:
    return any(rules.runs_on(pool.chip(group), group) for cluster in pool.clusters for group in cluster.node_groups)
