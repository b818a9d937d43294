"""`GradientShards`: gradients summed over the owners in a cluster as they are computed; each keeps those that it leads.

ZeRO stage 2 (S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020,
section 5.2). The gradient of a layer exists whole only from its backward pass to its exchange; sums over micro-batches
are added up at the leaders. Sums of clusters are summed once a step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from isthmus.train.update.buckets import ParameterSegment
from isthmus.train.update.gradient_accumulator import GradientAccumulator
from isthmus.train.update.gradient_reducer import MAX_UNDER_WAY, GradientReducer
from isthmus.train.update.ownership import LocalRows, Ownership
from isthmus.train.update.sharding.shard_exchange import PendingBatch, ShardExchange
from isthmus.train.update.weight_shard import view_rows


class GradientShards:
    """The sums of a step, of the rows that this rank leads.

    `gradients` has what backward passes add to, and drops it once it is exchanged. `between` sums over the leaders of
    several clusters. Gradients of the names in `late` are exchanged once a step: several stages hold them.
    """

    def __init__(
        self,
        gradients: GradientAccumulator,
        ownership: Ownership,
        exchange: ShardExchange,
        between: GradientReducer,
        late: Collection[str] = (),
    ) -> None:
        self._gradients, self._ownership, self._exchange, self._between = gradients, ownership, exchange, between
        batches = exchange.batches
        self._late = [number for number, one in batches.items() if one.names & set(late)]
        self._batches_of: dict[str, list[int]] = {}
        for number, one in batches.items():
            for name in one.names if number not in self._late else ():
                self._batches_of.setdefault(name, []).append(number)
        self._sums: dict[str, list[tuple[LocalRows, torch.Tensor]]] = {}
        self._under_way: deque[PendingBatch] = deque()
        self._added: set[str] = set()
        self._due: deque[int] = deque()
        self._num_due: Counter[str] = Counter()

    @contextmanager
    def final_backward(self, names: Collection[str]) -> Iterator[None]:
        """Exchange the gradients of `names`, those of a chunk, which the block completes for a micro-batch.

        Batches start in one order on all ranks, each as soon as its gradients have been added to, or at the end.
        """
        self._begin({number for name in names for number in self._batches_of.get(name, ())})
        yield
        self._start_due()

    def on_accumulated(self, name: str) -> None:
        """Note an addition to the gradient of `name`; start the batches of this pass that are complete with it.

        A pass that defers weight gradients calls this without one.
        """
        if self._gradients.get(name) is None:
            return
        self._added.add(name)
        while self._due and self._exchange.batches[self._due[0]].names <= self._added:
            self._start(self._due.popleft())

    def finish_step(self) -> None:
        """Finish all sums, over clusters too, after the last backward pass; all ranks call this."""
        self._begin(set(self._late))
        self._start_due()
        while self._under_way:
            self._store()
        self._allocate()
        self._between.reduce(self.segment_view, to_all_owners=True)

    def rows(self, name: str, rows: LocalRows) -> torch.Tensor:
        """Return the sum of `rows`, fp32 of their shape, after `finish_step`; raises `KeyError` if not led here."""
        for led, total in self._sums[name]:
            if led.at <= rows.at and rows.at + rows.num_rows <= led.at + led.num_rows:
                return view_rows(total, replace(rows, at=rows.at - led.at))
        raise KeyError(f"this rank does not lead {rows} of {name}")

    def segment_view(self, segment: ParameterSegment) -> torch.Tensor:
        """Return the sum of a segment that this rank leads, a view [num_elements]."""
        return self.rows(segment.name, self._ownership.locate(segment))

    def sum_of_squares(self) -> torch.Tensor:
        """Return the squared norm, an fp64 scalar, of the segments that this rank counts."""
        views = [self.segment_view(one) for one in self._ownership.norm_segments]
        if not views:
            return torch.zeros((), dtype=torch.float64)
        return torch.stack(torch._foreach_norm(views, 2, dtype=torch.float64)).square().sum()

    def clear(self) -> None:
        """Discard the sums, and what has begun of a step that failed."""
        self._sums = {}
        self._under_way.clear()
        self._added.clear()
        self._due.clear()
        self._num_due.clear()

    def _begin(self, due: set[int]) -> None:
        self._due = deque(sorted(due))
        self._num_due = Counter(name for number in due for name in self._exchange.batches[number].names)

    def _start_due(self) -> None:
        while self._due:
            self._start(self._due.popleft())

    def _start(self, number: int) -> None:
        """Start the sum of a batch, and drop gradients of which nothing is left to start."""
        batch = self._exchange.batches[number]
        while len(self._under_way) >= MAX_UNDER_WAY:
            self._store()
        self._under_way.append(self._exchange.sum(number, self._gradients.segment_or_zeros))
        for name in batch.names:
            self._num_due[name] -= 1
            if not self._num_due[name]:
                self._gradients.drop(name)
                self._added.discard(name)

    def _store(self) -> None:
        """Add the oldest batch under way to the sums."""
        pending = self._under_way.popleft()
        self._exchange.finish(pending)
        self._allocate()
        for segment, values in pending.segments():
            total = self.segment_view(segment)
            total.add_(values.view(total.shape))

    def _allocate(self) -> None:
        """Allocate the sums of a step as zeros."""
        for name, all_rows in self._ownership.led_rows.items() if not self._sums else ():
            self._sums[name] = [(rows, self._gradients.zeros(name, rows)) for rows in all_rows]
