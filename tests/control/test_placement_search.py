"""Where the report's greedy would go wrong: small cases by hand, each rule with the figures that show it."""

from __future__ import annotations

from dataclasses import replace

from isthmus.control.placement import FreeLink, FreeResources, PipelineRequirement, PlacementResult, place_pipelines
from isthmus.control.placement.resources.pipeline_requirement import StageRange
from isthmus.core.job import PlacementConstraints
from tests.control.placing import joined, pipelines, site


def ranges(found: PlacementResult) -> list[list[tuple[int, int, str]]]:
    return [[tuple(one) for one in candidate.ranges] for candidate in found.candidates]  # type: ignore[misc]


def greedy(needed: PipelineRequirement, free: FreeResources) -> list[StageRange]:
    """The report's compute stage, word for word: the widest range that any cluster holds, then from there on.

    It neither deducts what an earlier range took nor goes back; the first cluster by name is taken.
    """
    found: list[StageRange] = []
    first = 0
    while first < needed.num_stages:
        choices = [
            StageRange(first, last, name)
            for last in range(needed.num_stages, first, -1)
            for name, one in sorted(free.sites.items())
            if sum(g.slots(needed.stages[0].num_devices) for g in one.groups.values())
            >= (last - first) * needed.num_pipelines
        ]
        if not choices:
            return []
        found.append(choices[0])
        first = choices[0].last
    return found


def test_one_cluster_that_holds_all_comes_first() -> None:
    """Where the widest range is all stages, both agree."""
    needed, free = pipelines(4), joined(site("a", 8, 8), site("b", 8, 8, 8))
    assert greedy(needed, free) == [StageRange(0, 4, "a")]
    assert ranges(place_pipelines(needed, free, PlacementConstraints()))[0] == [(0, 4, "a")]


def test_what_a_range_took_is_not_there_for_the_next() -> None:
    """The greedy gives a cluster of two nodes five stages of half a node: one more than it has."""
    needed, free = pipelines(5), joined(site("a", 8, 8))
    assert greedy(needed, free) == [StageRange(0, 4, "a"), StageRange(4, 5, "a")]
    found = place_pipelines(needed, free, PlacementConstraints())
    assert found.candidates == ()
    assert found.refused[0].reason == "compute: all clusters together lack 1 node with 8 free H20"


def test_where_the_widest_range_leads_nowhere_a_narrower_one_is_tried() -> None:
    """`a` holds the first three stages, but no cluster may follow it; `b` holds two, and `c` the others."""
    needed, free = pipelines(4), joined(site("a", 8, 4), site("b", 8), site("c", 8))
    for ends in [ends for ends in free.links if "a" in ends]:
        del free.links[ends]
    assert greedy(needed, free)[0] == StageRange(0, 3, "a")
    assert sorted(ranges(place_pipelines(needed, free, PlacementConstraints(), keep=2))) == [
        [(0, 2, "b"), (2, 4, "c")],
        [(0, 2, "c"), (2, 4, "b")],
    ]


def test_storage_narrows_a_range() -> None:
    """`a` has chips for three stages and bytes for two of them with the data."""
    needed, free = pipelines(4), joined(site("a", 8, 4, storage=3), site("b", 8, 8, storage=4))
    found = place_pipelines(needed, free, PlacementConstraints())
    assert max(last - first for one in ranges(found) for first, last, name in one if name == "a") == 2
    assert [(one.clusters, one.owner, one.lacking_bytes) for one in found.refused if one.stage == "storage"] == [
        (("a",), "owner-a", 1),
        (("b",), "owner-b", 1),
    ]


def test_boundaries_over_one_link_add_up() -> None:
    """There and back is twice the bandwidth; without the network it is offered all the same."""
    needed, free = pipelines(3), joined(site("a", 4, 4), site("b", 4))
    readers = PlacementConstraints(data_owners=("owner-a",))
    free.links = dict.fromkeys(free.links, FreeLink(free_gbps=1.0))
    assert ranges(place_pipelines(needed, free, readers)) == [[(0, 1, "a"), (1, 2, "b"), (2, 3, "a")]]
    free.links = dict.fromkeys(free.links, FreeLink(free_gbps=0.9))
    found = place_pipelines(needed, free, readers)
    assert found.candidates == ()
    words = [one.reason for one in found.refused if one.stage == "network"]
    assert words[0].endswith("the pipelines need 1 Gbit/s, 0.9 Gbit/s is left")
    blind = readers.model_copy(update={"network": False})
    assert len(place_pipelines(needed, free, blind).candidates) == 1


def test_a_link_that_is_too_slow_or_too_uneven_is_refused_with_its_figures() -> None:
    """Delay and jitter are compared with what the schedule tolerates."""
    needed, free = pipelines(4), joined(site("a", 8), site("b", 8), delay_s=0.03)
    reasons = [
        one.reason for one in place_pipelines(needed, free, PlacementConstraints()).refused if one.stage == "network"
    ]
    assert reasons[0].endswith("a delay of 30 ms, the schedule tolerates 20 ms")
    free.links = {ends: replace(link, delay_s=0.01, jitter_s=0.006) for ends, link in free.links.items()}
    reasons = [
        one.reason for one in place_pipelines(needed, free, PlacementConstraints()).refused if one.stage == "network"
    ]
    assert reasons[0].endswith("a jitter of 6 ms, the schedule tolerates 5 ms")
