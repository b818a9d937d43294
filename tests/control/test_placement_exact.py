"""Placement against enumeration, and what holds of every placement."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.control.placement import FreeLink, FreeResources, PipelineRequirement, place_pipelines
from isthmus.control.placement.resources.free_resources import ClusterResources
from isthmus.core.job import PlacementConstraints
from tests.control.placing import every_placement, requirements, resources, switches

EXAMPLES = settings(max_examples=120, deadline=None)


@EXAMPLES
@given(requirements, resources, switches)
def test_it_finds_what_there_is(needed: PipelineRequirement, free: FreeResources, chosen: PlacementConstraints) -> None:
    """There is a candidate if and only if enumeration finds one; as many as were asked for; the first crosses
    the WAN as rarely as possible, and none more often than that number of candidates requires (others of the
    same clusters are dropped); and each is one of those that enumeration admits: all switches are satisfied.
    """
    every = set(every_placement(needed, free, chosen))
    found = place_pipelines(needed, free, chosen, keep=3)
    assert found.exhaustive
    assert {one.ranges for one in found.candidates} <= every
    assert len(found.candidates) == min(3, len(every))
    fewest = sorted(len(one) - 1 for one in every)[:3]
    crossings = [one.wan_crossings for one in found.candidates]
    assert crossings == sorted(crossings)
    assert crossings[:1] == fewest[:1]
    assert max(crossings, default=0) <= max(fewest, default=0)
    assert every or found.refused


@EXAMPLES
@given(requirements, resources, switches)
def test_among_as_few_crossings_the_cheapest_is_first(
    needed: PipelineRequirement, free: FreeResources, chosen: PlacementConstraints
) -> None:
    """No placement with as few crossings, on as few clusters, costs less than the first."""
    every = place_pipelines(needed, free, chosen, keep=1000).candidates
    if every:
        key = [(one.wan_crossings, len(one.clusters), one.price_per_hour) for one in every]
        first = place_pipelines(needed, free, chosen, keep=1).candidates[0]
        assert (first.wan_crossings, len(first.clusters), first.price_per_hour) == min(key)


@EXAMPLES
@given(st.lists(requirements, min_size=1, max_size=4), resources)
def test_never_more_is_promised_than_there_is(jobs: list[PipelineRequirement], free: FreeResources) -> None:
    """What one job takes is gone for the next: free chips, bytes and bandwidth never go below zero."""
    cards = _cards(free)
    for needed in jobs:
        for one in place_pipelines(needed, free, PlacementConstraints(), keep=1).candidates:
            taken = free.take(needed, one.ranges)
            assert all(sum(count for _, count in row) == needed.num_pipelines for row in taken)
            cards -= needed.num_devices
            assert _cards(free) == cards
    assert all(count > 0 for s in free.sites.values() for g in s.groups.values() for count in g.nodes.values())
    assert all((one.free_storage_bytes or 0) >= 0 for one in free.sites.values())
    assert all(link.free_gbps >= 0 for link in free.links.values())


@EXAMPLES
@given(requirements, resources, switches, st.randoms(use_true_random=False))
def test_names_do_not_matter(
    needed: PipelineRequirement, free: FreeResources, chosen: PlacementConstraints, chance: random.Random
) -> None:
    """Clusters under other names, in another order, give candidates of the same crossings and prices."""
    others = [f"c{i}" for i in range(10, 10 + len(free.sites))]
    chance.shuffle(others)
    names = dict(zip(free.sites, others, strict=True))
    renamed = FreeResources(
        sites={names[a]: _named(free.sites[a], names[a]) for a in sorted(names, key=names.__getitem__)},
        links={(names[a], names[b]): link for (a, b), link in free.links.items()},
    )
    moved = chosen.model_copy(update={"clusters": tuple(names.get(one, one) for one in chosen.clusters)})
    ours = [(one.wan_crossings, one.price_per_hour) for one in place_pipelines(needed, free, chosen).candidates]
    theirs = [(one.wan_crossings, one.price_per_hour) for one in place_pipelines(needed, renamed, moved).candidates]
    assert ours == theirs


@EXAMPLES
@given(requirements, resources, switches)
def test_more_never_makes_less_possible(
    needed: PipelineRequirement, free: FreeResources, chosen: PlacementConstraints
) -> None:
    """A job that had a placement has one with a further node, more storage and bandwidth, another cluster."""
    before = len(place_pipelines(needed, free, chosen).candidates)
    for one in free.sites.values():
        for group in one.groups.values():
            group.move_nodes(0, 8)
        one.free_storage_bytes = None
    for ends, link in free.links.items():
        free.links[ends] = FreeLink(free_gbps=2 * link.free_gbps, delay_s=link.delay_s / 2)
    free.sites["new"] = _named(next(iter(free.sites.values())), "new")
    assert len(place_pipelines(needed, free, chosen).candidates) >= before


def _named(one: ClusterResources, name: str) -> ClusterResources:
    return ClusterResources(
        name=name, owner=one.owner, region=one.region, groups=one.groups,
        free_storage_bytes=one.free_storage_bytes,
    )  # fmt: skip


def _cards(free: FreeResources) -> int:
    groups = [group for one in free.sites.values() for group in one.groups.values()]
    return sum(cards * count for group in groups for cards, count in group.nodes.items())
