"""A topology that the agent finds: in Slurm's words, in labels of Kubernetes, in NVLinks; pool.yaml wins."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.agent.adapters.kubernetes.label_topology import label_topology
from isthmus.agent.adapters.local_adapter import LocalAdapter
from isthmus.agent.adapters.nvidia_links import MAX_CARDS, nvidia_links
from isthmus.agent.adapters.slurm.slurm_topology import slurm_topology
from isthmus.agent.service.use_found_topology import use_found_topology
from isthmus.core.errors import InputError
from isthmus.core.pool import Cluster, NodeGroup
from isthmus.core.pool_parts.group_topology import CardLink, GroupTopology, TopologyDomain
from isthmus.core.pool_parts.scheduler_topology import scheduler_topology

NODES = tuple(f"a{number}" for number in range(1, 7))
SHOWN = """\
SwitchName=s0 Level=0 LinkSpeed=1 Nodes=a[1-2]
SwitchName=s1 Level=0 LinkSpeed=1 Nodes=a[3-4],x9
SwitchName=s2 Level=0 LinkSpeed=1 Nodes=b[1-9]
SwitchName=s3 Level=1 LinkSpeed=1 Nodes=a[1-4] Switches=s[0-1]
SwitchName=s4 Level=2 LinkSpeed=1 Nodes=a[1-4],b[1-9] Switches=s[2-3]
"""
NVLINKS = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV12\tSYS\tSYS\tPXB\t0-31\t0
GPU1\tNV12\t X \tSYS\tSYS\tPXB\t0-31\t0
GPU2\tSYS\tSYS\t X \tNV4\tSYS\t32-63\t1
GPU3\tSYS\tSYS\tNV4\t X \tSYS\t32-63\t1
NIC0\tPXB\tPXB\tSYS\tSYS\t X \t\t

Legend:
  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def domain(name: str, *nodes: str) -> TopologyDomain:
    return TopologyDomain(name=name, nodes=nodes)


def test_switches_of_slurm_are_tors_and_those_above_them_spines() -> None:
    """Nodes of other node groups are left out, and so is what is above the spines."""
    found = slurm_topology(SHOWN, NODES)
    assert found == GroupTopology(
        tors=(domain("s0", "a1", "a2"), domain("s1", "a3", "a4")), spines=(domain("s3", "a1", "a2", "a3", "a4"),)
    )
    assert slurm_topology("# none\n\n", NODES) is None
    assert slurm_topology(SHOWN, ("c1",)) is None
    assert slurm_topology("SwitchName=a Switches=b\nSwitchName=b Switches=a", NODES) is None, "above all, if anything"


@pytest.mark.parametrize("kind", ["slurm-tree", "slurm-block"])
def test_what_isthmus_wrote_for_slurm_is_read_back(kind: str) -> None:
    """Super-nodes, ToRs and spines keep their level and name; blocks are super-nodes."""
    tree = GroupTopology(
        super_nodes=(domain("s0", "a1", "a2"), domain("s1", "a3", "a4")), tors=(domain("t0", "a1", "a2", "a3", "a4"),),
        spines=(domain("p0", "a1", "a2", "a3", "a4"),),
    )  # fmt: skip
    text = scheduler_topology("h20", NODES, tree, kind)  # type: ignore[arg-type]
    found = slurm_topology(text, NODES)
    assert found is not None
    assert found.super_nodes == tree.super_nodes
    assert (found.tors, found.spines) == ((tree.tors, tree.spines) if kind == "slurm-tree" else ((), ()))


def test_labels_of_nodes_name_their_domains() -> None:
    """Of each level our label counts before others, and nodes without it stand alone."""
    labels: dict[str, dict[str, str]] = {
        "n1": {"isthmus.dev/tor": "t0", "topology.kubernetes.io/zone": "z1", "nvidia.com/gpu.clique": "c.1"},
        "n2": {"isthmus.dev/tor": "t0", "topology.kubernetes.io/zone": "z1", "nvidia.com/gpu.clique": "c.1"},
        "n3": {"network.topology.nvidia.com/leaf": "other", "topology.kubernetes.io/zone": "z2"},
    }
    assert label_topology(labels) == GroupTopology(
        super_nodes=(domain("c.1", "n1", "n2"),), tors=(domain("t0", "n1", "n2"),),
        spines=(domain("z1", "n1", "n2"), domain("z2", "n3")),
    )  # fmt: skip
    assert label_topology({"n1": {"kubernetes.io/hostname": "n1"}}) is None


def test_cards_that_nvlink_joins_are_linked() -> None:
    """Twelve links of 200 Gbit/s between the first two, four between the others; no table means no links."""
    assert nvidia_links(NVLINKS) == (CardLink(cards=(0, 1), gbps=2400), CardLink(cards=(2, 3), gbps=800))
    assert nvidia_links("No devices were found\n") == ()
    whole = "\n".join(f"GPU{row}\t" + "\t".join("X" if at == row else "NV18" for at in range(8)) for row in range(8))
    assert nvidia_links(whole) == (CardLink(cards=tuple(range(8)), gbps=3600),)


def local(folder: Path, text: str = NVLINKS, cards: int = 4, topology: GroupTopology | None = None) -> Cluster:
    """What becomes of a cluster that is one machine of `cards` cards."""
    group = NodeGroup(name="g", chip="H20", nodes=1, chips_per_node=cards, topology=topology)
    cluster = Cluster(name="c", owner="c", node_groups=(group,))
    return use_found_topology(cluster, LocalAdapter(cluster, folder, read_links=lambda: text))


def test_what_pool_yaml_states_wins_over_what_is_found(tmp_path: Path) -> None:
    """Also `topology: {}`, which says that no more is known; without one the found topology is as stated there."""
    found = local(tmp_path).node_groups[0].topology
    assert found == GroupTopology(card_links=nvidia_links(NVLINKS))
    assert local(tmp_path, topology=GroupTopology()).node_groups[0].topology == GroupTopology()
    assert local(tmp_path, text="").node_groups[0].topology is None


def test_what_was_found_of_other_cards_is_not_used_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The agent starts all the same."""
    with caplog.at_level(logging.WARNING):
        assert local(tmp_path, cards=2).node_groups[0].topology is None
    assert "parts are placed without a topology" in caplog.text
    assert "pool.yaml" in caplog.text


@pytest.mark.attack
@pytest.mark.parametrize(
    "text",
    [
        "SwitchName=tor-a Switches=tor-a\nSwitchName=b Nodes=a1",
        "SwitchName=tor-a Switches=spine-b\nSwitchName=spine-b Switches=tor-a",
        "SwitchName=a Nodes=a[1-999999999]",
        "SwitchName=a Nodes=a[x]",
        "SwitchName=a Nodes=" + ",".join(f"a[{at}-{at}9999]" for at in range(1, 30)),
        "SwitchName=a Nodes=a1\nSwitchName=b Nodes=a1",
        "SwitchName=../../x Nodes=a1",
        "SwitchName=" + "a" * 100 + " Nodes=a1",
        "\n".join(f"SwitchName=s{at} Nodes=a1" for at in range(20_001)),
    ],
)
def test_a_hostile_topology_of_slurm_is_refused_with_its_reason(text: str) -> None:
    """Cycles, millions of nodes, names that are none, a node in two switches: no hang, no memory, no traceback."""
    with pytest.raises(InputError):
        slurm_topology(text, NODES)


@pytest.mark.attack
@given(st.text(max_size=300), st.lists(st.sampled_from(SHOWN.split("\n") + NVLINKS.split("\n")), max_size=12))
def test_any_text_is_a_topology_or_is_refused(text: str, lines: list[str]) -> None:
    """Known lines in any order, with anything between them."""
    mixed = "\n".join([*lines[::2], text, *lines[1::2]])
    try:
        found = slurm_topology(mixed, NODES)
    except InputError:
        found = None
    assert found is None or found.num_nodes() <= len(NODES)
    links = nvidia_links(mixed)
    cards = [card for link in links for card in link.cards]
    assert len(cards) == len(set(cards))
    assert all(card < MAX_CARDS for card in cards)


@pytest.mark.attack
@given(st.dictionaries(st.sampled_from(NODES), st.dictionaries(
    st.sampled_from(["isthmus.dev/tor", "isthmus.dev/spine", "nvidia.com/gpu.clique"]), st.text(max_size=70),
)))  # fmt: skip
def test_any_labels_are_a_topology_or_are_refused(labels: Mapping[str, Mapping[str, str]]) -> None:
    """Values that name nothing are left out, domains that form no tree are refused."""
    try:
        found = label_topology(labels)
    except InputError:
        return
    assert found is None or found.num_nodes() <= len(labels)
