"""`EqualShares`: a batch of buckets as equal shares, one of each owner, as gathers and scatters want them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from isthmus.train.update.bucket_batches import BucketBatch
from isthmus.train.update.buckets import GradientBucket

SegmentBlocks = Callable[[GradientBucket], list[torch.Tensor]]
"""Returns the flat blocks of a bucket, its elements in order."""


@dataclass(frozen=True)
class EqualShares:
    """A batch of one cluster in a flat tensor [owners * num_elements]: of each owner the buckets that it leads.

    They follow each other in the order of the batch. What a share lacks is filled with elements that no one reads.
    """

    batch: BucketBatch

    @property
    def num_elements(self) -> int:
        """Number of elements of a share: those of the owner that leads most."""
        return max(self._led().values())

    def starts(self) -> Iterator[tuple[GradientBucket, int]]:
        """Yield each bucket with its first element."""
        begun, size = Counter[int](), self.num_elements
        for bucket in self.batch.buckets:
            (leader,) = bucket.leaders
            yield bucket, self.batch.owners.index(leader) * size + begun[leader]
            begun[leader] += bucket.num_elements

    def share(self, blocks: SegmentBlocks, rank: int, like: torch.Tensor) -> torch.Tensor:
        """Return the share of `rank`, flat [num_elements], of the dtype and on the device of `like`."""
        return torch.cat(self._parts(blocks, rank, like))

    def whole(self, blocks: SegmentBlocks, like: torch.Tensor) -> torch.Tensor:
        """Return all shares, flat [owners * num_elements], of the dtype and on the device of `like`."""
        return torch.cat([part for rank in self.batch.owners for part in self._parts(blocks, rank, like)])

    def _parts(self, blocks: SegmentBlocks, rank: int, like: torch.Tensor) -> list[torch.Tensor]:
        mine = [one for bucket in self.batch.buckets if rank in bucket.leaders for one in blocks(bucket)]
        missing = self.num_elements - self._led()[rank]
        return [*mine, like.new_zeros(missing)] if missing else mine

    def _led(self) -> Counter[int]:
        led = Counter[int]()
        for bucket in self.batch.buckets:
            led[bucket.leaders[0]] += bucket.num_elements
        return led
