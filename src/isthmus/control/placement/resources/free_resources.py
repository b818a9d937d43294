"""`Resources`: what is free, indexed by cluster, node group and free cards per node; and on links.

A query looks at numbers of nodes, never at nodes: 100,000 nodes cost no more than 100. The index is kept up
to date by `change` (a node's free cards changed) and `take` (a candidate was chosen).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from isthmus.control.placement.resources.requirement import Range, Requirement
from isthmus.core.errors import ConflictError
from isthmus.core.pool import Cluster, Link, NodeGroup, Pool

Ends = tuple[str, str]
"""A directed pair of clusters."""


@dataclass(kw_only=True)
class FreeGroup:
    """The nodes of a node group by their free cards: `nodes[n]` of them have exactly `n` cards free."""

    name: str
    chip: str
    cards_per_node: int
    price_per_card_hour: float = 0.0
    nodes: dict[int, int] = field(default_factory=dict)

    def slots(self, cards: int) -> int:
        """Return how many stages of `cards` cards the nodes hold, none of them over two nodes."""
        return sum(count * (free // cards) for free, count in self.nodes.items())

    def change(self, before: int, after: int, nodes: int = 1) -> None:
        """Note that `nodes` nodes with `before` free cards now have `after`; raise `ConflictError` if none.

        `before` 0 also brings in nodes that had no card to give, `after` 0 takes nodes out.
        """
        if before:
            if self.nodes.get(before, 0) < nodes:
                raise ConflictError(
                    f"{self.nodes.get(before, 0)} nodes of {self.name} have {before} free cards, "
                    f"fewer than {nodes}",
                    hint="plan again on what is free now",
                )
            self.nodes[before] -= nodes
            if not self.nodes[before]:
                del self.nodes[before]
        if after:
            self.nodes[after] = self.nodes.get(after, 0) + nodes

    def take(self, cards: int, wanted: int) -> int:
        """Take up to `wanted` slots of `cards` cards, from the fullest nodes first; return how many."""
        left = wanted
        for free in sorted(self.nodes):
            each = free // cards
            if not each or not left:
                continue
            whole = min(self.nodes[free], left // each)
            if whole:
                self.change(free, free - each * cards, whole)
                left -= whole * each
            if left and left < each and self.nodes.get(free):
                self.change(free, free - left * cards)
                left = 0
        return wanted - left


@dataclass(kw_only=True)
class Site:
    """One cluster: its node groups, and the bytes of storage it has left (None: not known).

    `has_data` while further pipelines are placed of a job whose data set is counted there already.
    """

    name: str
    owner: str
    region: str = ""
    groups: dict[str, FreeGroup] = field(default_factory=dict)
    free_storage_bytes: int | None = None
    has_data: bool = False

    def of_chip(self, chip: str) -> list[FreeGroup]:
        """Return the node groups of a kind of chip, the cheapest first."""
        found = [group for group in self.groups.values() if group.chip == chip]
        return found if len(found) < 2 else sorted(found, key=lambda one: one.price_per_card_hour)


@dataclass(frozen=True, kw_only=True)
class FreeLink:
    """One direction between two clusters: what others left of its bandwidth, its delay and jitter."""

    free_gbps: float
    delay_s: float = 0.0
    jitter_s: float = 0.0


Taken = tuple[tuple[tuple[str, int], ...], ...]
"""By stage: (node group, pipelines there), the groups in the order of pipelines."""


@dataclass(kw_only=True)
class Resources:
    """What is free everywhere: sites by cluster, links by directed pair of clusters."""

    sites: dict[str, Site] = field(default_factory=dict)
    links: dict[Ends, FreeLink] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        pool: Pool,
        free_chips: Mapping[str, Mapping[str, int]] | None = None,
        free_storage_bytes: Mapping[str, int] | None = None,
        free_gbps: Mapping[str, float] | None = None,
    ) -> Resources:
        """Return the index of a pool.

        `free_chips` by cluster and node group (None: all) fill whole nodes and one with the rest, as the
        planner sees them. `free_storage_bytes` by cluster and `free_gbps` by `FROM>TO` (None, or what they
        do not name: all that the pool says).
        """
        sites = {}
        for one in pool.clusters:
            free = None if free_chips is None else free_chips.get(one.name, {})
            stored = (free_storage_bytes or {}).get(one.name, one.storage_bytes)
            groups = {group.name: _group(group, free) for group in one.node_groups}
            sites[one.name] = _site(one, groups, stored)
        links = {(link.source, link.target): _link(link, free_gbps or {}) for link in pool.links}
        return cls(sites=sites, links=links)

    def copy(self, clusters: Iterable[str]) -> Resources:
        """Return a copy of these clusters and of all links, whose changes leave this one as it is."""
        sites = {}
        for name in clusters:
            site = self.sites[name]
            groups = {key: replace(group, nodes=dict(group.nodes)) for key, group in site.groups.items()}
            sites[name] = replace(site, groups=groups)
        return Resources(sites=sites, links=dict(self.links))

    def take(self, requirement: Requirement, ranges: Sequence[Range], *, network: bool = True) -> Taken:
        """Deduct cards, storage and (with `network`) bandwidth of a candidate; return its node groups.

        Raises `ConflictError` where they are not there (any more); what was deducted until then stays so.
        """
        found: list[tuple[tuple[str, int], ...]] = [()] * requirement.num_stages
        order = sorted(
            ((stage, one.cluster) for one in ranges for stage in range(one.first, one.last)),
            key=lambda one: -requirement.stages[one[0]].cards,
        )
        for stage, where in order:
            found[stage] = self._take_stage(requirement, stage, where)
        self.take_rest(requirement, ranges, network=network)
        return tuple(found)

    def take_rest(self, requirement: Requirement, ranges: Sequence[Range], *, network: bool = True) -> None:
        """Deduct storage and (with `network`) bandwidth alone, as `take` does."""
        for where in dict.fromkeys(one.cluster for one in ranges):
            here = [(one.first, one.last) for one in ranges if one.cluster == where]
            self._take_storage(requirement, where, here)
        for a, b in itertools.pairwise(ranges) if network else ():
            for ends in ((a.cluster, b.cluster), (b.cluster, a.cluster)):
                self._take_gbps(ends, requirement.boundaries[a.last - 1].gbps)

    def beside(
        self, requirement: Requirement, ranges: Sequence[Range], *, network: bool = True, cards: bool = True
    ) -> tuple[Resources, Taken]:
        """Return what pipelines leave for further ones of the same job, and their node groups.

        Without `cards` none are taken. Raises `ConflictError` where something is not there.
        """
        left = self.copy(dict.fromkeys(one.cluster for one in ranges))
        taken: Taken = ()
        if cards:
            taken = left.take(requirement, ranges, network=network)
        else:
            left.take_rest(requirement, ranges, network=network)
        for where, site in left.sites.items():
            here = [(one.first, one.last) for one in ranges if one.cluster == where]
            site.has_data = site.has_data or requirement.reads_data(here)
        left.sites = self.sites | left.sites
        return left, taken

    def _take_stage(self, requirement: Requirement, stage: int, where: str) -> tuple[tuple[str, int], ...]:
        need, left, found = requirement.stages[stage], requirement.pipelines, []
        for group in self.sites[where].of_chip(need.chip):
            got = group.take(need.cards, left)
            left -= got
            if got:
                found.append((group.name, got))
        if left:
            raise ConflictError(
                f"stage {stage}: {where} lacks {left} times {need.cards} free {need.chip} on one node",
                hint="plan again on what is free now",
            )
        return tuple(found)

    def _take_storage(self, requirement: Requirement, where: str, ranges: list[tuple[int, int]]) -> None:
        site = self.sites[where]
        if site.free_storage_bytes is None:
            return
        left = site.free_storage_bytes - requirement.storage_bytes(ranges, has_data=site.has_data)
        if left < 0:
            raise ConflictError(f"{where} lacks {-left} bytes of storage", hint="plan again")
        site.free_storage_bytes = left

    def _take_gbps(self, ends: Ends, gbps: float) -> None:
        link = self.links.get(ends)
        left = (link.free_gbps if link else 0.0) - gbps
        if link is None or left < -1e-9:
            raise ConflictError(f"{ends[0]} to {ends[1]} lacks {-left:.3g} Gbit/s", hint="plan again")
        self.links[ends] = FreeLink(free_gbps=max(0.0, left), delay_s=link.delay_s, jitter_s=link.jitter_s)


def chip_kind(group: NodeGroup) -> str:
    """Return what tells a node group's chips from others: the model, and its scales where it is virtual."""
    scale = group.virtual
    if scale is None:
        return group.chip
    return (
        f"{group.chip} (virtual, {scale.compute_scale:g} of its speed, {scale.memory_scale:g} of its memory)"
    )


def model_of(chip: str) -> str:
    """Return the chip's model of a kind that `chip_kind` gave."""
    return chip.partition(" ")[0]


def _group(group: NodeGroup, free: Mapping[str, int] | None) -> FreeGroup:
    each = group.chips_per_node
    chips = group.chips if free is None else min(group.chips, free.get(group.name, 0))
    whole, rest = divmod(chips, each)
    nodes = {size: count for size, count in ((each, whole), (rest, 1)) if size and count}
    return FreeGroup(
        name=group.name,
        chip=chip_kind(group),
        cards_per_node=each,
        price_per_card_hour=group.price_per_chip_hour,
        nodes=nodes,
    )


def _site(cluster: Cluster, groups: dict[str, FreeGroup], stored: int) -> Site:
    return Site(
        name=cluster.name,
        owner=cluster.owner,
        region=cluster.region,
        groups=groups,
        free_storage_bytes=stored,
    )


def _link(link: Link, free_gbps: Mapping[str, float]) -> FreeLink:
    return FreeLink(
        free_gbps=free_gbps.get(f"{link.source}>{link.target}", link.bandwidth_gbps),
        delay_s=link.delay_s,
        jitter_s=link.jitter_ms / 1e3,
    )
