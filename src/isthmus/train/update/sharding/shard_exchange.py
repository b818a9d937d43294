"""`ShardExchange`: sums and copies of parameters among the owners in one cluster, batch by batch (ZeRO 2 and 3).

Each bucket has a leader among these owners, which gets its sums and gives its values: a batch is a reduce-scatter or an
all-gather of a group of its owners, by the library of the cluster where it has one. It goes on while a rank computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from isthmus.comm.group.isthmus_group import IsthmusGroup
from isthmus.train.communication.communicator import Communicator
from isthmus.train.update.bucket_batches import BATCH_ELEMENTS, make_batches
from isthmus.train.update.buckets import GradientBucket, ParameterSegment
from isthmus.train.update.gradient_reducer import MAX_UNDER_WAY, SegmentView
from isthmus.train.update.ownership import Ownership
from isthmus.train.update.sharding.equal_shares import EqualShares


@dataclass
class PendingBatch:
    """A batch under way: its buckets whose values this rank gets, with their memory [num_elements], and its work.

    `sent` keeps what the others still read.
    """

    results: list[tuple[GradientBucket, torch.Tensor]]
    work: dist.Work | None = None
    sent: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the values that this rank gets."""
        return sum(values.nbytes for _, values in self.results)

    def segments(self) -> Iterator[tuple[ParameterSegment, torch.Tensor]]:
        """Yield each segment that this rank gets, with its flat values [num_elements]."""
        for bucket, values in self.results:
            sizes = [one.num_elements for one in bucket.segments]
            yield from zip(bucket.segments, values.split(sizes), strict=True)


class ShardExchange:
    """The exchanges of rank `rank` with the owners in its cluster; `buckets` are those of all ranks.

    All ranks make one from equal buckets, and `form_groups` together. Equal owners exchange their batches in one order.
    Needs the isthmus process group.
    """

    def __init__(
        self,
        buckets: Sequence[GradientBucket],
        rank: int,
        communicator: Communicator,
        *,
        batch_elements: int = BATCH_ELEMENTS,
    ) -> None:
        self._rank, self._communicator = rank, communicator
        every = make_batches(_by_cluster(buckets, communicator.clusters), batch_elements, with_own=True)
        self._owners = tuple(dict.fromkeys(one.owners for one in every if len(one.owners) > 1))
        self._shares = {number: EqualShares(one) for number, one in enumerate(every) if rank in one.owners}
        self.batches = {number: one.batch for number, one in self._shares.items()}
        """The batches of this rank, by their number in the run; the last layers come first."""
        self._groups: dict[tuple[int, ...], IsthmusGroup] = {}

    def form_groups(self) -> None:
        """Form the groups of owners, also after a loss; all ranks call this. Raises `PeerError` if one does not."""
        groups = {ranks: self._communicator.make_group(ranks) for ranks in self._owners}
        self._groups = {ranks: group for ranks, group in groups.items() if group is not None}

    def sum(self, number: int, view: SegmentView) -> PendingBatch:
        """Start the sum of a batch over its contributors, each bucket at its leader.

        `view` returns this rank's values of a segment, of any shape.
        """
        shares, owners = self._shares[number], self.batches[number].owners
        first = view(self.batches[number].buckets[0].segments[0])
        if self._rank in self.batches[number].buckets[0].contributors:
            values = shares.whole(lambda bucket: [view(one).reshape(-1) for one in bucket.segments], first)
        else:
            values = first.new_zeros(shares.num_elements * len(owners))
        if len(owners) == 1:
            return PendingBatch([(bucket, values[at : at + bucket.num_elements]) for bucket, at in shares.starts()])
        mine = values.new_empty(shares.num_elements)
        work = self._groups[owners].reduce_scatter_single(mine, values)
        return PendingBatch(
            [
                (bucket, mine[at % len(mine) :][: bucket.num_elements])
                for bucket, at in shares.starts()
                if self._rank in bucket.leaders
            ],
            work,
            values,
        )

    def copy(self, number: int, shard: SegmentView, like: torch.Tensor) -> PendingBatch:
        """Start a copy of a batch from its leaders to all its owners, of the dtype and on the device of `like`.

        `shard` returns segments that this rank leads, of any shape; `like` has any shape.
        """
        shares, owners = self._shares[number], self.batches[number].owners
        mine = shares.share(lambda bucket: [shard(one).reshape(-1) for one in bucket.segments], self._rank, like)
        got, work = mine, None
        if len(owners) > 1:
            got = like.new_empty(len(mine) * len(owners))
            work = self._groups[owners].all_gather_single(got, mine)
        return PendingBatch([(bucket, got[at:][: bucket.num_elements]) for bucket, at in shares.starts()], work, mine)

    def finish(self, pending: PendingBatch) -> None:
        """Wait until a batch has arrived; raises `PeerError` if a peer is lost."""
        if pending.work is not None:
            with self._communicator.waiting():
                pending.work.wait()
            pending.work = pending.sent = None


def summed_buckets(ownership: Ownership, zero: int) -> tuple[GradientBucket, ...]:
    """Return what a `GradientReducer` sums: all buckets, or with ZeRO 2 and 3 their part between clusters."""
    if zero < 2:
        return ownership.buckets
    return tuple(one.between_clusters() for one in ownership.buckets)


def share_values(exchange: ShardExchange, view: SegmentView) -> None:
    """Copy all batches from their leaders to all owners; `view` returns this rank's memory of a segment."""
    under_way: deque[PendingBatch] = deque()

    def store() -> None:
        one = under_way.popleft()
        exchange.finish(one)
        for segment, values in one.segments():
            memory = view(segment)
            memory.copy_(values.view(memory.shape))

    for number, batch in exchange.batches.items():
        if len(batch.owners) > 1:
            if len(under_way) >= MAX_UNDER_WAY:
                store()
            under_way.append(exchange.copy(number, view, view(batch.buckets[0].segments[0])))
    while under_way:
        store()


def _by_cluster(buckets: Sequence[GradientBucket], clusters: Sequence[str]) -> list[GradientBucket]:
    """Return the part of each cluster in each bucket, cluster by cluster."""
    found: dict[str, list[GradientBucket]] = {}
    for one in buckets:
        for place, local in enumerate(one.owners):
            found.setdefault(clusters[local[0]], []).append(one.in_cluster(place))
    return [bucket for of_cluster in found.values() for bucket in of_cluster]
