"""`ShardExchange`: sums and copies of parameters among the owners in one cluster, batch by batch (ZeRO 2 and 3).

Each bucket has a leader among these owners, which gets its sums and gives its values: a reduce-scatter and an
all-gather over unequal shards. A batch is one program of the process group, so exchanges run while a rank computes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from isthmus.comm.group.collective_work import CollectiveWork
from isthmus.strategies import RankProgram, plan_steps, rank_program
from isthmus.train.communication.communicator import Communicator
from isthmus.train.update.bucket_batches import BATCH_ELEMENTS, BucketBatch, Exchange, make_batches
from isthmus.train.update.buckets import GradientBucket, ParameterSegment
from isthmus.train.update.gradient_reducer import MAX_UNDER_WAY, PIECE_ELEMENTS, SegmentView
from isthmus.train.update.ownership import Ownership


@dataclass
class PendingBatch:
    """A batch under way: its buckets whose values this rank gets, with their memory [num_elements], and its work.

    `sent` keeps what the others still read.
    """

    results: list[tuple[GradientBucket, torch.Tensor]]
    work: CollectiveWork | None = None
    sent: list[torch.Tensor] | None = None

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

    All ranks make one from equal buckets. Every rank calls `begin` at the same place. Until the next one equal owners
    exchange their batches in one order, each `max_uses` times at most. Needs the isthmus process group.
    """

    def __init__(
        self,
        buckets: Sequence[GradientBucket],
        rank: int,
        communicator: Communicator,
        *,
        max_uses: int,
        batch_elements: int = BATCH_ELEMENTS,
    ) -> None:
        self._rank, self._communicator = rank, communicator
        every = make_batches(_by_cluster(buckets, communicator.clusters), batch_elements, with_own=True)
        each = Counter(one.owners for one in every)
        self._max_programs = max(each.values(), default=0) * max_uses
        self._lanes = _lanes(each)
        self._num_lanes = 1 << max(self._lanes.values(), default=0).bit_length()
        self.batches = {number: one for number, one in enumerate(every) if rank in one.owners}
        """The batches of this rank, by their number in the run; the last layers come first."""
        self._first_number = 0
        self._num_started: Counter[tuple[int, ...]] = Counter()
        self._programs: dict[tuple[int, Exchange], RankProgram] = {}

    def begin(self) -> None:
        """Begin a step or another series of exchanges."""
        group = self._communicator.isthmus_group
        if group is None:
            raise RuntimeError("sharded gradients need the isthmus process group")
        self._first_number = group.reserve_programs(self._max_programs * self._num_lanes)
        self._num_started.clear()

    def sum(self, number: int, values: torch.Tensor) -> PendingBatch:
        """Start the sum of flat `values` [num_elements] of a batch over its contributors, each bucket at its leader."""
        batch = self.batches[number]
        if len(batch.owners) == 1:
            return PendingBatch([(bucket, values[start:stop]) for bucket, start, stop in _places(batch)])
        results = [
            (bucket, start, values.new_empty(stop - start))
            for bucket, start, stop in _places(batch)
            if self._rank in bucket.leaders
        ]
        inputs = [(0, values)] if self._rank in batch.buckets[0].contributors else []
        outputs = [(start, memory) for _, start, memory in results]
        work = self._execute(number, Exchange.SUM_AT_LEADERS, inputs, outputs)
        return PendingBatch([(bucket, memory) for bucket, _, memory in results], work, [values])

    def copy(self, number: int, shard: SegmentView, like: torch.Tensor) -> PendingBatch:
        """Start a copy of a batch from its leaders to all its owners, of the dtype and on the device of `like`.

        `shard` returns segments that this rank leads, flat [num_elements]; `like` has any shape.
        """
        batch = self.batches[number]
        led = [
            (start, torch.cat([shard(segment).reshape(-1) for segment in bucket.segments]))
            for bucket, start, _ in _places(batch)
            if self._rank in bucket.leaders
        ]
        if len(batch.owners) == 1:
            return PendingBatch([(bucket, values) for bucket, (_, values) in zip(batch.buckets, led, strict=True)])
        got = like.new_empty(batch.num_elements)
        work = self._execute(number, Exchange.BROADCAST, led, [(0, got)])
        results = [(bucket, got[start:stop]) for bucket, start, stop in _places(batch)]
        return PendingBatch(results, work, [values for _, values in led])

    def finish(self, pending: PendingBatch) -> None:
        """Wait until a batch has arrived; raises `PeerError` if a peer is lost."""
        if pending.work is not None:
            self._communicator.wait_program(pending.work)
            pending.work = pending.sent = None

    def _execute(
        self,
        number: int,
        exchange: Exchange,
        inputs: Sequence[tuple[int, torch.Tensor]],
        outputs: Sequence[tuple[int, torch.Tensor]],
    ) -> CollectiveWork:
        owners = self.batches[number].owners
        place = self._num_started[owners]
        if place >= self._max_programs:
            raise RuntimeError(f"ranks {list(owners)} exchange more than {self._max_programs} batches")
        self._num_started[owners] += 1
        sequence = self._first_number + place * self._num_lanes + self._lanes[owners]
        return self._communicator.execute(sequence, self._program(number, exchange), inputs, outputs, 0)

    def _program(self, number: int, exchange: Exchange) -> RankProgram:
        found = self._programs.get((number, exchange))
        if found is None:
            regions = self.batches[number].regions(exchange)
            steps = plan_steps(regions, self._communicator.clusters, PIECE_ELEMENTS)
            found = self._programs[number, exchange] = rank_program(steps, regions, self._rank)
        return found


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


def _lanes(all_owners: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], int]:
    """Return a number for each set of owners, unlike those of all sets with a rank in common.

    The numbers of a set's programs are consecutive in its lane: numbers of programs under way at a rank differ by less
    than those after which the group's tags repeat.
    """
    lanes: dict[tuple[int, ...], int] = {}
    taken: dict[int, set[int]] = {}
    for owners in all_owners:
        others = set[int]().union(*(taken.get(rank, ()) for rank in owners))
        lane = lanes[owners] = next(one for one in range(len(others) + 1) if one not in others)
        for rank in owners:
            taken.setdefault(rank, set()).add(lane)
    return lanes


def _places(batch: BucketBatch) -> Iterator[tuple[GradientBucket, int, int]]:
    """Yield each bucket of a batch with its first element there, and the one after its last."""
    ends = accumulate((one.num_elements for one in batch.buckets), initial=0)
    for bucket, start in zip(batch.buckets, ends, strict=False):
        yield bucket, start, start + bucket.num_elements


def _by_cluster(buckets: Sequence[GradientBucket], clusters: Sequence[str]) -> list[GradientBucket]:
    """Return the part of each cluster in each bucket, cluster by cluster."""
    found: dict[str, list[GradientBucket]] = {}
    for one in buckets:
        for place, local in enumerate(one.owners):
            found.setdefault(clusters[local[0]], []).append(one.in_cluster(place))
    return [bucket for of_cluster in found.values() for bucket in of_cluster]
