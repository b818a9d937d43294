"""The shares of a sum: which elements each rank of a cluster leads, and the regions that clusters exchange."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from isthmus.strategies import Region


def cut_chunks(num_elements: int, chunk_elements: int, clusters: Sequence[str]) -> list[tuple[int, int]]:
    """Return (start, stop) of the chunks of `num_elements`, which every cluster cuts into equal shares.

    Only the last chunk may leave a rest. `clusters[r]` is the cluster of rank `r`.
    """
    unit = math.lcm(*Counter(clusters).values())
    step = max(chunk_elements // unit, 1) * unit
    return [(start, min(start + step, num_elements)) for start in range(0, num_elements, step)]


def share(num_elements: int, size: int, place: int) -> tuple[int, int]:
    """Return (start, stop) of the elements that rank `place` of the `size` of its cluster leads."""
    length = -(-num_elements // size)
    return min(place * length, num_elements), min((place + 1) * length, num_elements)


def share_regions(num_elements: int, clusters: Sequence[str]) -> tuple[Region, ...]:
    """Return the regions of a chunk: each summed by those ranks, one in each cluster, that lead its elements."""
    near: dict[str, list[int]] = {}
    for rank, cluster in enumerate(clusters):
        near.setdefault(cluster, []).append(rank)
    led = [
        (*share(num_elements, len(ranks), place), rank) for ranks in near.values() for place, rank in enumerate(ranks)
    ]
    ends = sorted({0, num_elements, *(stop for _, stop, _ in led)})
    found = []
    for start, stop in pairwise(ends):
        holders = tuple(sorted(rank for first, last, rank in led if first <= start and stop <= last))
        found.append(Region(start, stop, holders, holders))
    return tuple(found)
