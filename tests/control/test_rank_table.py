"""The ranks of a run on nodes and network cards: pairs of addresses, and what a replaced worker changes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from isthmus.control.algorithms.rank_links import rank_links
from isthmus.control.algorithms.rank_table import RankTable, nic_addresses, split_device
from isthmus.control.queries.job_ranks import job_ranks
from isthmus.core.errors import ConflictError
from isthmus.core.messages.agent_messages import ObservedPart, WorkerAddress
from isthmus.core.plan import Plan, Prediction
from isthmus.core.pool import Cluster, NetworkCard, NodeGroup
from isthmus.core.views.rank_views import RankView
from tests.control.driver import Driver, started
from tests.control.samples import plan


def cluster(name: str, number: int, cards: dict[str, int], nodes: int = 2, chips: int = 4) -> Cluster:
    """A cluster whose card `eth0` of weight 3 has 10.NUMBER.3.NODE at each node."""
    nics = [
        NetworkCard(name=card, addresses=tuple(f"10.{number}.{net}.{node}" for node in range(nodes)))
        for card, net in cards.items()
    ]
    group = NodeGroup(name="g", chip="H20", nodes=nodes, chips_per_node=chips, nics=tuple(nics))
    return Cluster(name=name, owner="o", node_groups=(group,))


def worker(rank: int, site: str, device: str = "", port: int = 7000) -> WorkerAddress:
    return WorkerAddress(rank=rank, cluster=site, host=f"host-{site}", port=port, device=device)


def pairs(view: RankView, peer: int) -> list[tuple[str, str]]:
    (found,) = [one for one in view.peers if one.rank == peer]
    return [(pair.source, pair.target) for pair in found.pairs]


def test_addresses_pair_card_by_card_in_the_order_of_the_names() -> None:
    """The last rank of a segment and the first of the next pair their cards by name, whatever the file's order."""
    sites = {"a": cluster("a", 1, {"eth1": 1, "eth0": 0}, chips=1), "b": cluster("b", 2, {"ib1": 1, "ib0": 0}, chips=1)}
    table = RankTable(plan("a", "b"), sites)
    table.place(worker(0, "a", "g/1/0"))
    table.place(worker(1, "b", "g/0/0"))
    first, second = table.views()
    assert (first.node, first.addresses, first.port) == ("g/1", ("10.1.0.1", "10.1.1.1"), 7000)
    assert (second.node, second.addresses) == ("g/0", ("10.2.0.0", "10.2.1.0"))
    assert pairs(first, 1) == [("10.1.0.1", "10.2.0.0"), ("10.1.1.1", "10.2.1.0")]
    assert pairs(second, 0) == [(b, a) for a, b in pairs(first, 1)]


def test_with_unlike_numbers_of_cards_the_rest_stays_unpaired() -> None:
    """Three cards and one make one pair; a node without cards in the pool file has the address of its worker."""
    sites = {"a": cluster("a", 1, {"c": 2, "b": 1, "a": 0}, chips=1), "b": cluster("b", 2, {}, chips=1)}
    table = RankTable(plan("a", "b"), sites)
    table.place(worker(0, "a", "g/0/0"))
    table.place(worker(1, "b", "g/0/0"))
    assert pairs(table.view(0), 1) == [("10.1.0.0", "host-b")]


@pytest.mark.parametrize(
    ("cards", "chips", "device", "taken", "expected"),
    [
        (8, 8, 3, 1, [3]),
        (4, 8, 3, 1, [1]),
        (4, 8, 0, 8, [0, 1, 2, 3]),
        (1, 8, 7, 1, [0]),
        (4, 2, 1, 1, [2, 3]),
        (3, 2, 0, 1, [0]),
        (3, 2, 1, 1, [1, 2]),
        (2, 4, 2, 9, [1]),
    ],
)
def test_a_rank_has_the_cards_beside_its_devices(
    cards: int, chips: int, device: int, taken: int, expected: list[int]
) -> None:
    """The first device of a node has the first card by name; the cards are divided as the devices are."""
    group = cluster("a", 1, {f"eth{card}": card for card in range(cards)}, chips=chips).node_groups[0]
    assert list(nic_addresses(group, 1, device, taken)) == [f"10.1.{card}.1" for card in expected]


@pytest.mark.parametrize(
    "device", ["", "g", "g/0", "g/2/0", "g/0/4", "h/0/0", "g/-1/0", "g/0/x", "g/٣/0", "//", "g/0/0/0", "g/1e3/0"]
)
def test_a_device_that_the_site_does_not_have_gives_no_other_address(device: str) -> None:
    """A worker's words about its device select an address of its own site's inventory, or none."""
    table = RankTable(plan("a", "b"), {"a": cluster("a", 1, {"eth0": 0})})
    table.place(worker(0, "a", device))
    assert table.view(0).addresses == ("host-a",)
    assert split_device("g/1/2") == ("g", 1, 2)


def test_a_worker_of_another_cluster_is_refused() -> None:
    """A rank belongs to the cluster of its segment."""
    table = RankTable(plan("a", "b"), {})
    for rank, site in ((0, "b"), (1, "a"), (2, "a")):
        with pytest.raises(ValueError, match=f"no rank {rank} in cluster {site}"):
            table.place(worker(rank, site))


def with_rates(made: Plan, hops: tuple[float, ...], gradients: dict[str, float]) -> Plan:
    known: dict[str, Any] = {"iteration_s": 1, "tgs_tokens_per_card_s": 1, "samples_per_s": 1, "peak_memory_bytes": ()}
    return made.model_copy(update={"predicted": Prediction(wan_gbps=hops, gradient_gbps=gradients, **known)})


def test_predicted_rates_become_demands_between_ranks_then_addresses() -> None:
    """Each hop's rate goes both ways between its stages; gradients between the clusters that hold the same layers."""
    made = with_rates(plan("a", "b", "|", "a", "b"), (4.0, 6.0), {})
    rates = {(one.source, one.target): one.gbps for one in rank_links(made) if one.gbps}
    assert rates == {(0, 2): 4.0, (2, 0): 4.0, (1, 3): 6.0, (3, 1): 6.0}
    table = RankTable(
        made, {"a": cluster("a", 1, {"x": 0, "y": 1}, chips=1), "b": cluster("b", 2, {"x": 0, "y": 1}, chips=1)}
    )
    for rank, site in enumerate("aabb"):
        table.place(worker(rank, site, f"g/{rank % 2}/0"))
    (peer,) = [one for one in table.view(0).peers if one.rank == 2]
    assert [(pair.source, pair.target, pair.gbps) for pair in peer.pairs] == [
        ("10.1.0.0", "10.2.0.0", 2.0),
        ("10.1.1.0", "10.2.1.0", 2.0),
    ]
    apart = with_rates(plan("a", "a", "|", "b", "b"), (), {"a>b": 3.0, "b>a": 1.0})
    rates = {(one.source, one.target): one.gbps for one in rank_links(apart) if one.gbps}
    assert rates == {(0, 2): 1.5, (1, 3): 1.5, (2, 0): 0.5, (3, 1): 0.5}


@settings(max_examples=100, deadline=None)
@given(data=st.data(), rows=st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_replaced_worker_changes_its_own_entry_alone(data: st.DataObject, rows: list[list[str]]) -> None:
    """Numbers, nodes and addresses of all other ranks stay; what changed between addresses is exactly what is said."""
    made = plan(*"|".join("".join(row) for row in rows))
    cards = st.dictionaries(st.sampled_from(["eth0", "eth1", "ib0"]), st.integers(0, 2), max_size=3)
    sites = {
        name: cluster(name, at, dict(zip(data.draw(cards), range(3), strict=False))) for at, name in enumerate("abc")
    }
    table = RankTable(made, sites)
    devices = st.builds("g/{}/{}".format, st.integers(0, 1), st.integers(0, 3))
    for rank, site in enumerate(made.rank_clusters):
        table.place(worker(rank, site, data.draw(devices)))
    before, demands = table.views(), all_pairs(table)
    rank = data.draw(st.integers(0, len(made.ranks) - 1))
    change = table.place(worker(rank, made.rank_clusters[rank], data.draw(devices), port=9000))
    after = table.views()
    for old, new in zip(before, after, strict=True):
        assert (old.rank, old.cluster) == (new.rank, new.cluster)
        assert old.rank == rank or (old.node, old.addresses, old.port) == (new.node, new.addresses, new.port)
        assert [one.rank for one in old.peers] == [one.rank for one in new.peers]
    assert after[rank].port == 9000
    found = all_pairs(table)
    assert {*demands} - {*found} <= {*change.ended}
    assert {*found} - {*demands} <= {*change.begun}
    assert {(rank, one.rank) for one in after[rank].peers} == {
        (rank, one.rank) for view in after for one in [view] if any(p.rank == rank for p in view.peers)
    }


def test_chunks_join_the_last_stage_with_the_first() -> None:
    """With two chunks a stage a micro-batch goes around: three stages are a ring, two are joined already."""
    for sites, ring in ((("a", "b", "c"), {(0, 2), (2, 0)}), (("a", "b"), set())):
        straight = plan(*sites)
        around = straight.model_copy(update={"schedule": "interleaved", "chunks": 2})
        before, after = ({(one.source, one.target) for one in rank_links(made)} for made in (straight, around))
        assert after - before == ring


def all_pairs(table: RankTable) -> list[Any]:
    return [pair for view in table.views() for peer in view.peers for pair in peer.pairs]


def test_every_boundary_of_segments_is_paired() -> None:
    """Rank N of one segment and N + 1 of the next are peers in both directions, whatever the replicas."""
    made = plan("a", "b", "c", "|", "c", "|", "a", "b")
    links = {(one.source, one.target) for one in rank_links(made)}
    ends = [rank for rank in range(len(made.ranks) - 1) if made.rank_clusters[rank] != made.rank_clusters[rank + 1]]
    assert len(ends) == 2
    assert all({(end, end + 1), (end + 1, end)} <= links for end in ends)


def test_a_running_job_takes_a_replaced_worker_in() -> None:
    """The rank map of all sites changes in one entry; a worker of another site or rank changes nothing."""
    pool = started("a", "b", "b")
    before = pool.coordinator.state.jobs["j"].rank_map
    assert before is not None
    moved = WorkerAddress(rank=1, cluster="b", host="h", port=4242, device="g/0/3")
    kept = [one for one in before.workers if one.rank == 2]
    foreign = WorkerAddress(rank=0, cluster="b", host="h", port=1)
    unknown = WorkerAddress(rank=9, cluster="b", host="h", port=1)
    pool.report("b", ObservedPart(job="j", attempt=1, state="running", workers=(moved, *kept, foreign, unknown)))
    for site in "ab":
        (order,) = pool.coordinator.orders(site)
        assert order.rank_map is not None
        assert order.rank_map.workers == (before.workers[0], moved, before.workers[2])
    assert pool.state("j") == "running"
    rows = job_ranks(pool.coordinator.state, pool.coordinator.state.jobs["j"])
    assert [(row.rank, row.cluster, row.node, row.port) for row in rows] == [
        (0, "a", "", before.workers[0].port),
        (1, "b", "g/0", 4242),
        (2, "b", "", before.workers[2].port),
    ]


def test_a_job_without_a_plan_has_no_ranks() -> None:
    """The command says what is missing."""
    pool = Driver("a")
    pool.submit("j")
    with pytest.raises(ConflictError, match="no plan"):
        job_ranks(pool.coordinator.state, pool.coordinator.state.jobs["j"])


@pytest.mark.parametrize(
    ("nics", "words"),
    [
        ([{"name": "eth0", "addresses": ["10.0.0.1"]}], "1 addresses for 2 nodes"),
        ([{"name": "eth0", "addresses": ["10.0.0.1", "10.0.0.1"]}], "appears twice"),
        ([{"name": "eth0", "addresses": ["10.0.0.1", "10.0.0.256"]}], "'10.0.0.256' is not an IP address"),
        ([{"name": "eth 0", "addresses": ["10.0.0.1", "10.0.0.2"]}], "name"),
        (
            [{"name": "eth0", "addresses": ["::1", "::2"]}, {"name": "eth0", "addresses": ["::3", "::4"]}],
            "'eth0' appears",
        ),
        ([{"name": "e", "addresses": ["::1", "::2"]}, {"name": "f", "addresses": ["0::1", "::4"]}], "'::1' appears"),
        ([{"name": f"e{n}", "addresses": [f"::{n}:1", f"::{n}:2"]} for n in range(65)], "at most 64"),
    ],
)
def test_wrong_network_cards_are_refused(nics: list[dict[str, Any]], words: str) -> None:
    """A pool file states each card once, with one address for each node and none twice."""
    with pytest.raises(ValidationError, match=words):
        NodeGroup.model_validate({"chip": "H20", "nodes": 2, "chips_per_node": 8, "nics": nics})
