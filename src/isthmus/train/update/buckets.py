"""`make_buckets`: split the parameters of all ranks into segments with owners, and group them into buckets.

Each rank states the rows that it holds of each full-model parameter (`HeldRows`). Parameters are split at the
ends of all these ranges, so that each owner of a segment holds all of it even if replicas have different
stages or tp degrees. Segments with equal owners fill buckets, the unit of communication. The result depends
only on the held rows, so all ranks compute the same buckets.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

BUCKET_ELEMENTS = 1 << 20
"""Elements per bucket: 4 MiB of fp32."""

LAYER_BUCKET_ELEMENTS = 1 << 18
"""Elements per bucket where buckets end with a layer: small ones share a layer equally."""

SEGMENT_ALIGNMENT = 16
"""Alignment of segment starts, in elements: vectorised updates are then bit-identical to unsharded ones.

A segment with another start (a short bias split over several ranks) is updated equally up to rounding.
"""


@dataclass(frozen=True, kw_only=True)
class HeldRows:
    """Rows of a parameter that a rank holds; ranks exchange it as JSON."""

    # Full-model name of the parameter.
    name: str
    # Rows [start, stop) of the full parameter.
    start: int
    stop: int
    # Elements per row.
    row_elements: int
    # Dimension along which rows are counted.
    dim: int = 0
    # First of these rows in the rank's local tensor.
    at: int = 0
    # False for a replica whose gradient another rank contributes in full.
    adds: bool = True

    @classmethod
    def full(cls, name: str, shape: Sequence[int]) -> HeldRows:
        """Return all rows of a parameter of `shape`."""
        return cls(name=name, start=0, stop=shape[0], row_elements=math.prod(shape[1:]))


@dataclass(frozen=True, kw_only=True)
class ParameterSegment:
    """Rows `[start, stop)` along `dim` of full-model parameter `name`."""

    name: str
    dim: int
    start: int
    stop: int
    num_elements: int


@dataclass(frozen=True, kw_only=True)
class GradientBucket:
    """Segments with the same owners, reduced in one message."""

    segments: tuple[ParameterSegment, ...]
    # Ranks that hold the segments, grouped by cluster, in rank order.
    owners: tuple[tuple[int, ...], ...]
    # Owners whose gradients are summed.
    contributors: frozenset[int]
    # One owner per cluster, which reduces there; in the order of `owners`.
    leaders: tuple[int, ...]
    # What its segments are a part of, by `make_buckets`.
    unit: str = ""

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return sum(one.num_elements for one in self.segments)

    @property
    def is_shared(self) -> bool:
        """Whether several ranks own it."""
        return len(self.owners) > 1 or len(self.owners[0]) > 1

    def in_cluster(self, place: int) -> GradientBucket:
        """Return the part of the owners of one cluster, the `place`-th of `owners`."""
        local = self.owners[place]
        return replace(
            self, owners=(local,), contributors=self.contributors & set(local), leaders=(self.leaders[place],)
        )

    def between_clusters(self) -> GradientBucket:
        """Return the part of the leaders, each of which has the sum of its cluster."""
        owners = tuple((leader,) for leader in self.leaders)
        return replace(self, owners=owners, contributors=frozenset(self.leaders))


def layer_of(name: str) -> str:
    """Return the decoder layer of a full-model parameter (`model.layers.7`), or the name of one outside of layers."""
    parts = name.split(".")
    return ".".join(parts[:3]) if parts[:2] == ["model", "layers"] else name


def make_buckets(
    held: Sequence[Sequence[HeldRows]],
    clusters: Sequence[str],
    bucket_elements: int = BUCKET_ELEMENTS,
    unit_of: Callable[[str], str] = lambda _: "",
    *,
    groups: Sequence[int] = (),
) -> tuple[GradientBucket, ...]:
    """Return all buckets of a run; `held`, `clusters` and `groups` are by rank.

    Ranks of different `groups` (default: all are of one) own nothing together, even of one name. A bucket has at most
    `bucket_elements` elements, or a single segment of the minimum aligned size, and parameters of one unit (default:
    all are one). The buckets of a named unit are about equal, and several for each owner in a cluster or one. The last
    parameters come first, because their gradients are ready first. Leaders are chosen so that the ranks of a cluster
    lead about the same number of elements.
    """
    led = [0] * len(held)
    found = []
    groups = groups or [0] * len(held)
    for (owners, adders, unit), segments in _group_segments(held, clusters, groups, bucket_elements, unit_of):
        by_cluster: dict[str, list[int]] = {}
        for rank in owners:
            by_cluster.setdefault(clusters[rank], []).append(rank)
        leaders = tuple(min(local, key=lambda rank: (led[rank], rank)) for local in by_cluster.values())
        bucket = GradientBucket(
            segments=tuple(segments),
            owners=tuple(map(tuple, by_cluster.values())),
            contributors=frozenset(adders),
            leaders=leaders,
            unit=unit,
        )
        for rank in leaders:
            led[rank] += bucket.num_elements
        found.append(bucket)
    return tuple(found)


SegmentGroup = tuple[tuple[int, ...], tuple[int, ...], str]
"""(owners, contributors, unit) of a segment; ranks are in order."""


def _group_segments(
    held: Sequence[Sequence[HeldRows]],
    clusters: Sequence[str],
    groups: Sequence[int],
    bucket_elements: int,
    unit_of: Callable[[str], str],
) -> Iterator[tuple[SegmentGroup, list[ParameterSegment]]]:
    """Yield groups of consecutive segments with equal ranks and unit, each at most one bucket."""
    every = [
        ((owners, adders, unit_of(name)), dim, start, stop, row, name)
        for (owners, adders), dim, start, stop, row, name in _split_rows(held, groups)
    ]
    totals = Counter[SegmentGroup]()
    for sharers, _, start, stop, row, _ in every:
        totals[sharers] += (stop - start) * row
    group: list[ParameterSegment] = []
    of_group: SegmentGroup = ((), (), "")
    room = 0
    for sharers, dim, start, stop, row, name in every:
        limit = _bucket_limit(sharers, totals[sharers], clusters, bucket_elements)
        if sharers != of_group:
            room = 0
        while start < stop:
            num_rows = min(_aligned_rows(room, row), stop - start)
            if not num_rows:
                if group:
                    yield of_group, group
                group, of_group, room = [], sharers, limit
                num_rows = min(_aligned_rows(room, row) or _alignment(row), stop - start)
            size = num_rows * row
            group.append(ParameterSegment(name=name, dim=dim, start=start, stop=start + num_rows, num_elements=size))
            start, room = start + num_rows, max(room - size, 0)
    if group:
        yield of_group, group


def _bucket_limit(sharers: SegmentGroup, total: int, clusters: Sequence[str], bucket_elements: int) -> int:
    """Return the most elements of a bucket of `total` elements that share owners and unit."""
    owners, _, unit = sharers
    if not unit:
        return bucket_elements
    num_owners = max(Counter(clusters[rank] for rank in owners).values())
    rounds = -(-total // (num_owners * bucket_elements))
    return -(-total // (num_owners * rounds))


SegmentRanks = tuple[tuple[int, ...], tuple[int, ...]]
"""(owners, contributors) of a segment, in rank order."""


def _split_rows(
    held: Sequence[Sequence[HeldRows]], groups: Sequence[int]
) -> Iterator[tuple[SegmentRanks, int, int, int, int, str]]:
    """Yield (ranks, dim, start, stop, row elements, name) of the rows between adjacent range ends."""
    by_name: dict[tuple[int, str], list[tuple[int, HeldRows]]] = {}
    for rank, (of_rank, group) in enumerate(zip(held, groups, strict=True)):
        for one in of_rank:
            by_name.setdefault((group, one.name), []).append((rank, one))
    for (_, name), holders in reversed(by_name.items()):
        ends = sorted({end for _, one in holders for end in (one.start, one.stop)})
        for start, stop in itertools.pairwise(ends):
            here = [(rank, one) for rank, one in holders if one.start <= start and stop <= one.stop]
            if here:
                owners = tuple(dict.fromkeys(rank for rank, _ in here))
                adders = tuple(dict.fromkeys(rank for rank, one in here if one.adds))
                yield (owners, adders), here[0][1].dim, start, stop, here[0][1].row_elements, name


def _alignment(row_elements: int) -> int:
    """Return the rows of which segments have a multiple."""
    return SEGMENT_ALIGNMENT // math.gcd(SEGMENT_ALIGNMENT, row_elements)


def _aligned_rows(elements: int, row_elements: int) -> int:
    """Return the most aligned rows within `elements`."""
    aligned = _alignment(row_elements)
    return elements // row_elements // aligned * aligned
