"""`WeightGatherer`: weights of which this rank keeps the rows that it leads, and gathers the others for their use.

ZeRO stage 3 (S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020,
section 5.3). The memory of a parameter comes and goes below the tensors that refer to it, those of autograd included.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import torch
from torch import nn

from isthmus.train.update.buckets import ParameterSegment
from isthmus.train.update.gradient_reducer import MAX_UNDER_WAY
from isthmus.train.update.ownership import LocalRows, Ownership
from isthmus.train.update.sharding.shard_exchange import PendingBatch, ShardExchange
from isthmus.train.update.weight_shard import WeightShard, view_rows

KeptRows = dict[str, list[tuple[LocalRows, torch.Tensor]]]
"""Rows that a rank keeps, by full-model name of their parameter."""


class WeightGatherer:
    """The memory of `parameters`, by full-model name, of the dtype that the model computes with; it begins released.

    `shards` are the rows that this rank updates, with their fp32 master weights, which are the kept rows themselves if
    the model computes in fp32 on their device.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        shards: Iterable[WeightShard],
        ownership: Ownership,
        exchange: ShardExchange,
    ) -> None:
        self._parameters, self._ownership, self._exchange = parameters, ownership, exchange
        self._kept: KeptRows = {}
        for one in shards:
            working = parameters[one.name].detach()
            is_master = (working.dtype, working.device) == (one.weight.dtype, one.weight.device)
            kept = one.weight.detach() if is_master else one.view_in(working).clone()
            self._kept.setdefault(one.name, []).append((one.rows, kept))
        self._batches_of: dict[str, list[int]] = {}
        for number, batch in exchange.batches.items():
            for name in batch.names:
                self._batches_of.setdefault(name, []).append(number)
        self._under_way: dict[int, PendingBatch] = {}
        self._gathered: set[int] = set()
        for one in parameters.values():
            _release(one)

    @property
    def num_bytes(self) -> int:
        """Bytes of gathered weights, and of those under way."""
        here = sum(int(one.untyped_storage().nbytes()) for one in self._parameters.values())
        return here + sum(one.num_bytes for one in self._under_way.values())

    @property
    def kept_bytes(self) -> int:
        """Bytes of the rows that this rank keeps."""
        return sum(kept.nbytes for rows in self._kept.values() for _, kept in rows)

    def rows_of(self, tensors: Mapping[str, torch.Tensor]) -> KeptRows:
        """Return copies of the kept rows of other weights `tensors`, of the local shapes, for `swap_rows`."""
        return {
            name: [
                (rows, view_rows(tensors[name], rows).to(kept.device, kept.dtype, copy=True).contiguous())
                for rows, kept in of_name
            ]
            for name, of_name in self._kept.items()
        }

    def swap_rows(self, rows: KeptRows) -> KeptRows:
        """Gather from `rows` from now on, and return the rows before; what was gathered is freed. All owners do so."""
        self.release_all()
        before, self._kept = self._kept, rows
        return before

    def refresh(self, shards: Iterable[WeightShard]) -> None:
        """Copy new master weights to the kept rows."""
        for one in shards:
            for rows, kept in self._kept[one.name]:
                if rows == one.rows and kept.data_ptr() != one.weight.data_ptr():
                    kept.copy_(one.weight.detach())

    def start(self, names: Collection[str]) -> None:
        """Start to gather the weights `names`; all owners in the cluster do so in one order."""
        for number in self._numbers(names):
            if number not in self._gathered and number not in self._under_way:
                like = self._parameters[next(iter(self._exchange.batches[number].names))].detach()
                self._under_way[number] = self._exchange.copy(number, self._kept_view, like)

    def gather(self, names: Collection[str]) -> None:
        """Gather the weights `names`, or wait for those under way; raises `PeerError` if a peer is lost."""
        self.start(names)
        for number in self._numbers(names):
            if number in self._under_way:
                self._store(number)

    def gather_all(self) -> None:
        """Gather all weights, few batches at a time."""
        waiting = [number for number in sorted(self._exchange.batches) if number not in self._gathered]
        for place, number in enumerate(waiting):
            for later in waiting[place : place + MAX_UNDER_WAY]:
                if later not in self._under_way:
                    like = self._parameters[next(iter(self._exchange.batches[later].names))].detach()
                    self._under_way[later] = self._exchange.copy(later, self._kept_view, like)
            self._store(number)

    def release(self, names: Collection[str]) -> None:
        """Free the memory of the weights `names`."""
        for name in names:
            _release(self._parameters[name])
        self._gathered.difference_update(self._numbers(names))

    def release_all(self) -> None:
        """Free the memory of all weights, and forget what is under way."""
        self.release(self._parameters)
        self._under_way.clear()

    def _numbers(self, names: Collection[str]) -> list[int]:
        """Return the batches of `names`, in the order of all owners."""
        return sorted({number for name in names for number in self._batches_of[name]})

    def _store(self, number: int) -> None:
        """Wait for a batch, and copy it to its parameters."""
        pending = self._under_way.pop(number)
        self._exchange.finish(pending)
        for segment, values in pending.segments():
            memory = view_rows(_memory(self._parameters[segment.name]), self._ownership.locate(segment))
            memory.copy_(values.view(memory.shape))
        self._gathered.add(number)

    def _kept_view(self, segment: ParameterSegment) -> torch.Tensor:
        """Return the kept rows of a segment, as a view; raises `KeyError` if this rank does not lead it."""
        rows = self._ownership.locate(segment)
        for held, kept in self._kept.get(segment.name, ()):
            if held.at <= rows.at and rows.at + rows.num_rows <= held.at + held.num_rows:
                return view_rows(kept, replace(rows, at=rows.at - held.at))
        raise KeyError(f"this rank does not keep {segment}")


def _release(parameter: nn.Parameter) -> None:
    parameter.untyped_storage().resize_(0)


def _memory(parameter: nn.Parameter) -> torch.Tensor:
    """Return the memory of a parameter, allocated if need be, as a tensor of its own.

    What is written to it does not count as a change of the parameter, of which autograd keeps track.
    """
    data, storage = parameter.detach(), parameter.untyped_storage()
    num_bytes = data.numel() * data.element_size()
    if storage.nbytes() < num_bytes:
        storage.resize_(num_bytes)
    return torch.empty(0, dtype=data.dtype, device=data.device).set_(storage, 0, data.shape, data.stride())
