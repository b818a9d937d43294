"""`FreeResources`: free devices by cluster, node group and free devices per node; free storage and links.

Queries use node counts, not nodes: 100,000 nodes cost as much as 100. `move_nodes` updates the free devices of
nodes, `take` deducts a chosen candidate.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from isthmus.control.placement.resources.pipeline_requirement import PipelineRequirement, StageRange
from isthmus.core.errors import ConflictError
from isthmus.core.pool import Cluster, Link, NodeGroup, Pool
from isthmus.core.pool_resource import PoolResource

ClusterPair = tuple[str, str]
"""A directed pair of clusters."""


@dataclass(kw_only=True)
class FreeNodeGroup:
    """The nodes of a node group by free devices: `nodes[n]` nodes have exactly `n` free devices."""

    name: str
    chip: str
    devices_per_node: int
    price_per_device_hour: float = 0.0
    nodes: dict[int, int] = field(default_factory=dict)

    def slots(self, num_devices: int) -> int:
        """Return how many stages of `num_devices` devices fit, each on one node."""
        return sum(count * (free // num_devices) for free, count in self.nodes.items())

    def move_nodes(self, before: int, after: int, nodes: int = 1) -> None:
        """Record that `nodes` nodes with `before` free devices now have `after` (0: none).

        Raises `ConflictError` if there are fewer such nodes.
        """
        if before:
            if self.nodes.get(before, 0) < nodes:
                raise ConflictError(
                    f"{self.nodes.get(before, 0)} nodes of {self.name} have {before} free devices, fewer than {nodes}",
                    hint="plan again on what is free now",
                )
            self.nodes[before] -= nodes
            if not self.nodes[before]:
                del self.nodes[before]
        if after:
            self.nodes[after] = self.nodes.get(after, 0) + nodes

    def take_slots(self, num_devices: int, wanted: int) -> int:
        """Take up to `wanted` slots of `num_devices` devices, fullest nodes first; return the number taken."""
        left = wanted
        for free in sorted(self.nodes):
            each = free // num_devices
            if not each or not left:
                continue
            whole = min(self.nodes[free], left // each)
            if whole:
                self.move_nodes(free, free - each * num_devices, whole)
                left -= whole * each
            if left and left < each and self.nodes.get(free):
                self.move_nodes(free, free - left * num_devices)
                left = 0
        return wanted - left


@dataclass(kw_only=True)
class ClusterResources:
    """The free resources of one cluster."""

    name: str
    owner: str
    region: str = ""
    # Node groups by name.
    groups: dict[str, FreeNodeGroup] = field(default_factory=dict)
    # None: unknown, not checked.
    free_storage_bytes: int | None = None
    # Pipelines of the same job placed before have already counted its data set here.
    has_data: bool = False

    def groups_with_chip(self, chip: str) -> list[FreeNodeGroup]:
        """Return the node groups with a kind of chip, cheapest first."""
        found = [group for group in self.groups.values() if group.chip == chip]
        return found if len(found) < 2 else sorted(found, key=lambda one: one.price_per_device_hour)


@dataclass(frozen=True, kw_only=True)
class FreeLink:
    """One direction of a link between two clusters: free bandwidth, one-way delay, jitter."""

    free_gbps: float
    delay_s: float = 0.0
    jitter_s: float = 0.0


TakenNodeGroups = tuple[tuple[tuple[str, int], ...], ...]
"""For each stage: (node group, number of pipelines there), in the order of the pipelines."""


@dataclass(kw_only=True)
class FreeResources:
    """The free resources of the pool: sites by cluster, links by directed pair of clusters."""

    sites: dict[str, ClusterResources] = field(default_factory=dict)
    links: dict[ClusterPair, FreeLink] = field(default_factory=dict)

    @classmethod
    def from_pool(
        cls,
        pool: Pool,
        free_chips: Mapping[str, Mapping[str, int]] | None = None,
        free_storage_bytes: Mapping[str, int] | None = None,
        free_gbps: Mapping[str, float] | None = None,
    ) -> FreeResources:
        """Return the free resources of a pool.

        `free_chips` by cluster and node group (None: all) are assumed to be whole nodes and one partial node,
        like in the planner. Storage and links that `free_storage_bytes` (by cluster) and `free_gbps` (by
        `FROM>TO`) do not name are free.
        """
        sites = {}
        for one in pool.clusters:
            free = None if free_chips is None else free_chips.get(one.name, {})
            stored = (free_storage_bytes or {}).get(one.name, one.storage_bytes)
            groups = {group.name: _group(group, free) for group in one.node_groups}
            sites[one.name] = _site(one, groups, stored)
        links = {(link.source, link.target): _link(link, free_gbps or {}) for link in pool.links}
        return cls(sites=sites, links=links)

    def copy(self, clusters: Iterable[str]) -> FreeResources:
        """Return an independent copy of these clusters and of all links."""
        sites = {}
        for name in clusters:
            site = self.sites[name]
            groups = {key: replace(group, nodes=dict(group.nodes)) for key, group in site.groups.items()}
            sites[name] = replace(site, groups=groups)
        return FreeResources(sites=sites, links=dict(self.links))

    def take(
        self, requirement: PipelineRequirement, ranges: Sequence[StageRange], *, network: bool = True
    ) -> TakenNodeGroups:
        """Deduct devices, storage and (with `network`) bandwidth of a candidate; return its node groups.

        Raises `ConflictError` if something is not free; earlier deductions are not undone.
        """
        found: list[tuple[tuple[str, int], ...]] = [()] * requirement.num_stages
        order = sorted(
            ((stage, one.cluster) for one in ranges for stage in range(one.first, one.last)),
            key=lambda one: -requirement.stages[one[0]].num_devices,
        )
        for stage, where in order:
            found[stage] = self._take_stage(requirement, stage, where)
        self.take_storage_and_links(requirement, ranges, network=network)
        return tuple(found)

    def take_storage_and_links(
        self, requirement: PipelineRequirement, ranges: Sequence[StageRange], *, network: bool = True
    ) -> None:
        """Deduct only storage and (with `network`) bandwidth, like `take`."""
        for where in dict.fromkeys(one.cluster for one in ranges):
            here = [(one.first, one.last) for one in ranges if one.cluster == where]
            self._take_storage(requirement, where, here)
        for a, b in itertools.pairwise(ranges) if network else ():
            for ends in ((a.cluster, b.cluster), (b.cluster, a.cluster)):
                self._take_gbps(ends, requirement.boundaries[a.last - 1].gbps)

    def after_placing(
        self,
        requirement: PipelineRequirement,
        ranges: Sequence[StageRange],
        *,
        network: bool = True,
        take_devices: bool = True,
    ) -> tuple[FreeResources, TakenNodeGroups]:
        """Return the resources that placed pipelines leave to others of the same job, and their node groups.

        With `take_devices` false no devices are deducted. Raises `ConflictError` if something is not free.
        """
        left = self.copy(dict.fromkeys(one.cluster for one in ranges))
        taken: TakenNodeGroups = ()
        if take_devices:
            taken = left.take(requirement, ranges, network=network)
        else:
            left.take_storage_and_links(requirement, ranges, network=network)
        for where, site in left.sites.items():
            here = [(one.first, one.last) for one in ranges if one.cluster == where]
            site.has_data = site.has_data or requirement.reads_data(here)
        left.sites = self.sites | left.sites
        return left, taken

    def _take_stage(self, requirement: PipelineRequirement, stage: int, where: str) -> tuple[tuple[str, int], ...]:
        need, left, found = requirement.stages[stage], requirement.num_pipelines, []
        for group in self.sites[where].groups_with_chip(need.chip):
            got = group.take_slots(need.num_devices, left)
            left -= got
            if got:
                found.append((group.name, got))
        if left:
            raise ConflictError(
                f"stage {stage}: {where} lacks {left} slots of {need.num_devices} free {need.chip} on one node",
                hint="plan again on what is free now",
            )
        return tuple(found)

    def _take_storage(self, requirement: PipelineRequirement, where: str, ranges: list[tuple[int, int]]) -> None:
        site = self.sites[where]
        if site.free_storage_bytes is None:
            return
        left = site.free_storage_bytes - requirement.storage_bytes(ranges, has_data=site.has_data)
        if left < 0:
            raise ConflictError(f"{where} lacks {-left} bytes of storage", hint="plan again")
        site.free_storage_bytes = left

    def _take_gbps(self, ends: ClusterPair, gbps: float) -> None:
        link = self.links.get(ends)
        left = (link.free_gbps if link else 0.0) - gbps
        if link is None or left < -1e-9:
            raise ConflictError(f"{ends[0]} to {ends[1]} lacks {-left:.3g} Gbit/s", hint="plan again")
        self.links[ends] = FreeLink(free_gbps=max(0.0, left), delay_s=link.delay_s, jitter_s=link.jitter_s)


def chip_kind(group: NodeGroup) -> str:
    """Return the kind of a node group's chips: the model, with its scales if it is virtual."""
    scale = group.virtual
    if scale is None:
        return group.chip
    return f"{group.chip} (virtual, {scale.compute_scale:g} of its speed, {scale.memory_scale:g} of its memory)"


def chip_model(chip: str) -> str:
    """Return the chip model of a kind from `chip_kind`."""
    return chip.partition(" ")[0]


def _group(group: NodeGroup, free: Mapping[str, int] | None) -> FreeNodeGroup:
    each = group.chips_per_node
    chips = group.num_chips if free is None else min(group.num_chips, free.get(group.name, 0))
    whole, rest = divmod(chips, each)
    nodes = {size: count for size, count in ((each, whole), (rest, 1)) if size and count}
    return FreeNodeGroup(
        name=group.name,
        chip=chip_kind(group),
        devices_per_node=each,
        price_per_device_hour=group.price_per_chip_hour,
        nodes=nodes,
    )


def _site(cluster: Cluster, groups: dict[str, FreeNodeGroup], stored: int) -> ClusterResources:
    return ClusterResources(
        name=cluster.name,
        owner=cluster.owner,
        region=cluster.region,
        groups=groups,
        free_storage_bytes=stored,
    )


def _link(link: Link, free_gbps: Mapping[str, float]) -> FreeLink:
    gbps = link.bandwidth_gbps
    return FreeLink(
        free_gbps=free_gbps.get(str(PoolResource.link(link.source, link.target)), gbps) if free_gbps else gbps,
        delay_s=link.delay_s,
        jitter_s=link.jitter_ms / 1e3,
    )
