"""`number_stages`: the first rank of each stage, so that each cluster has a contiguous segment of ranks."""

from __future__ import annotations

from collections.abc import Sequence


def number_stages(places: Sequence[tuple[str, str]], sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the first rank of each stage, given its (cluster, node group) and its number of ranks.

    Clusters follow one another in the order of their first stage, node groups likewise within a cluster, and stages
    keep their order within a node group. So the ranks of a cluster, of a node group and of a stage are each contiguous,
    and a site that hands out devices in rank order keeps the ranks of a node together.
    """
    clusters = {cluster: number for number, cluster in enumerate(dict.fromkeys(cluster for cluster, _ in places))}
    groups = {place: number for number, place in enumerate(dict.fromkeys(places))}
    firsts, end = [0] * len(places), 0
    for stage in sorted(range(len(places)), key=lambda at: (clusters[places[at][0]], groups[places[at]], at)):
        firsts[stage], end = end, end + sizes[stage]
    return tuple(firsts)
