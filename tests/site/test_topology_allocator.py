"""A site whose topology is known: what parts get, what they are refused, and what the server is offered."""

from __future__ import annotations

from isthmus.core.messages.agent_messages import PartOrder, Victim
from isthmus.core.owner.owner_policy import OwnerPolicy
from isthmus.core.plan import Plan, Stage
from isthmus.core.pool import Cluster, NodeGroup
from isthmus.core.pool_parts.group_topology import CardLink, GroupTopology, TopologyDomain
from isthmus.site.devices.make_allocator import make_allocator
from isthmus.site.topology.tree_of_group import node_names
from tests.site.driver import Site, local
from tests.site.samples import JOB, order

GROUP = NodeGroup(
    name="h20", chip="H20", nodes=4, chips_per_node=4,
    topology=GroupTopology(
        card_links=(CardLink(cards=(0, 2), gbps=400), CardLink(cards=(1, 3), gbps=400)),
        super_nodes=(TopologyDomain(name="s0", nodes=("a[1-2]",)), TopologyDomain(name="s1", nodes=("a[3-4]",))),
    ),
)  # fmt: skip
EAST = Cluster(name="east", owner="o", node_groups=(GROUP,))


def site(policy: OwnerPolicy | None = None) -> Site:
    return Site(policy, devices=make_allocator(EAST))


def part(job: str, tp: int, dp: int = 1, desired: str = "prepared", **more: object) -> PartOrder:
    """Return an order for `dp` replicas of one stage on `tp` cards."""
    stages = tuple(Stage(replica=one, cluster="east", node_group="h20", layers=(0, 1), tp=tp) for one in range(dp))
    made = Plan(id=job, stages=stages, dp=dp, micro_batches=1, micro_batch_size=1, sequence_length=8)
    return order(desired, job).model_copy(update={"plan": made, "spec": JOB, **more})  # type: ignore[arg-type]


def nodes(site: Site, job: str) -> list[set[str]]:
    """Return the nodes of each stage of a job."""
    found = site.part(job)
    assert found.plan is not None
    return [
        {found.workers[rank].devices[0].split("/")[1] for rank in found.plan.ranks_of(stage)}
        for stage in range(len(found.plan.stages))
    ]


def test_a_rank_gets_linked_cards_and_small_parts_share_a_node() -> None:
    """Cards 0 and 2 are joined; the second part fills the node that the first has broken."""
    east = site()
    one, two = part("a", 2), part("b", 2)
    east.obey(one, two)
    assert {device for worker in east.part("a").workers.values() for device in worker.devices} == {
        "h20/a1/0", "h20/a1/2"
    }  # fmt: skip
    assert nodes(east, "b") == [{"a1"}]
    assert {worker.node for worker in east.part("b").workers.values()} == {"a1"}
    assert east.machine.free_chips() == {"h20": 12}


def test_a_tensor_parallel_group_stays_in_its_super_node() -> None:
    """Two replicas of eight cards take a super-node each; a third has no place."""
    east = site()
    east.obey(part("a", 8, dp=2))
    assert [len(found & {"a1", "a2"}) % 2 for found in nodes(east, "a")] == [0, 0]
    assert all(len(found) == 2 for found in nodes(east, "a"))


def test_a_part_without_a_place_is_refused_with_the_reason_although_enough_is_free() -> None:
    """Eight cards are free in two super-nodes: for four ranks of one unit of eight there is no place."""
    east = site()
    first = [part("a", 4), part("b", 4), part("c", 4), part("d", 4)]
    east.obey(*first)
    assert [nodes(east, job)[0] for job in "abcd"] == [{"a1"}, {"a2"}, {"a3"}, {"a4"}]
    kept = [first[0], first[2]]
    east.obey(*kept, *[one.model_copy(update={"desired": "released"}) for one in (first[1], first[3])])
    east.wait(1)
    east.obey(*kept, part("e", 8))
    assert east.states["e/1"] == "refused"
    assert east.detail("e") == (
        "east: node group 'h20': 1 x 8 cards, each inside one super-node: 0 fit, 8 cards are free, in fragments"
    )


def test_the_fewest_victims_make_a_place() -> None:
    """Of two victims, the one in the half free super-node suffices."""
    east = site(OwnerPolicy(preemptible_from="low"))
    running = [part("a", 4, priority="low"), part("b", 4, priority="low"), part("c", 4, priority="low")]
    east.obey(*running)
    victims = tuple(Victim(job=job, attempt=1) for job in ("a", "c"))
    east.obey(*running, part("e", 8, desired="ready", victims=victims, priority="high"))
    assert east.states["e/1"] == "ready"
    assert nodes(east, "e") == [{"a3", "a4"}]


def test_fragments_are_not_offered_to_the_pool() -> None:
    """Planners assume whole nodes and one broken one: of three broken nodes only the emptiest is offered."""
    east = site()
    east.local(*(local(f"x{number}", chips=3) for number in range(3)))
    assert east.machine.site.devices.num_free() == {"h20": 7}
    assert east.machine.free_chips() == {"h20": 5}


def test_a_local_job_with_more_cards_than_a_node_gets_several_nodes() -> None:
    """It is one process with cards of two nodes, as before; in the same super-node if there is room."""
    east = site()
    east.local(local("big", chips=6))
    assert {device.split("/")[1] for device in east.part("big", 0).workers[0].devices} == {"a1", "a2"}


def test_nodes_of_the_built_in_scheduler_have_the_names_of_the_topology() -> None:
    """Nodes that the topology does not name keep their numbers."""
    assert node_names(EAST, "h20") == ("a1", "a2", "a3", "a4")
    more = EAST.model_copy(update={"node_groups": (GROUP.model_copy(update={"nodes": 6}),)})
    assert node_names(more, "h20") == ("a1", "a2", "a3", "a4", "0", "1")
