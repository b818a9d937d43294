"""`Reducer`: sums the gradients of what several ranks own, the same bits everywhere, and spreads results.

A bucket (`isthmus.train.update.buckets`) is summed inside each cluster by that cluster's leader, in the order
of ranks, and the clusters' sums are added in the order of clusters: by both leaders where there are two
clusters, else by one of the leaders, who sends the total back. Every byte crosses the WAN once in each
direction. Leaders change from bucket to bucket, so the ranks of a cluster share the work: a reduce-scatter,
and with `spread` an all-gather.

All ranks begin and end the phases of all buckets in one order. Nothing is waited for before what the wait
depends on was started everywhere, so nothing can wait for ever; at most `4 * in_flight` buckets are under
way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from isthmus.train.messages.exchange import Exchange, Message, Work
from isthmus.train.update.buckets import Bucket, Segment

View = Callable[[Segment], torch.Tensor]
"""This rank's own memory of a segment, to be read or written; not always contiguous."""

FIRST_TAG = 1 << 19
"""Tags from here to twice as many are those of buckets."""

_PHASES = 4
IN_FLIGHT = 4
"""Buckets between the begin and the end of a phase."""


class Reducer:
    """One rank's part in the sums of `buckets`, which are those of all ranks, in their order."""

    def __init__(
        self, buckets: Sequence[Bucket], rank: int, exchange: Exchange, in_flight: int = IN_FLIGHT
    ) -> None:
        self._rank, self._exchange, self._in_flight = rank, exchange, in_flight
        self._shared = [
            (number, one) for number, one in enumerate(buckets) if one.is_shared and _near(one, rank)
        ]
        self._num_buckets = len(buckets)

    def reduce(self, view: View, *, everywhere: bool) -> None:
        """Replace what `view` shows by its sum over all adders: at all owners, or at the leaders alone."""
        self._run(lambda number, bucket: self._reduced(number, bucket, view, everywhere))

    def spread(self, view: View) -> None:
        """Give what `view` shows at the leader of each cluster to the other owners there."""
        self._run(lambda number, bucket: self._spread(number, bucket, view))

    def _run(self, begin: Callable[[int, Bucket], Iterator[list[Work]]]) -> None:
        """Drive every bucket from phase to phase; each waits while the next ones begin theirs."""
        under_way: deque[tuple[int, Iterator[list[Work]], list[Work]]] = deque()
        waiting = deque(self._shared)
        tick = 0
        while waiting or under_way:
            tick = waiting[0][0] if waiting and not under_way else tick
            for _ in range(len(under_way)):
                began, steps, works = under_way.popleft()
                if (tick - began) % self._in_flight == 0:
                    for work in works:
                        self._exchange.wait(work)
                    after = next(steps, None)
                    if after is None:
                        continue
                    works = after
                under_way.append((began, steps, works))
            if waiting and waiting[0][0] == tick:
                number, bucket = waiting.popleft()
                steps = begin(number, bucket)
                under_way.append((number, steps, next(steps)))
            tick += 1

    def _reduced(self, number: int, bucket: Bucket, view: View, everywhere: bool) -> Iterator[list[Work]]:
        """Sum one bucket; yields four times what the next phase waits for."""
        near = _near(bucket, self._rank)
        leader = next(one for one in bucket.leaders if one in near)
        if leader != self._rank:
            mine = [(leader, _packed(bucket, view))] if self._rank in bucket.adders else []
            yield self._start(number, 0, send=mine)
            yield []
            yield []
            if everywhere:
                total = self._room(bucket, view)
                yield self._start(number, 3, receive=[(leader, total)])
                _unpack(bucket, view, total)
            return
        parts = {rank: self._room(bucket, view) for rank in near if rank in bucket.adders - {leader}}
        yield self._start(number, 0, receive=list(parts.items()))
        if leader in bucket.adders:
            parts[leader] = _packed(bucket, view)
        total = _sum([parts[rank] for rank in near if rank in parts], bucket, view)
        parts.clear()
        home = bucket.leaders[number % len(bucket.leaders)]
        far = [one for one in bucket.leaders if one != leader]
        sums = {leader: total}
        if len(far) > 1 and leader != home:
            total = self._room(bucket, view)
            yield self._start(number, 1, send=[(home, sums.pop(leader))])
            yield self._start(number, 2, receive=[(home, total)])
        else:
            sums |= {one: self._room(bucket, view) for one in far}
            theirs = [(one, sums[one]) for one in far]
            own = [(one, sums[leader]) for one in far] if len(far) == 1 else []
            yield self._start(number, 1, send=own, receive=theirs)
            total = _sum([sums[one] for one in bucket.leaders], bucket, view)
            sums.clear()
            yield self._start(number, 2, send=[(one, total) for one in far] if len(far) > 1 else [])
        _unpack(bucket, view, total)
        if everywhere:
            yield self._start(number, 3, send=[(one, total) for one in near if one != leader])

    def _spread(self, number: int, bucket: Bucket, view: View) -> Iterator[list[Work]]:
        near = _near(bucket, self._rank)
        leader = next(one for one in bucket.leaders if one in near)
        if leader == self._rank:
            values = _packed(bucket, view)
            yield self._start(number, 3, send=[(one, values) for one in near if one != leader])
            return
        values = self._room(bucket, view)
        yield self._start(number, 3, receive=[(leader, values)])
        _unpack(bucket, view, values)

    def _room(self, bucket: Bucket, view: View) -> torch.Tensor:
        return view(bucket.segments[0]).new_empty(bucket.num_elements)

    def _start(
        self,
        number: int,
        phase: int,
        *,
        send: Sequence[tuple[int, torch.Tensor]] = (),
        receive: Sequence[tuple[int, torch.Tensor]] = (),
    ) -> list[Work]:
        """Start messages of one phase, given as (peer, buffer)."""
        tag = FIRST_TAG + (number * _PHASES + phase) % FIRST_TAG
        messages = [Message(buffer, peer, tag, False) for peer, buffer in receive]
        messages += [Message(buffer, peer, tag, True) for peer, buffer in send]
        return self._exchange.start(messages) if messages else []


def _near(bucket: Bucket, rank: int) -> tuple[int, ...]:
    """Return the owners of `bucket` in the cluster of `rank`, which is one of them; none where it is not."""
    return next((near for near in bucket.owners if rank in near), ())


def _packed(bucket: Bucket, view: View) -> torch.Tensor:
    """Return a copy of what `view` shows of the bucket, flat."""
    return torch.cat([view(one).reshape(-1) for one in bucket.segments])


def _unpack(bucket: Bucket, view: View, values: torch.Tensor) -> None:
    """Write flat `values` where `view` shows the bucket."""
    sizes = [one.num_elements for one in bucket.segments]
    for one, part in zip(bucket.segments, values.split(sizes), strict=True):
        target = view(one)
        target.copy_(part.view(target.shape))


def _sum(parts: Sequence[torch.Tensor], bucket: Bucket, view: View) -> torch.Tensor:
    """Return the sum of `parts` in their order, which are left alone; zero where there are none."""
    if not parts:
        return view(bucket.segments[0]).new_zeros(bucket.num_elements)
    total = parts[0]
    for place, part in enumerate(parts[1:]):
        total = total + part if place == 0 else total.add_(part)
    return total
