"""`rank_tree`: the place of a rank in the tree over which all ranks of a run meet, end and report losses."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

FAN_OUT = 3
"""Children of a rank in its cluster, and of a cluster among clusters: 512 ranks of a cluster are 6 links deep."""


@dataclass(frozen=True)
class TreePlace:
    """One rank's neighbours in the tree. A parent has a lower rank than its children."""

    parent: int | None
    """None for the root, rank 0."""
    children: tuple[int, ...]

    @property
    def neighbours(self) -> tuple[int, ...]:
        """Parent and children, ascending."""
        return self.children if self.parent is None else (self.parent, *self.children)


def rank_tree(clusters: Sequence[Hashable], rank: int) -> TreePlace:
    """Return the place of `rank`; `clusters[r]` is the cluster of rank `r`.

    The lowest rank of a cluster leads it. Leaders form a tree, and so do the ranks of a cluster below their leader. So
    C clusters are joined by C - 1 links, and a rank has at most 2 `FAN_OUT` + 1 neighbours.
    """
    members: dict[Hashable, list[int]] = {}
    for one, cluster in enumerate(clusters):
        members.setdefault(cluster, []).append(one)
    own = members[clusters[rank]]
    parent, children = heap_place(own, own.index(rank))
    if rank == own[0]:
        leaders = [ranks[0] for ranks in members.values()]
        parent, led = heap_place(leaders, leaders.index(rank))
        children += led
    return TreePlace(parent, tuple(sorted(children)))


def heap_place(ranks: Sequence[int], place: int) -> tuple[int | None, list[int]]:
    """Return parent and children of `ranks[place]` in a heap of `FAN_OUT` children each.

    For all ranks of a cluster, these are the neighbours that the tree of all ranks gives it inside the cluster.
    """
    first = FAN_OUT * place + 1
    return None if place == 0 else ranks[(place - 1) // FAN_OUT], list(ranks[first : first + FAN_OUT])
