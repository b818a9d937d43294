"""`GradientReducer`: sums shared gradients over the process group, bit-identical on all ranks.

Buckets (`isthmus.train.update.buckets`) with the same owners are summed together, in batches. Over an isthmus group a
batch is one collective among its owners: sums are taken inside clusters first, each byte crosses the network between
clusters once in each direction, and several batches are under way. `GradientOptions` choose another strategy, switches,
or a wire format. Other groups sum by their own collectives. A reduction may begin before all gradients are final; then
it starts batches as theirs are, in one order on all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from isthmus.comm.group.cluster_codec import ClusterCodec
from isthmus.comm.group.collective_work import CollectiveWork
from isthmus.comm.group.isthmus_group import IsthmusGroup
from isthmus.comm.group.passing.passing_sums import NUM_SEQUENCES, PassingSums
from isthmus.comm.wire_formats.error_feedback import ErrorFeedback
from isthmus.comm.wire_formats.known_formats import WIRE_FORMATS
from isthmus.core.errors import PlanError
from isthmus.strategies import RankProgram, Step, group_steps, plan_steps, rank_program
from isthmus.train.communication.communicator import Communicator
from isthmus.train.update.bucket_batches import BATCH_ELEMENTS, BucketBatch, Exchange, make_batches
from isthmus.train.update.buckets import GradientBucket, ParameterSegment
from isthmus.train.update.gradient_options import PASSING, GradientOptions
from isthmus.train.update.torch_sums import TorchSums

SegmentView = Callable[[ParameterSegment], torch.Tensor]
"""Returns this rank's memory of a segment to read and write, a view that may be non-contiguous."""

PIECE_ELEMENTS = 1 << 19
"""Elements of a message: 2 MiB of fp32, which cost less CPU time than more of 1 MiB: each has a notice."""

MAX_UNDER_WAY = 4
"""Batches under way at a time."""


class GradientReducer:
    """Reduces `buckets` (those of all ranks, in the same order on each rank) on rank `rank`.

    All ranks make one at the same time, and call its methods in the same order. Raises `PlanError` if owners cannot sum
    by the strategy of `options`, or if the group is one of torch itself. NaN and infinity pass: sums of integers are
    left for sums in fp32 in a step in which a rank has such a gradient.
    """

    def __init__(
        self,
        buckets: Sequence[GradientBucket],
        rank: int,
        communicator: Communicator,
        *,
        batch_elements: int = BATCH_ELEMENTS,
        options: GradientOptions | None = None,
    ) -> None:
        self._rank, self._communicator = rank, communicator
        self._batches = make_batches(buckets, batch_elements)
        self._programs: dict[tuple[int, Exchange], tuple[RankProgram, list[int]]] = {}
        self._options = options or GradientOptions()
        self._group: IsthmusGroup | None = None
        self._codecs: dict[int, ClusterCodec] = {}
        self._passing: dict[tuple[int, ...], PassingSums] = {}
        self._begun: _Reduction | None = None
        self._torch_sums = None if communicator.isthmus_group is not None else TorchSums(self._batches, rank)
        if self._options.strategy is not None:
            self._check_strategy(self._options.strategy)

    @property
    def num_started(self) -> int:
        """Batches of this rank that the begun reduction has started."""
        return 0 if self._begun is None else self._begun.num_started

    def begin(self, view: SegmentView, *, to_all_owners: bool) -> None:
        """Begin a reduction before its gradients exist; `start_final` starts batches, `reduce` the rest.

        Every rank calls this at the same place of its step. Sums of integers begin in `reduce`: they need to know first
        that all gradients are finite.
        """
        if self._torch_sums is None and not self._options.needs_finite:
            self._begun = self._make_reduction(self._sum(to_all_owners=to_all_owners), view)

    def start_final(self, is_final: Callable[[str], bool]) -> None:
        """Start the next batches whose parameters are final, as long as few are under way; never waits."""
        if self._begun is not None:
            self._advance(self._begun, is_final, waits=False)

    def discard(self) -> None:
        """Forget a reduction that was begun and has failed."""
        self._begun = None

    def reduce(self, view: SegmentView, *, to_all_owners: bool) -> None:
        """Replace each segment by its sum over contributors, on all owners (`to_all_owners`) or leaders at least."""
        reduction = self._begun or self._make_reduction(self._sum(to_all_owners=to_all_owners), view)
        self._advance(reduction, lambda _: True, waits=True)
        self._begun = None

    def broadcast_in_cluster(self, view: SegmentView) -> None:
        """Broadcast each segment from the leader of each cluster to the other owners in that cluster."""
        self._advance(self._make_reduction(Exchange.BROADCAST, view), lambda _: True, waits=True)

    def rescale_errors(self, factor: float) -> None:
        """Multiply the rounding errors that the next sums add by `factor`: its gradients have another loss scale."""
        for one in self._codecs.values():
            one.rescale_errors(factor)

    def close(self) -> None:
        """Free the slots at switches; no sum follows."""
        for one in self._passing.values():
            one.close(wait=False)
        self._passing = {}

    def _sum(self, *, to_all_owners: bool) -> Exchange:
        return Exchange.SUM if to_all_owners or self._options.strategy else Exchange.SUM_AT_LEADERS

    def _make_reduction(self, exchange: Exchange, view: SegmentView) -> _Reduction:
        group = self._communicator.isthmus_group
        self._forget_other_groups(group)
        is_plain = exchange is Exchange.BROADCAST or (self._options.needs_finite and not self._all_are_finite(view))
        first = group.reserve_programs(len(self._batches) * NUM_SEQUENCES) if group is not None else 0
        return _Reduction(exchange, view, first, is_plain)

    def _advance(self, reduction: _Reduction, is_final: Callable[[str], bool], *, waits: bool) -> None:
        """Exchange the batches of which this rank is an owner, `MAX_UNDER_WAY` at a time; with `waits` to the end."""
        under_way = reduction.under_way
        for number in range(reduction.next_batch, len(self._batches)):
            batch = self._batches[number]
            if self._rank in batch.owners:
                if not all(map(is_final, batch.names)):
                    return
                while under_way and len(under_way) >= MAX_UNDER_WAY:
                    if not (waits or under_way[0].is_completed):
                        return
                    self._finish(under_way.popleft())
                self._start(reduction, number)
            reduction.next_batch = number + 1
        while waits and under_way:
            self._finish(under_way.popleft())

    def _start(self, reduction: _Reduction, number: int) -> None:
        one = _Batch(self._batches[number], reduction.exchange, self._rank, reduction.view)
        reduction.num_started += 1
        if self._torch_sums is not None:
            with self._communicator.waiting():
                self._torch_sums.run(reduction.exchange, number, one.sent, one.got)
            one.store()
            return
        one.work = self._sum_batch(reduction, number, one)
        reduction.under_way.append(one)

    def _sum_batch(self, reduction: _Reduction, number: int, one: _Batch) -> CollectiveWork:
        """Start the collective of batch `number`, by switches, in a wire format, or by messages of fp32."""
        sequence = reduction.first_number + number * NUM_SEQUENCES
        passing = None if reduction.is_plain else self._passing_of(self._batches[number])
        if passing is not None and one.sent is not None:
            one.got = one.sent
            return self._communicator.sum_by_switches(passing, one.sent, sequence)
        codec = None if reduction.is_plain else self._codec_of(number)
        program, crossing = self._program(number, reduction.exchange)
        size = codec.num_bytes if codec is not None else (lambda num: num * one.element_size)
        num_bytes = sum(size(num) for num in crossing)
        return self._communicator.execute(sequence, program, one.inputs, one.outputs, num_bytes, codec)

    def _finish(self, one: _Batch) -> None:
        if one.work is not None:
            self._communicator.wait_program(one.work)
        one.store()

    def _forget_other_groups(self, group: IsthmusGroup | None) -> None:
        """Begin with empty states in a new group: all ranks do, also one that has been replaced."""
        if group is not self._group:
            self.close()
            self._group, self._codecs = group, {}

    def _all_are_finite(self, view: SegmentView) -> bool:
        """Return whether the gradients of all ranks are; all ranks call this."""
        segments = (one for batch in self._batches for bucket in batch.buckets for one in bucket.segments
                    if self._rank in bucket.contributors)  # fmt: skip
        bad = not all(bool(torch.isfinite(view(one)).all()) for one in segments)
        return float(self._communicator.sum_over_all(torch.tensor([float(bad)], dtype=torch.float64))) == 0.0

    def _codec_of(self, number: int) -> ClusterCodec | None:
        name = self._options.wire_format
        if name is None:
            return None
        if number not in self._codecs:
            feedback = ErrorFeedback() if self._options.error_feedback else None
            self._codecs[number] = ClusterCodec(WIRE_FORMATS[name], self._communicator.clusters, self._rank, feedback)
        return self._codecs[number]

    def _passing_of(self, batch: BucketBatch) -> PassingSums | None:
        """Return what sums `batch` by switches; None where its owners are of one cluster."""
        owners, clusters = batch.owners, self._communicator.clusters
        if self._options.passing is None or self._group is None or len({clusters[rank] for rank in owners}) == 1:
            return None
        if owners not in self._passing:
            self._passing[owners] = PassingSums(self._group, self._options.passing, owners)
        return self._passing[owners]

    def _check_strategy(self, strategy: str) -> None:
        if self._torch_sums is not None:
            raise PlanError(
                f"the run asks for synchronisation '{strategy}', which a group of torch itself does not have",
                hint="leave runtime.synchronisation out, or run with the backend isthmus",
            )
        for batch in self._batches:
            if batch.buckets[0].contributors != frozenset(batch.owners):
                raise PlanError(
                    f"ranks {list(batch.owners)} own a parameter that not all of them add to, which strategy "
                    f"'{strategy}' cannot sum",
                    hint="leave runtime.synchronisation out",
                )
            if strategy != PASSING:
                self._named_steps(strategy, batch)

    def _named_steps(self, strategy: str, batch: BucketBatch) -> tuple[Step, ...]:
        """Return the steps of `strategy` among the owners of `batch`."""
        owners, clusters = batch.owners, self._communicator.clusters
        steps = group_steps(strategy, [clusters[rank] for rank in owners], batch.num_elements)
        return tuple(replace(one, sender=owners[one.sender], receiver=owners[one.receiver]) for one in steps)

    def _program(self, number: int, exchange: Exchange) -> tuple[RankProgram, list[int]]:
        """Return this rank's part in a batch, and the elements of each message that it sends to other clusters."""
        found = self._programs.get((number, exchange))
        if found is None:
            regions, clusters = self._batches[number].regions(exchange), self._communicator.clusters
            pieces = sum(one.num_pieces(PIECE_ELEMENTS) for one in self._batches[:number])
            steps = plan_steps(regions, clusters, PIECE_ELEMENTS, first_piece=pieces)
            strategy = self._options.strategy
            if strategy not in (None, PASSING) and exchange is not Exchange.BROADCAST:
                steps = self._named_steps(str(strategy), self._batches[number])
            crossing = [
                one.stop - one.start
                for one in steps
                if one.sender == self._rank and clusters[one.receiver] != clusters[self._rank]
            ]
            found = rank_program(steps, regions, self._rank), crossing
            self._programs[number, exchange] = found
        return found


@dataclass
class _Reduction:
    """One exchange of all batches, and how far it has come."""

    exchange: Exchange
    view: SegmentView
    # Number of the group's program of the first batch.
    first_number: int
    # Whether it goes by messages of fp32.
    is_plain: bool
    next_batch: int = 0
    num_started: int = 0
    under_way: deque[_Batch] = field(default_factory=deque)


class _Batch:
    """One batch under way: flat memory [num_elements] apart from the gradients, which stay as they are."""

    def __init__(self, batch: BucketBatch, exchange: Exchange, rank: int, view: SegmentView) -> None:
        self._batch, self._view = batch, view
        first = batch.first_element(exchange, rank)
        like = view(batch.buckets[0].segments[0])
        self.element_size = like.element_size()
        leads = [rank in one.leaders for one in batch.buckets]
        reads = any(leads) if exchange is Exchange.BROADCAST else rank in batch.buckets[0].contributors
        self._stored = [exchange is not Exchange.SUM_AT_LEADERS or is_led for is_led in leads]
        self.sent = (
            torch.cat([view(segment).reshape(-1) for one in batch.buckets for segment in one.segments])
            if reads
            else None
        )
        self.got = like.new_empty(batch.num_elements) if any(self._stored) else None
        self.inputs = [] if self.sent is None else [(first, self.sent)]
        self.outputs = [] if self.got is None else [(first, self.got)]
        self.work: CollectiveWork | None = None

    @property
    def is_completed(self) -> bool:
        """Whether all its messages have arrived."""
        return self.work is None or self.work.is_completed()

    def store(self) -> None:
        """Copy the results to the segments that this rank gets."""
        if self.got is None:
            return
        parts = self.got.split([one.num_elements for one in self._batch.buckets])
        for bucket, part, stored in zip(self._batch.buckets, parts, self._stored, strict=True):
            if stored:
                sizes = [one.num_elements for one in bucket.segments]
                for segment, values in zip(bucket.segments, part.split(sizes), strict=True):
                    target = self._view(segment)
                    target.copy_(values.view(target.shape))
