"""`check_cards`: whether a scheduler has the cards that `pool.yaml` says, for `isthmus site check`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from isthmus.agent.adapters.scheduler_adapter import CardNode, SchedulerCheck
from isthmus.core.pool import Cluster

_CARD = re.compile(r"(.*/)?(.*[gnxt]pu|mlu|dcu|gcu|ascend.*|.*accelerator.*)", re.IGNORECASE)


def is_card(resource: str) -> bool:
    """Return whether a resource of a scheduler, without its type, is a card, by the names that are usual."""
    return _CARD.fullmatch(resource) is not None


def check_cards(
    cluster: Cluster, nodes: Sequence[CardNode], hint: Callable[[str], str], away_hint: str
) -> Iterator[SchedulerCheck]:
    """Yield a finding for each node group, and for its nodes that are not in use.

    `hint` returns what to do about wrong numbers in a node group; `away_hint` is about nodes that are away.
    """
    for group in cluster.node_groups:
        there = [node for node in nodes if node.node_group == group.name]
        have = sum(len(node.cards) for node in there)
        same = len(there) == group.nodes and all(len(node.cards) == group.chips_per_node for node in there)
        yield SchedulerCheck(
            check="cards", ok=same,
            detail=f"node group '{group.name}': {have} cards on {len(there)} nodes, {group.num_chips} on {group.nodes} "
            "in pool.yaml",
            hint="" if same else hint(group.name),
            file_path=() if same else ("node_groups", group.name),
        )  # fmt: skip
        away = [node.name for node in there if not node.usable]
        if away:
            yield SchedulerCheck(check="nodes", ok=False, detail=f"not in use: {', '.join(away)}", hint=away_hint)
