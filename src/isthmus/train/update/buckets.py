"""`deal_buckets`: cut the parameters of all ranks into segments, and say who owns, adds up and keeps each.

A rank says which rows of which parameter it holds (`Held`), by the names and rows of the whole model. Where
ranks hold different rows of one parameter, segments are cut at all their ends, so that all owners of a
segment hold all of it: replicas may be cut into other stages and other slices. Segments with the same owners
fill buckets, the unit of a message. The result depends on what is held alone: all ranks deal alike.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

BUCKET_ELEMENTS = 1 << 20
"""Numbers in a bucket: 4 MiB of fp32."""

ALIGNED_ELEMENTS = 16
"""Segments begin at multiples of so many numbers, so that vector units treat each as part of the whole.

A share that begins elsewhere (a short bias among several ranks) is updated to the same numbers, to rounding.
"""


@dataclass(frozen=True, kw_only=True)
class Held:
    """Rows `[start, stop)` along dimension `dim` of parameter `name`, held from row `at` of a rank's tensor.

    A row is `row_elements` numbers. `adds` is false for a copy whose gradient another rank adds in full.
    """

    name: str
    start: int
    stop: int
    row_elements: int
    dim: int = 0
    at: int = 0
    adds: bool = True

    @classmethod
    def whole(cls, name: str, shape: Sequence[int]) -> Held:
        """Return all of a parameter of `shape`."""
        return cls(name=name, start=0, stop=shape[0], row_elements=math.prod(shape[1:]))


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Rows `[start, stop)` along `dim` of parameter `name` of the whole model."""

    name: str
    dim: int
    start: int
    stop: int
    num_elements: int


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Segments with the same owners.

    `owners` are ranks in order, by cluster; `adders` those whose gradients are summed; `leaders` one owner
    per cluster, who sums there, in the order of `owners`.
    """

    segments: tuple[Segment, ...]
    owners: tuple[tuple[int, ...], ...]
    adders: frozenset[int]
    leaders: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Numbers in the bucket."""
        return sum(one.num_elements for one in self.segments)

    @property
    def is_shared(self) -> bool:
        """Whether more than one rank owns it."""
        return len(self.owners) > 1 or len(self.owners[0]) > 1


def deal_buckets(
    held: Sequence[Sequence[Held]], clusters: Sequence[str], bucket_elements: int = BUCKET_ELEMENTS
) -> tuple[Bucket, ...]:
    """Return all buckets of a run, given what each rank holds and its cluster.

    A bucket has at most `bucket_elements` numbers, or one segment that is as short as rows and alignment
    allow. The last parameters come first: their gradients are the first to be there. In every cluster leaders
    are dealt so that each rank leads about as many numbers.
    """
    led = [0] * len(held)
    found = []
    for (owners, adders), segments in _grouped(held, bucket_elements):
        by_cluster: dict[str, list[int]] = {}
        for rank in owners:
            by_cluster.setdefault(clusters[rank], []).append(rank)
        leaders = tuple(min(near, key=lambda rank: (led[rank], rank)) for near in by_cluster.values())
        bucket = Bucket(
            segments=tuple(segments),
            owners=tuple(map(tuple, by_cluster.values())),
            adders=frozenset(adders),
            leaders=leaders,
        )
        for rank in leaders:
            led[rank] += bucket.num_elements
        found.append(bucket)
    return tuple(found)


Sharers = tuple[tuple[int, ...], tuple[int, ...]]
"""Owners and adders of a segment, in the order of ranks."""


def _grouped(held: Sequence[Sequence[Held]], bucket_elements: int) -> Iterator[tuple[Sharers, list[Segment]]]:
    """Yield runs of segments with the same sharers that together fill a bucket."""
    group: list[Segment] = []
    of_group: Sharers = ((), ())
    for sharers, dim, start, stop, row, name in _spans(held):
        for first, last in _cut(start, stop, row, bucket_elements):
            size = (last - first) * row
            full = sum(one.num_elements for one in group) + size > bucket_elements
            if group and (full or sharers != of_group):
                yield of_group, group
                group = []
            of_group = sharers
            group.append(Segment(name=name, dim=dim, start=first, stop=last, num_elements=size))
    if group:
        yield of_group, group


def _spans(held: Sequence[Sequence[Held]]) -> Iterator[tuple[Sharers, int, int, int, int, str]]:
    """Yield the rows of each parameter between two ends: sharers, dim, start, stop, row elements, name."""
    by_name: dict[str, list[tuple[int, Held]]] = {}
    for rank, of_rank in enumerate(held):
        for one in of_rank:
            by_name.setdefault(one.name, []).append((rank, one))
    for name, holders in reversed(by_name.items()):
        ends = sorted({end for _, one in holders for end in (one.start, one.stop)})
        for start, stop in itertools.pairwise(ends):
            here = [(rank, one) for rank, one in holders if one.start <= start and stop <= one.stop]
            if here:
                owners = tuple(dict.fromkeys(rank for rank, _ in here))
                adders = tuple(dict.fromkeys(rank for rank, one in here if one.adds))
                yield (owners, adders), here[0][1].dim, start, stop, here[0][1].row_elements, name


def _cut(start: int, stop: int, row_elements: int, bucket_elements: int) -> Iterator[tuple[int, int]]:
    """Cut rows into aligned spans of at most `bucket_elements` numbers, or the fewest aligned rows."""
    aligned = ALIGNED_ELEMENTS // math.gcd(ALIGNED_ELEMENTS, row_elements)
    step = max(bucket_elements // row_elements // aligned, 1) * aligned
    for first in range(start, stop, step):
        yield first, min(first + step, stop)
