"""`GradientReducer`: hierarchical all-reduce of shared gradients, bit-identical on all ranks.

In each cluster the leader of a bucket (`isthmus.train.update.buckets`) sums the gradients in rank order. The
leaders then add the cluster sums in cluster order: with two clusters both leaders add, with more one of them
adds and returns the total. Each byte crosses the WAN once in each direction. Leaders vary between buckets, so
the ranks of a cluster share the work: a reduce-scatter, and with `broadcast_in_cluster` an all-gather.

A bucket has four phases: to the leader, between leaders, total to leaders, to the other owners. All ranks
begin and end the phases of all buckets in the same order, and a rank waits only for messages whose
counterparts started earlier in this order, which rules out deadlock. At most `4 * in_flight` buckets are in
flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from isthmus.train.communication.communicator import Communicator, CommWork, TensorMessage
from isthmus.train.update.buckets import GradientBucket, ParameterSegment

SegmentView = Callable[[ParameterSegment], torch.Tensor]
"""Returns this rank's memory of a segment to read and write, a view that may be non-contiguous."""

FIRST_BUCKET_TAG = 1 << 19
"""Bucket tags are in `[FIRST_TAG, 2 * FIRST_TAG)`."""

_NUM_PHASES = 4
MAX_IN_FLIGHT = 4
"""Duration of a phase in ticks; one bucket begins per tick."""


class GradientReducer:
    """Reduces `buckets` (those of all ranks, in the same order on each rank) on rank `rank`."""

    def __init__(
        self,
        buckets: Sequence[GradientBucket],
        rank: int,
        communicator: Communicator,
        in_flight: int = MAX_IN_FLIGHT,
    ) -> None:
        self._rank, self._communicator, self._in_flight = rank, communicator, in_flight
        self._shared = [
            (number, one) for number, one in enumerate(buckets) if one.is_shared and _local_owners(one, rank)
        ]

    def reduce(self, view: SegmentView, *, to_all_owners: bool) -> None:
        """Replace each segment by its sum over contributors, on all owners (`to_all_owners`) or leaders only."""
        self._run_pipelined(lambda number, bucket: self._reduce_bucket(number, bucket, view, to_all_owners))

    def broadcast_in_cluster(self, view: SegmentView) -> None:
        """Broadcast each segment from the leader of each cluster to the other owners in that cluster."""
        self._run_pipelined(lambda number, bucket: self._broadcast_bucket(number, bucket, view))

    def _run_pipelined(self, begin: Callable[[int, GradientBucket], Iterator[list[CommWork]]]) -> None:
        """Run all buckets as a pipeline: bucket t begins at tick t; each phase lasts `in_flight` ticks.

        `begin` returns the phases of a bucket as an iterator of handles to wait for.
        """
        under_way: deque[tuple[int, Iterator[list[CommWork]], list[CommWork]]] = deque()
        waiting = deque(self._shared)
        tick = 0
        while waiting or under_way:
            tick = waiting[0][0] if waiting and not under_way else tick  # skip buckets of other ranks
            # Step 1: end the phases that are due, and begin the next phase of these buckets.
            for _ in range(len(under_way)):
                began, steps, works = under_way.popleft()
                if (tick - began) % self._in_flight == 0:
                    for work in works:
                        self._communicator.wait(work)
                    after = next(steps, None)
                    if after is None:
                        continue
                    works = after
                under_way.append((began, steps, works))
            # Step 2: begin the bucket of this tick.
            if waiting and waiting[0][0] == tick:
                number, bucket = waiting.popleft()
                steps = begin(number, bucket)
                under_way.append((number, steps, next(steps)))
            tick += 1

    def _reduce_bucket(
        self, number: int, bucket: GradientBucket, view: SegmentView, to_all_owners: bool
    ) -> Iterator[list[CommWork]]:
        """Reduce one bucket; yields the handles of each phase."""
        local = _local_owners(bucket, self._rank)
        leader = next(one for one in bucket.leaders if one in local)
        # Other owners: send to the leader, and receive the total if `to_all_owners`.
        if leader != self._rank:
            mine = [(leader, _pack(bucket, view))] if self._rank in bucket.contributors else []
            yield self._start_phase(number, 0, send=mine)
            yield []
            yield []
            if to_all_owners:
                total = self._new_buffer(bucket, view)
                yield self._start_phase(number, 3, receive=[(leader, total)])
                _unpack(bucket, view, total)
            return
        # Step 1 (leader): sum the gradients of the cluster in rank order.
        parts = {rank: self._new_buffer(bucket, view) for rank in local if rank in bucket.contributors - {leader}}
        yield self._start_phase(number, 0, receive=list(parts.items()))
        if leader in bucket.contributors:
            parts[leader] = _pack(bucket, view)
        total = _sum_in_order([parts[rank] for rank in local if rank in parts], bucket, view)
        parts.clear()
        # Step 2: add the cluster sums in cluster order, on `home` or (two clusters) on both leaders.
        home = bucket.leaders[number % len(bucket.leaders)]
        far = [one for one in bucket.leaders if one != leader]
        sums = {leader: total}
        if len(far) > 1 and leader != home:
            total = self._new_buffer(bucket, view)
            yield self._start_phase(number, 1, send=[(home, sums.pop(leader))])
            yield self._start_phase(number, 2, receive=[(home, total)])
        else:
            sums |= {one: self._new_buffer(bucket, view) for one in far}
            theirs = [(one, sums[one]) for one in far]
            own = [(one, sums[leader]) for one in far] if len(far) == 1 else []
            yield self._start_phase(number, 1, send=own, receive=theirs)
            total = _sum_in_order([sums[one] for one in bucket.leaders], bucket, view)
            sums.clear()
            yield self._start_phase(number, 2, send=[(one, total) for one in far] if len(far) > 1 else [])
        # Step 3: store the total, and send it to the other owners of the cluster.
        _unpack(bucket, view, total)
        if to_all_owners:
            yield self._start_phase(number, 3, send=[(one, total) for one in local if one != leader])

    def _broadcast_bucket(self, number: int, bucket: GradientBucket, view: SegmentView) -> Iterator[list[CommWork]]:
        """Broadcast one bucket from its local leader; yields the handles to wait for."""
        local = _local_owners(bucket, self._rank)
        leader = next(one for one in bucket.leaders if one in local)
        if leader == self._rank:
            values = _pack(bucket, view)
            yield self._start_phase(number, 3, send=[(one, values) for one in local if one != leader])
            return
        values = self._new_buffer(bucket, view)
        yield self._start_phase(number, 3, receive=[(leader, values)])
        _unpack(bucket, view, values)

    def _new_buffer(self, bucket: GradientBucket, view: SegmentView) -> torch.Tensor:
        """Return an uninitialised buffer for the bucket, flat [num_elements]."""
        return view(bucket.segments[0]).new_empty(bucket.num_elements)

    def _start_phase(
        self,
        number: int,
        phase: int,
        *,
        send: Sequence[tuple[int, torch.Tensor]] = (),
        receive: Sequence[tuple[int, torch.Tensor]] = (),
    ) -> list[CommWork]:
        """Start the messages of one phase, given as (peer, buffer); return their handles."""
        tag = FIRST_BUCKET_TAG + (number * _NUM_PHASES + phase) % FIRST_BUCKET_TAG
        messages = [TensorMessage(buffer, peer, tag, False) for peer, buffer in receive]
        messages += [TensorMessage(buffer, peer, tag, True) for peer, buffer in send]
        return self._communicator.start(messages) if messages else []


def _local_owners(bucket: GradientBucket, rank: int) -> tuple[int, ...]:
    """Return the owners of `bucket` in the cluster of `rank`; () if `rank` is not an owner."""
    return next((local for local in bucket.owners if rank in local), ())


def _pack(bucket: GradientBucket, view: SegmentView) -> torch.Tensor:
    """Return a flat copy [num_elements] of the bucket's segments."""
    return torch.cat([view(one).reshape(-1) for one in bucket.segments])


def _unpack(bucket: GradientBucket, view: SegmentView, values: torch.Tensor) -> None:
    """Copy flat `values` [num_elements] to the bucket's segments."""
    sizes = [one.num_elements for one in bucket.segments]
    for one, part in zip(bucket.segments, values.split(sizes), strict=True):
        target = view(one)
        target.copy_(part.view(target.shape))


def _sum_in_order(parts: Sequence[torch.Tensor], bucket: GradientBucket, view: SegmentView) -> torch.Tensor:
    """Return the sum of `parts` (each [num_elements]) in order without changing them; zeros if empty."""
    if not parts:
        return view(bucket.segments[0]).new_zeros(bucket.num_elements)
    total = parts[0]
    for place, part in enumerate(parts[1:]):
        total = total + part if place == 0 else total.add_(part)
    return total
