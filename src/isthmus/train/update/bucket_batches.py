"""`make_batches`: the shared buckets of a run in batches, the unit of a collective, as regions of elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import accumulate, pairwise

from isthmus.strategies import Region
from isthmus.train.update.buckets import GradientBucket

BATCH_ELEMENTS = 1 << 22
"""Elements of a batch: 16 MiB of fp32. Four batches under way fill 10 Gbit/s over 50 ms."""


class Exchange(Enum):
    """What a batch is for: its sums at all owners, its sums at leaders only, or the values of leaders to the others."""

    SUM = "sum"
    SUM_AT_LEADERS = "sum at leaders"
    BROADCAST = "broadcast"


@dataclass(frozen=True)
class BucketBatch:
    """Buckets with the same owners and contributors; their elements follow each other."""

    buckets: tuple[GradientBucket, ...]

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return sum(one.num_elements for one in self.buckets)

    @cached_property
    def names(self) -> frozenset[str]:
        """Full-model names of the parameters that have elements in it."""
        return frozenset(segment.name for one in self.buckets for segment in one.segments)

    def num_pieces(self, piece_elements: int) -> int:
        """Return how many pieces of at most `piece_elements` the buckets have."""
        return sum(-(-one.num_elements // piece_elements) for one in self.buckets)

    @property
    def owners(self) -> tuple[int, ...]:
        """The ranks that own the buckets, ascending."""
        return tuple(sorted(rank for local in self.buckets[0].owners for rank in local))

    def first_element(self, exchange: Exchange, rank: int) -> int:
        """Return where the elements of owner `rank` begin: clusters broadcast apart, at addresses of their own."""
        return self._cluster(rank) * self.num_elements if exchange is Exchange.BROADCAST else 0

    def regions(self, exchange: Exchange) -> tuple[Region, ...]:
        """Return which ranks contribute which elements, and which receive them."""
        found = []
        contributors = tuple(sorted(self.buckets[0].contributors))
        ends = list(pairwise(accumulate((one.num_elements for one in self.buckets), initial=0)))
        if exchange is not Exchange.BROADCAST:
            for bucket, (start, stop) in zip(self.buckets, ends, strict=True):
                at_all = exchange is Exchange.SUM
                receivers = self.owners if at_all else tuple(sorted(bucket.leaders))
                found.append(Region(start, stop, contributors, receivers))
            return tuple(found)
        for cluster, local in enumerate(self.buckets[0].owners):
            at = cluster * self.num_elements
            for bucket, (start, stop) in zip(self.buckets, ends, strict=True):
                found.append(Region(at + start, at + stop, (bucket.leaders[cluster],), tuple(sorted(local))))
        return tuple(found)

    def _cluster(self, rank: int) -> int:
        return next(place for place, local in enumerate(self.buckets[0].owners) if rank in local)


def make_batches(
    buckets: Sequence[GradientBucket], max_elements: int = BATCH_ELEMENTS, *, with_own: bool = False
) -> tuple[BucketBatch, ...]:
    """Return the shared `buckets` in batches of at most `max_elements` and one unit, or of one bucket.

    `with_own` adds those that a single rank owns.
    """
    found: list[list[GradientBucket]] = []
    size = 0
    for one in buckets:
        if not (one.is_shared or with_own):
            continue
        same = found and _kind(found[-1][0]) == _kind(one)
        if not same or size + one.num_elements > max_elements:
            found.append([])
            size = 0
        found[-1].append(one)
        size += one.num_elements
    return tuple(BucketBatch(tuple(of)) for of in found)


def _kind(bucket: GradientBucket) -> tuple[tuple[tuple[int, ...], ...], frozenset[int], str]:
    return bucket.owners, bucket.contributors, bucket.unit
