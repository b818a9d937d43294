"""`plan_steps`: the steps of any collective: inside a cluster first, between clusters by as few bytes as possible.

Source: section 2.3.3 of the report on heterogeneous training (same-kind, cross-kind, same-kind).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from isthmus.strategies.step import Region, Step

FAN_OUT = 4
"""Ranks from which a rank of a tree inside a cluster receives."""


def plan_steps(
    regions: Sequence[Region],
    cluster_of: Sequence[str],
    piece_elements: int,
    *,
    direct: bool = False,
    first_piece: int = 0,
    senders: frozenset[int] = frozenset(),
) -> tuple[Step, ...]:
    """Return the steps that compute `regions`, which do not overlap, sorted by round.

    `cluster_of[r]` is the cluster of rank `r`. Regions are cut into pieces of at most `piece_elements`. For each
    piece every cluster has a leader, and leaders vary between pieces, so that all ranks of a cluster send:

    1. the contributors of a cluster send to its leader, which sums;
    2. leaders send their sums to the leader of the piece's home cluster, which sums; homes vary between pieces.
       Two clusters that both contribute and receive exchange their sums instead, and both sum;
    3. the home's leader sends the total to the leaders of the other receiving clusters;
    4. leaders send the total to the receivers of their cluster.

    So of C clusters that reduce n bytes everywhere, each sends 2 (C - 1) / C n bytes to others; each byte that is
    only moved enters a cluster once. With `direct`, which is for few bytes, C > 2 clusters exchange as two do: one
    message delay less, for C - 1 times n bytes. Inside a cluster sums and totals then take a tree below the leader, so
    a rank has `FAN_OUT` + 1 neighbours there, however large the cluster. Every receiver gets identical bits.

    Leaders and homes follow from the numbers of the pieces, which begin with `first_piece`: regions that are summed
    in parts share the work as those of one sum do. Only `senders` lead, where a cluster has one that can: ranks behind
    one network card that several of them would crowd.
    """
    depth = _depth(max(map(len, _by_cluster(range(len(cluster_of)), cluster_of).values()), default=1)) if direct else 1
    steps = [
        step
        for number, piece in enumerate(_cut(regions, piece_elements, len(set(cluster_of))), first_piece)
        for step in _piece_steps(piece, number, cluster_of, depth, senders, direct=direct)
    ]
    return tuple(sorted(steps, key=lambda step: (step.round, step.start)))


def _cut(regions: Sequence[Region], piece_elements: int, num_clusters: int) -> Iterator[Region]:
    """Yield `regions` in pieces of almost equal size, of at most `piece_elements`.

    Several pieces are a multiple of `num_clusters`, so that each is the home of equally many.
    """
    for one in regions:
        num = -(-(one.stop - one.start) // piece_elements)
        if num > 1:
            num = min(-(-num // num_clusters) * num_clusters, one.stop - one.start)
        ends = [one.start + (one.stop - one.start) * place // num for place in range(num + 1)]
        for start, stop in pairwise(ends):
            yield Region(start, stop, one.contributors, one.receivers)


def _piece_steps(
    piece: Region, number: int, cluster_of: Sequence[str], depth: int, senders: frozenset[int], *, direct: bool
) -> Iterator[Step]:
    """Yield the steps of `piece`: sums inside clusters take `depth` rounds, and then exchange and copies follow."""
    exchange, back, fan_out = depth, depth + 1, FAN_OUT if direct else len(cluster_of)
    giving, taking = _by_cluster(piece.contributors, cluster_of), _by_cluster(piece.receivers, cluster_of)
    leaders = {
        cluster: _leader(giving.get(cluster, ()), taking.get(cluster, ()), number, senders)
        for cluster in {*giving, *taking}
    }

    sums = len(piece.contributors) > 1

    def send(round_number: int, sender: int, receiver: int, *, adds: bool) -> Step:
        return Step(round_number, sender, receiver, piece.start, piece.stop, adds)

    for cluster, ranks in giving.items():
        leader = leaders[cluster]
        for parent, rank, level in _tree_links(leader, ranks, fan_out):
            yield send(depth - level, rank, parent, adds=sums)
    if len(giving) > 1 and set(giving) == set(taking) and (direct or len(giving) == 2):
        yield from (send(exchange, leaders[a], leaders[b], adds=True) for a in giving for b in giving if a != b)
    else:
        home = _home(giving, taking, number)
        yield from (send(exchange, leaders[a], leaders[home], adds=sums) for a in giving if a != home)
        yield from (send(back, leaders[home], leaders[b], adds=False) for b in taking if b != home)
    for cluster, ranks in taking.items():
        leader = leaders[cluster]
        for parent, rank, level in _tree_links(leader, ranks, fan_out):
            yield send(back + level, parent, rank, adds=False)


def _tree_links(leader: int, ranks: Sequence[int], fan_out: int) -> Iterator[tuple[int, int, int]]:
    """Yield (parent, child, level of the child from 1) of the tree of `ranks` below `leader`."""
    order = [leader, *(rank for rank in ranks if rank != leader)]
    level, level_end = 1, fan_out
    for place in range(1, len(order)):
        if place > level_end:
            level, level_end = level + 1, fan_out * (level_end + 1)
        yield order[(place - 1) // fan_out], order[place], level


def _depth(num_ranks: int) -> int:
    """Return the levels below the root of a tree of `num_ranks` and a root that only receives, at least 1."""
    depth, held = 1, 1 + FAN_OUT
    while held < num_ranks + 1:
        depth, held = depth + 1, held * FAN_OUT + 1
    return depth


def _by_cluster(ranks: Sequence[int], cluster_of: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return `ranks` by cluster, in the order of the clusters' first ranks."""
    found: dict[str, tuple[int, ...]] = {}
    for rank in ranks:
        found[cluster_of[rank]] = (*found.get(cluster_of[rank], ()), rank)
    return found


def _leader(givers: Sequence[int], takers: Sequence[int], number: int, senders: frozenset[int]) -> int:
    """Return the leader of a cluster for piece `number`: a rank that does both, else a receiver; a sender, if any."""
    receiving = frozenset(takers)
    ranks = [rank for rank in givers if rank in receiving] or takers or givers
    ranks = [rank for rank in ranks if rank in senders] or ranks
    return ranks[number % len(ranks)]


def _home(giving: dict[str, tuple[int, ...]], taking: dict[str, tuple[int, ...]], number: int) -> str:
    """Return the cluster that sums piece `number`: one that contributes and receives, if there is one."""
    if len(giving) == 1:
        return next(iter(giving))
    clusters = [cluster for cluster in giving if cluster in taking] or list(taking)
    return clusters[number % len(clusters)]
