"""`topology` of a node group in `pool.yaml`: what it says, and what is refused with its line and its reason."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from pydantic import ValidationError

from isthmus.core.errors import FileError
from isthmus.core.files.user_files import load_pool
from isthmus.core.pool_parts.group_topology import GroupTopology

HEAD = """\
clusters:
  - name: east
    owner: a
    node_groups:
      - chip: H20
        nodes: 16
        chips_per_node: 8
        topology:
"""


def read(tmp_path: Path, topology: str, tail: str = "") -> GroupTopology:
    """Return the topology of a pool file, given below `topology:`."""
    file = tmp_path / "pool.yaml"
    file.write_text(HEAD + textwrap.indent(topology, 10 * " ") + tail)
    found = load_pool(file).clusters[0].node_groups[0].topology
    assert found is not None
    return found


def test_levels_are_ordered_by_what_contains_what(tmp_path: Path) -> None:
    """Super-nodes inside ToRs come first, super-nodes of several ToRs after them; spines are widest."""
    inside = read(
        tmp_path,
        "super_nodes: [{name: s0, nodes: [0-3]}]\ntors: [{name: t0, nodes: [0-7]}, "
        "{name: t1, nodes: [8, 9-15]}]\nspines: [{name: p0, nodes: [0-15]}]\n",
    )
    assert list(inside.levels()) == ["super-node", "ToR", "spine"]
    assert inside.levels()["ToR"]["t1"] == tuple(map(str, range(8, 16)))
    around = read(
        tmp_path,
        "super_nodes: [{name: s0, nodes: [0-7]}]\ntors: [{name: t0, nodes: [0-3]}, {name: t1, nodes: [4-7]}]\n",
    )
    assert list(around.levels()) == ["ToR", "super-node"]


def test_names_with_numbers_keep_their_zeros() -> None:
    """`a[08-11]` is four nodes with two digits each."""
    made = GroupTopology.model_validate({"tors": [{"name": "t", "nodes": ["a[08-11]", "b"]}]})
    assert made.levels() == {"ToR": {"t": ("a08", "a09", "a10", "a11", "b")}}


DOUBLE = """\
tors:
  - {name: t0, nodes: [0-7]}
  - name: t1
    nodes:
      - 8-9
      - 7-12
"""
CROSSED = "tors:\n- {name: t, nodes: [0-3]}\n- {name: u, nodes: [4-7]}\nsuper_nodes:\n- {name: s, nodes: [2-5]}\n"


@pytest.mark.parametrize(
    ("topology", "line", "field", "reason"),
    [
        (DOUBLE, 14, "groups[0].topology.tors[1].nodes[1]", "'7' is in ToR 't0' and ToR 't1'; a node is in one ToR"),
        ("tors:\n- {name: t, nodes: [0-3, 3-4]}\n", 10, "tors[0].nodes[1]", "node '3' is twice in ToR 't'"),
        ("tors:\n- {name: t, nodes: [0]}\n- {name: t, nodes: [1]}\n", 11, "tors[1].name", "ToR 't' appears twice"),
        (CROSSED, 10, "tors[0].nodes", "the nodes of ToR 't' are in more than one super-node, or some are in none"),
        (
            "tors:\n- {name: t, nodes: [0-3]}\nspines:\n- {name: s, nodes: [0-2]}\n",
            10,
            "tors[0].nodes",
            "the nodes of ToR 't' are in more than one spine, or some are in none",
        ),
        ("tors:\n- {name: t, nodes: [0-99]}\n", 8, "topology", "names 100 nodes, the group has 16"),
        ("tors:\n- {name: t, nodes: [7-3]}\n", 10, "nodes[0]", "'7-3' ends before it begins"),
        ("card_links:\n- {cards: [0, 8], gbps: 4}\n", 10, "links[0].cards", "card 8 of a node with 8 chips, from 0"),
        ("tors:\n- {name: t, nodes: ['../x']}\n", 10, "nodes[0]", "pattern"),
        ("tors:\n- {name: t, nodes: ['a[0-999999]']}\n", 10, "nodes[0]", "more than 100000 nodes"),
    ],
)
def test_what_is_no_tree_is_refused_with_line_and_reason(
    tmp_path: Path, topology: str, line: int, field: str, reason: str
) -> None:
    """The message names the field that is wrong, not the node group around it."""
    with pytest.raises(FileError) as caught:
        read(tmp_path, topology)
    assert caught.value.line == line
    assert str(caught.value.field).endswith(field)
    assert reason in str(caught.value)


def test_a_super_node_holds_a_domain_of_the_planner(tmp_path: Path) -> None:
    """The planner makes groups of `chips_per_domain` chips, which must fit a super-node."""
    with pytest.raises(FileError, match="super-node 's' has 16 chips, chips_per_domain is 32"):
        read(tmp_path, "super_nodes: [{name: s, nodes: [0-1]}]\n", "        chips_per_domain: 32\n")


def test_a_report_of_an_agent_is_checked_too() -> None:
    """Topologies also arrive in messages; there the error is one of validation."""
    with pytest.raises(ValidationError, match="node 'a' is in ToR 't' and ToR 'u'"):
        GroupTopology.model_validate({"tors": [{"name": "t", "nodes": ["a"]}, {"name": "u", "nodes": ["a"]}]})
