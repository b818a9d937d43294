"""Small pools and requirements for the tests of placement, and a placement by enumeration to compare with."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from hypothesis import strategies as st

from isthmus.control.placement import FreeLink, FreeResources, PipelineRequirement, StageRequirement, WanRequirement
from isthmus.control.placement.resources.free_resources import ClusterResources, FreeNodeGroup
from isthmus.control.placement.resources.pipeline_requirement import StageRange
from isthmus.core.job import PlacementConstraints

CHIPS = ("H20", "A100")


def site(name: str, *nodes: int, owner: str = "", chip: str = "H20", storage: int | None = None) -> ClusterResources:
    """A cluster with one node of eight chips for every number of free chips given."""
    group = FreeNodeGroup(name="g", chip=chip, devices_per_node=8)
    for free in nodes:
        group.move_nodes(0, free)
    return ClusterResources(name=name, owner=owner or f"owner-{name}", groups={"g": group}, free_storage_bytes=storage)


def joined(*sites: ClusterResources, gbps: float = 10.0, delay_s: float = 0.01, jitter_s: float = 0.0) -> FreeResources:
    """These sites, each joined with each."""
    link = FreeLink(free_gbps=gbps, delay_s=delay_s, jitter_s=jitter_s)
    links = dict.fromkeys(itertools.permutations((one.name for one in sites), 2), link)
    return FreeResources(sites={one.name: one for one in sites}, links=links)


def pipelines(stages: int, cards: int = 4, d: int = 1, gbps: float = 0.5, chip: str = "H20") -> PipelineRequirement:
    """Equal stages of one checkpoint byte each."""
    need = StageRequirement(chip=chip, num_devices=cards, devices_per_node=8, checkpoint_bytes=1)
    wan = WanRequirement(gbps=gbps, delay_s=0.02, jitter_s=0.005)
    return PipelineRequirement(stages=(need,) * stages, num_pipelines=d, boundaries=(wan,) * (stages - 1), data_bytes=1)


SEEDS = st.integers(0, 2**32).map(random.Random)
"""Chance from a seed: evenly spread, so that many placements exist and many do not."""


def _resources(chance: random.Random) -> FreeResources:
    found = FreeResources()
    for name in [f"c{i}" for i in range(chance.randint(1, 4))]:
        groups = {}
        for chip in chance.choice([("H20",), ("H20",), ("A100",), CHIPS, CHIPS]):
            groups[chip] = FreeNodeGroup(
                name=chip, chip=chip, devices_per_node=8, price_per_device_hour=chance.randint(0, 2)
            )
            for _ in range(chance.randint(0, 3)):
                groups[chip].move_nodes(0, chance.randint(1, 8))
        found.sites[name] = ClusterResources(
            name=name, owner=f"o{chance.randint(0, 2)}", region=f"r{chance.randint(0, 1)}", groups=groups,
            free_storage_bytes=chance.choice([None, 8, 15]),
        )  # fmt: skip
    for ends in itertools.permutations(found.sites, 2):
        gbps = chance.choice([None, 0.4, 1.0, 10.0, 10.0, 10.0, 10.0, 10.0])
        if gbps is not None:
            delay_s = chance.choice([0.01, 0.01, 0.01, 0.01, 0.05])
            found.links[ends] = FreeLink(free_gbps=gbps, delay_s=delay_s, jitter_s=0.001)
    return found


def _requirement(chance: random.Random) -> PipelineRequirement:
    count, chips = chance.randint(1, 4), CHIPS[: chance.randint(1, 2)]
    stages = tuple(
        StageRequirement(
            chip=chance.choice(chips), num_devices=chance.choice([1, 2, 4]), devices_per_node=8,
            checkpoint_bytes=chance.randint(0, 4), model_bytes=1,
        )
        for _ in range(count)
    )  # fmt: skip
    wan = tuple(WanRequirement(gbps=chance.choice([0.3, 0.6]), delay_s=0.02, jitter_s=0.01) for _ in range(count - 1))
    return PipelineRequirement(
        stages=stages, num_pipelines=chance.randint(1, 2), boundaries=wan, data_bytes=chance.randint(0, 3)
    )


def _switches(chance: random.Random) -> PlacementConstraints:
    fields: dict[str, object] = {
        "several_owners": False, "network": False, "mixed_chips": False, "clusters": ("c0", "c1"),
        "owners": ("o0", "o1"), "regions": ("r0",), "chips": ("H20",), "data_owners": ("o0",),
        "data_regions": ("r1",), "max_chips": chance.randint(1, 30),
    }  # fmt: skip
    chosen = chance.sample(sorted(fields), chance.choice([0, 0, 1, 1, 2]))
    return PlacementConstraints.model_validate({name: fields[name] for name in chosen})


resources = SEEDS.map(_resources)
"""Up to four clusters of up to three owners, with scraps of nodes; most pairs joined, some well."""

requirements = SEEDS.map(_requirement)
"""Up to four stages on one or two kinds of chips."""

switches = SEEDS.map(_switches)
"""A job's switches, most of them as they are by default."""


def ranges_at(clusters: Sequence[str]) -> tuple[StageRange, ...]:
    """The ranges of stages at these clusters, one per stage."""
    found, first = [], 0
    for name, group in itertools.groupby(clusters):
        last = first + len(list(group))
        found.append(StageRange(first, last, name))
        first = last
    return tuple(found)


def every_placement(
    needed: PipelineRequirement, free: FreeResources, switches: PlacementConstraints
) -> Iterator[tuple[StageRange, ...]]:
    """Every way there is, from first principles: node by node, link by link, byte by byte."""
    for clusters in itertools.product(free.sites, repeat=needed.num_stages):
        if is_admitted(needed, free, switches, clusters):
            yield ranges_at(clusters)


def is_admitted(
    needed: PipelineRequirement, free: FreeResources, switches: PlacementConstraints, clusters: Sequence[str]
) -> bool:
    """Tell whether stages may be at these clusters, one each."""
    used = [free.sites[name] for name in clusters]
    chips = {stage.chip for stage in needed.stages}
    cards = needed.num_pipelines * sum(stage.num_devices for stage in needed.stages)
    return (
        all(not switches.clusters or one.name in switches.clusters for one in used)
        and all(not switches.owners or one.owner in switches.owners for one in used)
        and all(not switches.regions or one.region in switches.regions for one in used)
        and all(not switches.data_owners or one.owner in switches.data_owners for one in (used[0], used[-1]))
        and all(not switches.data_regions or one.region in switches.data_regions for one in (used[0], used[-1]))
        and (switches.several_owners or len({one.owner for one in used}) == 1)
        and (switches.mixed_chips or len(chips) == 1)
        and (not switches.chips or chips <= set(switches.chips))
        and (not switches.max_chips or cards <= switches.max_chips)
        and all(_fits(needed, free, clusters, name) for name in set(clusters))
        and _is_joined(needed, free, switches, clusters)
    )


def _fits(needed: PipelineRequirement, free: FreeResources, clusters: Sequence[str], name: str) -> bool:
    here = [i for i, where in enumerate(clusters) if where == name]
    stored = sum(needed.stages[i].checkpoint_bytes + needed.stages[i].model_bytes for i in here)
    stored += needed.data_bytes if {0, needed.num_stages - 1} & set(here) else 0
    one = free.sites[name]
    if one.free_storage_bytes is not None and stored > one.free_storage_bytes:
        return False
    for chip in CHIPS:
        nodes = [n for g in one.groups.values() if g.chip == chip for n, c in g.nodes.items() for _ in range(c)]
        units = [needed.stages[i].num_devices for i in here if needed.stages[i].chip == chip]
        if not packs(sorted(units * needed.num_pipelines, reverse=True), nodes):
            return False
    return True


def packs(units: list[int], nodes: list[int]) -> bool:
    """Tell whether units fit nodes, by trying every node for the largest unit."""
    if not units:
        return True
    for free in {n for n in nodes if n >= units[0]}:
        left = list(nodes)
        left[left.index(free)] -= units[0]
        if packs(units[1:], left):
            return True
    return False


def _is_joined(
    needed: PipelineRequirement, free: FreeResources, switches: PlacementConstraints, clusters: Sequence[str]
) -> bool:
    load: dict[tuple[str, str], float] = {}
    for need, a, b in zip(needed.boundaries, clusters, clusters[1:], strict=False):
        for ends in ((a, b), (b, a)) if a != b else ():
            link = free.links.get(ends)
            if link is None:
                return False
            load[ends] = load.get(ends, 0.0) + need.gbps
            late = link.delay_s > need.delay_s or link.jitter_s > need.jitter_s
            if switches.network and (late or load[ends] > link.free_gbps):
                return False
    return True
