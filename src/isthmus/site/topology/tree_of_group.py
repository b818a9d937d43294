"""`tree_of_group` and `node_names`: a node group's nodes, and their tree, from its topology in `pool.yaml`."""

from __future__ import annotations

from collections.abc import Mapping

from isthmus.core.pool import Cluster, NodeGroup
from isthmus.site.topology.site_tree import SUPER_NODE, CardLinkGroup, SiteTree


def tree_of_group(group: NodeGroup, cards: Mapping[str, int] | None = None) -> SiteTree:
    """Return the tree of `group`; `cards` are the cards of each node that there is (default: all nodes, numbered).

    Without super-nodes in its topology, domains of `chips_per_domain` chips follow each other in node order.
    """
    if cards is None:
        cards = {str(node): group.chips_per_node for node in range(group.nodes)}
    levels: dict[str, Mapping[str, tuple[str, ...]]] = {}
    topology = group.topology
    if group.chips_per_domain and (topology is None or not topology.super_nodes):
        size, nodes = group.chips_per_domain // group.chips_per_node, tuple(cards)
        domains = {f"domain{at // size}": nodes[at : at + size] for at in range(0, len(nodes), size)}
        if topology is None or all(_is_nested(domains, stated) for stated in topology.levels().values()):
            levels[SUPER_NODE] = domains
    levels |= {} if topology is None else {str(level): domains for level, domains in topology.levels().items()}
    links = () if topology is None else topology.card_links
    return SiteTree.from_groups(
        cards, levels, [CardLinkGroup(cards=frozenset(link.cards), gbps=link.gbps) for link in links]
    )


def _is_nested(domains: Mapping[str, tuple[str, ...]], wider: Mapping[str, tuple[str, ...]]) -> bool:
    """Return whether each of `domains` lies in one of `wider`, or in none."""
    of = {node: name for name, nodes in wider.items() for node in nodes}
    return all(len({of.get(node) for node in nodes}) == 1 for nodes in domains.values())


def node_names(cluster: Cluster, group: str) -> tuple[str, ...]:
    """Return the names of a node group's nodes: those of its topology, and numbers for nodes that it does not name."""
    found = cluster.group(group)
    levels = {} if found.topology is None else found.topology.levels()
    named = list(dict.fromkeys(node for domains in levels.values() for nodes in domains.values() for node in nodes))
    others = (str(node) for node in range(found.nodes) if str(node) not in named)
    return tuple([*named, *others][: found.nodes])
