"""A topology in the words of Slurm and Kubernetes."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.errors import InputError
from isthmus.core.pool_parts.group_topology import GroupTopology, TopologyDomain
from isthmus.core.pool_parts.scheduler_topology import scheduler_topology

NODES = tuple(f"a{number}" for number in range(1, 7))


def domain(name: str, *nodes: str) -> TopologyDomain:
    return TopologyDomain(name=name, nodes=nodes)


TREE = GroupTopology(
    super_nodes=(domain("s0", "a[1-2]"), domain("s1", "a[3-4]")),
    tors=(domain("t0", "a[1-4]"),),
    spines=(domain("p0", "a[1-5]"),),
)


def test_slurm_gets_a_switch_for_each_domain_and_one_over_all() -> None:
    """Node a5 is in the spine alone, a6 in nothing: each has a leaf switch of its own."""
    assert scheduler_topology("h20", NODES, TREE, "slurm-tree").splitlines() == [
        "SwitchName=super-node-s0 Nodes=a1,a2",
        "SwitchName=super-node-s1 Nodes=a3,a4",
        "SwitchName=tor-t0 Switches=super-node-s0,super-node-s1",
        "SwitchName=spine-p0-nodes Nodes=a5",
        "SwitchName=spine-p0 Switches=tor-t0,spine-p0-nodes",
        "SwitchName=h20-nodes Nodes=a6",
        "SwitchName=h20 Switches=spine-p0,h20-nodes",
    ]


def test_slurms_blocks_are_super_nodes() -> None:
    """Their size is that of the smallest."""
    text = "BlockName=s0 Nodes=a1,a2\nBlockName=s1 Nodes=a3,a4\nBlockSizes=2\n"
    assert scheduler_topology("h20", NODES, TREE, "slurm-block") == text


def test_kubernetes_gets_labels_and_a_topology_from_the_widest_level_on() -> None:
    """Kueue reads the levels in this order; the node itself is the last."""
    lines = scheduler_topology("H20", NODES, TREE, "kubernetes").splitlines()
    assert lines[0] == (
        "kubectl label --overwrite node a1 isthmus.dev/spine=p0 isthmus.dev/tor=t0 isthmus.dev/super-node=s0"
    )
    assert sum(line.startswith("kubectl label") for line in lines) == 5
    levels = [line.partition("nodeLabel: ")[2].rstrip("}") for line in lines if "nodeLabel" in line]
    assert levels == ["isthmus.dev/spine", "isthmus.dev/tor", "isthmus.dev/super-node", "kubernetes.io/hostname"]


def test_what_a_scheduler_cannot_express_is_refused() -> None:
    """Without domains there is nothing to say, and without super-nodes no block."""
    with pytest.raises(InputError, match="names no super-node"):
        scheduler_topology("h20", NODES, GroupTopology(), "slurm-tree")
    with pytest.raises(InputError, match="no super-nodes"):
        scheduler_topology("h20", NODES, GroupTopology(tors=(domain("t0", "a1"),)), "slurm-block")


@given(st.integers(1, 30), st.integers(1, 4), st.integers(1, 4), st.integers(0, 3))
def test_every_node_is_in_one_leaf_and_one_switch_joins_all(num: int, size: int, factor: int, absent: int) -> None:
    """For any tree, also one that names nodes that are not there: no node twice, no switch unjoined, none unknown."""
    names = [f"a{number}" for number in range(num)]
    tors = tuple(domain(f"t{at}", *names[at : at + size]) for at in range(0, num, size))
    wide = size * factor
    spines = tuple(domain(f"p{at}", *names[at : at + wide]) for at in range(0, num, wide))
    nodes = names[: max(1, num - absent)]
    text = scheduler_topology("g", nodes, GroupTopology(tors=tors, spines=spines), "slurm-tree")
    leaves = [node for found in re.findall(r" Nodes=(\S+)", text) for node in found.split(",")]
    assert sorted(leaves) == sorted(nodes)
    switches = re.findall(r"SwitchName=(\S+)", text)
    joined = [one for found in re.findall(r" Switches=(\S+)", text) for one in found.split(",")]
    assert len(set(switches)) == len(switches)
    assert len(set(switches) - set(joined)) == 1
    assert set(joined) <= set(switches)
    assert len(set(joined)) == len(joined)
