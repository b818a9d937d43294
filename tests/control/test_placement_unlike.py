"""Unlike pipelines of one job: all have a place or none, and never more is taken than there is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.control.placement import FreeResources, PipelineRequirement, place_pipelines
from isthmus.control.placement.place_plan import place_plan
from isthmus.control.placement.resources.free_resources import FreeNodeGroup
from isthmus.control.placement.resources.gradient_traffic import GradientTraffic
from isthmus.control.placement.resources.plan_requirement import EqualPipelines, PlanRequirement
from isthmus.core.job import PlacementConstraints
from tests.control.placing import (
    CHIPS,
    is_admitted,
    joined,
    packs,
    pipelines,
    ranges_at,
    requirements,
    resources,
    site,
    switches,
)

EXAMPLES = settings(max_examples=40, deadline=None)
LAYERS = 4
GBIT = 1e9 / 8


def demand(*needed: PipelineRequirement, gbit: float = 0.1) -> PlanRequirement:
    """Unlike pipelines on one data set; the gradients of all layers are `gbit` Gbit, once a second."""
    kinds = []
    for number, one in enumerate(replace(each, data_bytes=needed[0].data_bytes) for each in needed):
        cuts = [LAYERS * stage // one.num_stages for stage in range(one.num_stages + 1)]
        kinds.append(
            EqualPipelines(replicas=(number,), requirement=one, layer_spans=tuple(itertools.pairwise(cuts)), ranges=())
        )
    each = int(gbit * GBIT / LAYERS)
    gradients = GradientTraffic(
        layer_bytes=(each,) * LAYERS, embedding_bytes=0, head_bytes=0, tied=False, iteration_s=1.0
    )
    return PlanRequirement(groups=tuple(kinds), gradients=gradients)


two = st.tuples(requirements, requirements)


@EXAMPLES
@given(requirements, resources, switches)
def test_equal_pipelines_are_placed_as_before(
    needed: PipelineRequirement, free: FreeResources, chosen: PlacementConstraints
) -> None:
    """A demand of one kind has the candidates, the reasons and the refusals of `place_pipelines`."""
    found, alone = place_plan(demand(needed), free, chosen), place_pipelines(needed, free, chosen)
    assert [one.candidates for one in found.candidates] == [(one,) for one in alone.candidates]
    assert (found.refused, found.exhaustive) == (alone.refused, alone.exhaustive)
    assert [one.why for one in found.candidates] == [one.why for one in alone.candidates]


@EXAMPLES
@given(st.lists(requirements, min_size=2, max_size=3), resources, switches)
def test_all_kinds_have_a_place_or_none_and_never_more_than_there_is(
    needed: list[PipelineRequirement], free: FreeResources, chosen: PlacementConstraints
) -> None:
    """Each candidate places every kind; taken one after the other, chips, bytes and bandwidth suffice for
    all, with gradients on top; and where there is no candidate the refusals say why.
    """
    job = demand(*needed)
    needed = [kind.requirement for kind in job.groups]
    before = _snapshot(free)
    found = place_plan(job, free, chosen)
    assert _snapshot(free) == before, "nothing is taken by looking"
    assert found.candidates or found.refused
    for one in found.candidates:
        assert len(one.candidates) == len(needed)
        left = free
        for number in job.largest_first:
            left, taken = left.after_placing(needed[number], one.candidates[number].ranges, network=chosen.network)
            assert all(sum(count for _, count in row) == needed[number].num_pipelines for row in taken)
        assert all(n > 0 for s in left.sites.values() for g in s.groups.values() for n in g.nodes.values())
        assert all((s.free_storage_bytes or 0) >= 0 for s in left.sites.values())
        for ends, gbps in _gradients(job, [c.ranges for c in one.candidates]).items():
            assert ends in left.links
            assert not chosen.network or left.links[ends].free_gbps >= gbps
        assert _cards(free) - _cards(left) == job.num_devices


@EXAMPLES
@given(two, resources, switches)
def test_it_finds_what_there_is(
    needed: tuple[PipelineRequirement, PipelineRequirement], free: FreeResources, chosen: PlacementConstraints
) -> None:
    """With whole nodes and one in part, and work enough: a candidate if and only if enumeration finds one."""
    for one in free.sites.values():
        for group in one.groups.values():
            parts = sorted(group.nodes)[:1]
            group.nodes = {8: sum(group.nodes.values())} | dict.fromkeys(parts, 1)
    job = demand(*needed)
    every = next(_every(job, free, chosen), None)
    found = place_plan(job, free, chosen, keep=1, max_searches=10_000)
    assert bool(found.candidates) == (every is not None) or not found.exhaustive
    for one in found.candidates:
        assert _admitted(job, free, chosen, [_clusters(c.ranges) for c in one.candidates])


def test_what_one_kind_takes_is_not_there_for_the_other() -> None:
    """Two stages of half a node and one stage of a whole one: the larger first, the smaller beside it."""
    small, large = pipelines(2), pipelines(1, cards=8)
    free = joined(site("a", 8), site("b", 8))
    found = place_plan(demand(small, large), free, PlacementConstraints())
    assert [one.clusters for one in found.candidates] == [("b", "a"), ("a", "b")]
    assert "replica 0: stages 0 to 1 at b on 8 H20" in found.candidates[0].why
    assert "gradients from a to b need 0.104 of 10 Gbit/s left" in found.candidates[0].why
    none = place_plan(demand(small, large), joined(site("a", 8), site("b", 4)), PlacementConstraints())
    assert none.candidates == ()
    assert none.refused[0].reason == (
        "compute: for replica 0, beside the others: all clusters together lack 1 node with 8 free H20"
    )


def test_a_choice_that_leaves_the_rest_no_place_is_taken_back() -> None:
    """Either site is as good for the first kind; the second may only be where the chips of its kind are."""
    first, second = pipelines(1, cards=8), pipelines(1, cards=8, chip="A100")
    both = site("a", 8)
    both.groups["A100"] = FreeNodeGroup(name="A100", chip="A100", devices_per_node=8, nodes={8: 1})
    free = joined(both, site("b", 8), site("c", 8))
    free.links = {ends: link for ends, link in free.links.items() if "b" not in ends}
    found = place_plan(demand(first, second), free, PlacementConstraints())
    assert {one.clusters for one in found.candidates} == {("a",), ("c", "a")}, "b is not joined with a"


def test_gradients_need_links_and_bandwidth() -> None:
    """Replicas at two clusters send every sum once each way: a link that carries less is refused with
    its owner; without `placement.network` only its existence is checked.
    """
    job = demand(pipelines(1, cards=8), pipelines(2), gbit=2.0)
    free = joined(site("a", 8), site("b", 8), gbps=2.0)
    (refused,) = place_plan(job, free, PlacementConstraints()).refused
    assert (refused.stage, refused.clusters, refused.owner) == ("network", ("a", "b"), "owner-a")
    assert refused.reason == (
        "network: a (owner-a) to b (owner-b): the gradients of replicas need 2.07 Gbit/s, 2 Gbit/s is left"
    )
    assert place_plan(job, free, PlacementConstraints(network=False)).candidates
    free.links = {}
    (refused, *_) = place_plan(job, free, PlacementConstraints(network=False)).refused
    assert refused.reason.endswith("the gradients of replicas need 2.07 Gbit/s, there is no link")


def test_three_clusters_send_each_other_two_thirds() -> None:
    """Of a sum of k clusters every two exchange 2 / k each way; of what one cluster has alone, nothing."""
    gradients = GradientTraffic(layer_bytes=(30, 60), embedding_bytes=12, head_bytes=6, tied=False, iteration_s=1.0)
    whole = [((0, 2), name) for name in "ab"]
    assert gradients.bytes_by_pair(whole) == {("a", "b"): 108, ("b", "a"): 108}
    third = gradients.bytes_by_pair([*whole, ((0, 2), "c")])
    assert set(third) == set(itertools.permutations("abc", 2))
    assert all(abs(num - 72) < 1e-9 for num in third.values())
    cut = gradients.bytes_by_pair([((0, 1), "a"), ((1, 2), "b"), ((0, 2), "a")])
    assert cut == {("a", "b"): 66, ("b", "a"): 66}
    tied = replace(gradients, tied=True).bytes_by_pair([((0, 1), "a"), ((1, 2), "b")])
    assert tied == {("a", "b"): 12, ("b", "a"): 12}, "a tied embedding is at both ends"


def test_owners_do_not_mix_where_the_job_forbids_it() -> None:
    """Both kinds are at one owner's clusters, or there is no candidate."""
    job = demand(pipelines(1, cards=8), pipelines(2))
    apart = joined(site("a", 8), site("b", 8))
    switch = PlacementConstraints(several_owners=False)
    assert place_plan(job, apart, PlacementConstraints()).candidates
    assert place_plan(job, apart, switch).candidates == ()
    same = joined(site("a", 8, owner="o"), site("b", 8, owner="o"))
    assert place_plan(job, same, switch).candidates


def test_limits_on_chips_are_those_of_all_kinds_together() -> None:
    """Neither kind alone mixes chips or passes `max_chips`; together they do."""
    job = demand(pipelines(1, cards=8), pipelines(1, cards=8, chip="A100"))
    free = joined(site("a", 8), site("b", 8, chip="A100"))
    assert place_plan(job, free, PlacementConstraints()).candidates
    for switch, words in (
        (PlacementConstraints(mixed_chips=False), "placement.mixed_chips is false"),
        (PlacementConstraints(max_chips=15), "16 chips exceed placement.max_chips, 15"),
    ):
        found = place_plan(job, free, switch)
        assert found.candidates == ()
        assert words in found.refused[0].reason


def test_the_data_set_is_stored_once() -> None:
    """Two kinds at one cluster read the same copy: three bytes and the data are enough for both."""
    job = demand(pipelines(1), pipelines(2))
    assert place_plan(job, joined(site("a", 8, 4, storage=4)), PlacementConstraints()).candidates
    assert place_plan(job, joined(site("a", 8, 4, storage=3)), PlacementConstraints()).candidates == ()


def _every(job: PlanRequirement, free: FreeResources, chosen: PlacementConstraints) -> Iterator[list[tuple[str, ...]]]:
    """Every way to place all kinds, from first principles."""
    each = [
        [
            where
            for where in itertools.product(free.sites, repeat=kind.requirement.num_stages)
            if is_admitted(kind.requirement, free, chosen, where)
        ]
        for kind in job.groups
    ]
    for rows in itertools.product(*each):
        if _admitted(job, free, chosen, list(rows)):
            yield list(rows)


def _admitted(
    job: PlanRequirement, free: FreeResources, chosen: PlacementConstraints, rows: list[tuple[str, ...]]
) -> bool:
    needed = [kind.requirement for kind in job.groups]
    used = {free.sites[name].owner for row in rows for name in row}
    chips = {stage.chip for one in needed for stage in one.stages}
    return (
        all(is_admitted(one, free, chosen, row) for one, row in zip(needed, rows, strict=True))
        and (chosen.several_owners or len(used) == 1)
        and (chosen.mixed_chips or len(chips) == 1)
        and (not chosen.max_chips or job.num_devices <= chosen.max_chips)
        and all(_fits(needed, free, rows, name) for name in free.sites)
        and _is_joined(job, free, chosen, rows)
    )


def _fits(needed: list[PipelineRequirement], free: FreeResources, rows: list[tuple[str, ...]], name: str) -> bool:
    both = zip(needed, rows, strict=True)
    here = [(one, stage) for one, row in both for stage, at in enumerate(row) if at == name]
    stored = sum(one.stages[i].checkpoint_bytes + one.stages[i].model_bytes for one, i in here)
    stored += next((one.data_bytes for one, i in here if i in (0, one.num_stages - 1)), 0)
    group_of = free.sites[name].groups
    if free.sites[name].free_storage_bytes is not None and stored > (free.sites[name].free_storage_bytes or 0):
        return False
    for chip in CHIPS:
        nodes = [n for g in group_of.values() if g.chip == chip for n, c in g.nodes.items() for _ in range(c)]
        units = [
            one.stages[i].num_devices for one, i in here if one.stages[i].chip == chip for _ in range(one.num_pipelines)
        ]
        if not packs(sorted(units, reverse=True), nodes):
            return False
    return True


def _is_joined(
    job: PlanRequirement, free: FreeResources, chosen: PlacementConstraints, rows: list[tuple[str, ...]]
) -> bool:
    load = _gradients(job, [ranges_at(row) for row in rows])
    if any(ends not in free.links for ends in load):
        return False
    for kind, row in zip(job.groups, rows, strict=True):
        for need, a, b in zip(kind.requirement.boundaries, row, row[1:], strict=False):
            for ends in ((a, b), (b, a)) if a != b else ():
                load[ends] = load.get(ends, 0.0) + need.gbps
    return not chosen.network or all(gbps <= free.links[ends].free_gbps + 1e-9 for ends, gbps in load.items())


def _gradients(job: PlanRequirement, rows: list[tuple[tuple[int, int, str], ...]]) -> dict[tuple[str, str], float]:
    """What crosses between clusters, layer by layer."""
    found: dict[tuple[str, str], float] = {}
    for layer, num_bytes in enumerate(job.gradients.layer_bytes):
        here = {
            cluster
            for kind, row in zip(job.groups, rows, strict=True)
            for first, last, cluster in row
            for span in kind.layer_spans[first:last]
            if span[0] <= layer < span[1]
        }
        for ends in itertools.permutations(here, 2):
            found[ends] = found.get(ends, 0.0) + 2 / len(here) * num_bytes * 8 / 1e9 * 1500 / 1448
    return found


def _clusters(ranges: tuple[tuple[int, int, str], ...]) -> tuple[str, ...]:
    return tuple(cluster for first, last, cluster in ranges for _ in range(first, last))


def _snapshot(free: FreeResources) -> tuple[object, ...]:
    sites = {
        name: (one.free_storage_bytes, one.has_data, {key: dict(g.nodes) for key, g in one.groups.items()})
        for name, one in free.sites.items()
    }
    return sites, {ends: replace(link) for ends, link in free.links.items()}


def _cards(free: FreeResources) -> int:
    groups = [group for one in free.sites.values() for group in one.groups.values()]
    return sum(cards * count for group in groups for cards, count in group.nodes.items())
