"""`GroupCollectives`: the collectives of torch.distributed as regions of elements, for one group.

Each is described once, as inputs and outputs with addresses (`isthmus.strategies.regions`). Inside a cluster the
vendor's library executes those that it has; all others are executed by their steps over the transport. Tensors that are
only moved are moved as bytes, so every dtype is carried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from isthmus.comm.group.collective_runner import Collective, CollectiveRunner
from isthmus.comm.group.collective_work import CollectiveWork, LocalWork
from isthmus.comm.group.composed.composed_sums import ComposedSums
from isthmus.comm.group.composed.composition import Composition, SumPath
from isthmus.comm.group.composed.move_chunks import BroadcastMove, GatherMove, Grid, GridMove, ScatterMove
from isthmus.comm.group.composed.sum_chunk import ComposedCall
from isthmus.comm.group.group_work import tensor_label
from isthmus.comm.group.host_tensors import HostTensors
from isthmus.comm.group.reduce_operation import ReduceOperation
from isthmus.comm.group.vendors.join_vendors import VendorGroups
from isthmus.comm.group.vendors.vendor_group import VendorGroup
from isthmus.core.errors import PlanError
from isthmus.strategies import RankProgram, Region, group_steps, plan_steps, rank_program, regions

MAX_PIECE_BYTES = 2**20
MIN_PIECE_BYTES = 2**17
"""Pieces of a collective: large enough to fill a message, small enough that ranks work on several at a time."""

DIRECT_BYTES = 2**16
"""Up to this size clusters exchange sums directly, and ranks inside a cluster use a tree (`plan_steps`)."""

Tensors = Sequence[torch.Tensor]


class GroupCollectives:
    """The collectives of rank `rank`; `clusters[r]` is the cluster of rank `r` of the group.

    `libraries` are the vendors' groups of the ranks in this cluster, by type of device; a group inside one cluster
    calls them. `composition` says how sums of a group that spans clusters use them; a named `strategy` replaces it for
    all-reduces. Only `senders` send to other clusters, if any are given; tensors on the host then go by steps alone.
    """

    def __init__(
        self,
        runner: CollectiveRunner,
        rank: int,
        clusters: Sequence[str],
        libraries: VendorGroups,
        composition: Composition | None,
        loss_message: Callable[[], str],
        strategy: str | None = None,
        senders: frozenset[int] = frozenset(),
    ) -> None:
        self._senders = senders
        self._runner, self._rank, self._clusters = runner, rank, tuple(clusters)
        self._libraries, self._loss_message = libraries, loss_message
        self._is_local, self._strategy = len(set(clusters)) == 1, strategy
        spans = composition is not None and not self._is_local
        self._composed = ComposedSums(runner, rank, clusters, composition) if spans and composition else None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self._clusters)

    def close(self, *, wait: bool) -> None:
        """Stop the threads of sums over several clusters, after all queued ones if `wait`."""
        if self._composed is not None:
            self._composed.close(wait=wait)

    def all_reduce(self, tensor: torch.Tensor, operation: ReduceOperation, opts: Any) -> dist.Work:
        """Reduce `tensor` (of any shape) in place over all ranks; every rank gets the same bits."""
        library = self._local_library(tensor, operation)
        path = SumPath.STEPS if library is not None else self._sum_path(tensor, operation)
        if path is not SumPath.STEPS:
            library = self._library(tensor)
        host = _memory([tensor], library, read=True)
        (flat,) = host.flat

        def finish() -> None:
            operation.finish(flat, self.size)
            host.store()

        label = f"allreduce {operation.name} {tensor_label(tensor)}"
        if self._composed is not None and path is not SumPath.STEPS:
            future = self._composed.submit(
                path, label, tensor, flat, operation, library, host.synchronize, finish, timeout_s(opts)
            )
            return CollectiveWork(future, "allreduce", [tensor])
        if library is not None:
            host.synchronize()
            return self._local_work(library.all_reduce(flat, operation), "allreduce", [tensor], finish)
        of = regions.all_reduce(flat.numel(), self.size)
        block = [(0, flat)]
        if self._strategy is None or self._is_local or not of:
            return self._submit(label, of, block, block, [tensor], host, finish, operation, opts)
        program = _named_program(self._strategy, flat.numel(), self._clusters, self._rank)
        collective = Collective(
            f"{label} by {self._strategy}",
            program,
            block,
            block,
            [tensor],
            operation.combine,
            prepare=host.synchronize,
            finish=finish,
        )
        return CollectiveWork(self._runner.submit(collective, timeout_s(opts)), "allreduce", [tensor])

    def reduce(self, tensor: torch.Tensor, root: int, operation: ReduceOperation, opts: Any) -> dist.Work:
        """Reduce `tensor` (of any shape) over all ranks into that of `root`; the others keep theirs."""
        host = HostTensors([tensor], read=True)
        (flat,) = host.flat

        def finish() -> None:
            if self._rank == root:
                operation.finish(flat, self.size)
                host.store()

        label = f"reduce to {root} {operation.name} {tensor_label(tensor)}"
        of = regions.reduce(flat.numel(), self.size, root)
        block = [(0, flat)]
        return self._submit(
            label, of, block, block if self._rank == root else [], [tensor], host, finish, operation, opts
        )

    def broadcast(self, tensor: torch.Tensor, root: int, opts: Any) -> dist.Work:
        """Copy the tensor (of any shape) of `root` to every rank."""
        library = self._local_library(tensor)
        host = _memory([tensor], library, read=True)
        flat = _as_bytes(host.flat[0])
        if library is not None:
            host.synchronize()
            return self._local_work(library.broadcast(flat, root), "broadcast", [tensor], host.store)
        label = f"broadcast of {root} {tensor_label(tensor)}"
        if (grid := self._grid_for(tensor)) is not None:
            library = self._library(tensor)
            host = _memory([tensor], library, read=True)
            flat = _as_bytes(host.flat[0])
            move = BroadcastMove(grid, self._rank, root, flat)
            return self._composed_move(label, flat, library, move, [tensor], host, host.store, opts)
        of = regions.broadcast(flat.numel(), self.size, root)
        mine = [(0, flat)]
        return self._submit(label, of, mine if self._rank == root else [], mine, [tensor], host, host.store, None, opts)

    def all_gather(self, outputs: Tensors, tensor: torch.Tensor, opts: Any) -> dist.Work:
        """Fill `outputs[r]` with the tensor of rank `r`; sizes may differ between ranks."""
        sizes = [one.nbytes for one in outputs]
        _check_block(sizes[self._rank], tensor, "the input")
        library = self._local_library(tensor) if len(set(sizes)) == 1 else None
        sent, got = _memory([tensor], library, read=True), _memory(outputs, library, read=False)
        if library is not None:
            sent.synchronize()
            work = library.all_gather([_as_bytes(one) for one in got.flat], _as_bytes(sent.flat[0]))
            return self._local_work(work, "allgather", list(outputs), got.store)
        label = f"allgather {tensor.dtype} {_sizes_label(sizes)}"
        if 0 < sum(sizes) <= DIRECT_BYTES:
            return self._all_gather_few_bytes(label, sizes, sent, got, [tensor, *outputs], opts)
        of = regions.all_gather(sizes)
        outs = _at_starts(got.flat, sizes)
        return self._move(label, of, [(outs[self._rank][0], sent.flat[0])], outs, [tensor, *outputs], sent, got, opts)

    def _all_gather_few_bytes(
        self,
        label: str,
        sizes: Sequence[int],
        sent: HostTensors,
        got: HostTensors,
        tensors: list[torch.Tensor],
        opts: Any,
    ) -> dist.Work:
        """Gather by a maximum over zeros and the own bytes: one message per link of the tree, not one per rank."""
        row = torch.zeros(sum(sizes), dtype=torch.uint8)
        parts = row.split(list(sizes))

        def prepare() -> None:
            sent.synchronize()
            parts[self._rank].copy_(_as_bytes(sent.flat[0]))

        def finish() -> None:
            for into, part in zip(got.flat, parts, strict=True):
                _as_bytes(into).copy_(part)
            got.store()

        of, block = regions.all_reduce(len(row), self.size), [(0, row)]
        maximum = ReduceOperation.maximum()
        return self._submit(label, of, block, block, tensors, sent, finish, maximum, opts, prepare=prepare)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> dist.Work:
        """Fill `output` [ranks * N] with the tensors [N] of all ranks, one after the other."""
        if output.numel() != tensor.numel() * self.size or output.dtype != tensor.dtype:
            raise PlanError(f"{tensor_label(tensor)} of {self.size} ranks does not fill {tensor_label(output)}")
        library = self._local_library(tensor)
        if library is None:
            if not output.is_contiguous():
                raise PlanError("the output of all_gather_into_tensor must be contiguous")
            if (grid := self._grid_for(output)) is not None:
                library = self._library(tensor)
                sent, got = _memory([tensor], library, read=True), _memory([output], library, read=False)
                flat = _as_bytes(got.flat[0])
                gathers = GatherMove(grid, self._rank, _as_bytes(sent.flat[0]))
                label = f"all_gather_single {tensor_label(tensor)}"
                return self._composed_move(label, flat, library, gathers, [output, tensor], sent, got.store, opts)
            return self.all_gather(list(output.detach().view(-1).split(max(tensor.numel(), 1)))[: self.size]
                                   if output.numel() else [output] * self.size, tensor, opts)  # fmt: skip
        sent, got = _memory([tensor], library, read=True), _memory([output], library, read=False)
        sent.synchronize()
        work = library.all_gather_flat(_as_bytes(got.flat[0]), _as_bytes(sent.flat[0]))
        return self._local_work(work, "allgather", [output], got.store)

    def reduce_scatter(self, output: torch.Tensor, inputs: Tensors, operation: ReduceOperation, opts: Any) -> dist.Work:
        """Reduce `inputs[r]` over all ranks into the output of rank `r`; sizes may differ between ranks."""
        sizes = [one.numel() for one in inputs]
        _check_block(sizes[self._rank] * output.element_size(), output, "the output")
        library = self._local_library(output, operation) if len(set(sizes)) == 1 else None
        sent, got = _memory(inputs, library, read=True), _memory([output], library, read=False)
        ins = _at_starts(sent.flat, sizes)

        def finish() -> None:
            operation.finish(got.flat[0], self.size)
            got.store()

        if library is not None:
            sent.synchronize()
            work = library.reduce_scatter(got.flat[0], sent.flat, operation)
            return self._local_work(work, "reduce_scatter", [output], finish)
        label = f"reduce_scatter {operation.name} {output.dtype} {_sizes_label(sizes)}"
        of = regions.reduce_scatter(sizes)
        outs = [(ins[self._rank][0], got.flat[0])]
        return self._submit(label, of, ins, outs, [output, *inputs], sent, finish, operation, opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, operation: ReduceOperation, opts: Any
    ) -> dist.Work:
        """Reduce the blocks of `tensor` [ranks * N], in rank order, each into the output [N] of its rank."""
        if tensor.numel() != output.numel() * self.size or output.dtype != tensor.dtype:
            raise PlanError(f"{tensor_label(tensor)} does not have a {tensor_label(output)} for {self.size} ranks")
        library = self._local_library(output, operation)
        if library is None and (grid := self._grid_for(tensor, operation)) is not None:
            return self._composed_scatter(grid, output, tensor, operation, opts)
        if library is None or not output.is_contiguous():
            parts = list(tensor.detach().contiguous().view(-1).split(max(output.numel(), 1))) if tensor.numel() else []
            return self.reduce_scatter(output, parts or [tensor] * self.size, operation, opts)
        sent, got = _memory([tensor], library, read=True), _memory([output], library, read=False)

        def finish() -> None:
            operation.finish(got.flat[0], self.size)
            got.store()

        sent.synchronize()
        work = library.reduce_scatter_flat(got.flat[0], sent.flat[0], operation)
        return self._local_work(work, "reduce_scatter", [output], finish)

    def _composed_scatter(
        self, grid: Grid, output: torch.Tensor, tensor: torch.Tensor, operation: ReduceOperation, opts: Any
    ) -> dist.Work:
        library = self._library(tensor)
        sent, got = _memory([tensor], library, read=True), _memory([output], library, read=False)

        def finish() -> None:
            operation.finish(got.flat[0], self.size)
            got.store()

        label = f"reduce_scatter_single {operation.name} {tensor_label(tensor)}"
        move = ScatterMove(grid, self._rank, sent.flat[0], operation)
        return self._composed_move(label, got.flat[0], library, move, [output, tensor], sent, finish, opts)

    def all_to_all(self, outputs: Tensors, inputs: Tensors, opts: Any) -> dist.Work:
        """Send `inputs[d]` to rank `d`, and receive `outputs[s]` from rank `s`; sizes may all differ."""
        sent, got = HostTensors(inputs, read=True), HostTensors(outputs, read=False)
        rank, size = self._rank, self.size
        of = regions.all_to_all(rank, [one.nbytes for one in inputs], [one.nbytes for one in outputs])
        ins = [(regions.pair_start(rank, to, size), one) for to, one in enumerate(sent.flat)]
        outs = [(regions.pair_start(source, rank, size), one) for source, one in enumerate(got.flat)]
        label = f"alltoall {inputs[0].dtype}"
        return self._move(label, of, ins, outs, [*outputs, *inputs], sent, got, opts, MAX_PIECE_BYTES)

    def gather(self, outputs: Tensors, tensor: torch.Tensor, root: int, opts: Any) -> dist.Work:
        """Fill `outputs[r]` of `root` with the tensor of rank `r`; all have one size."""
        sent, got = HostTensors([tensor], read=True), HostTensors(outputs, read=False)
        sizes = [tensor.nbytes] * self.size
        if self._rank == root:
            for one in outputs:
                _check_block(tensor.nbytes, one, "an output")
        starts = _at_starts([tensor] * self.size, sizes)
        outs = _at_starts(got.flat, sizes) if self._rank == root else []
        label = f"gather to {root} {tensor_label(tensor)}"
        mine = [(starts[self._rank][0], sent.flat[0])]
        return self._move(label, regions.gather(sizes, root), mine, outs, [tensor, *outputs], sent, got, opts)

    def scatter(self, output: torch.Tensor, inputs: Tensors, root: int, opts: Any) -> dist.Work:
        """Fill the output of rank `r` with `inputs[r]` of `root`; all have one size."""
        sent, got = HostTensors(inputs, read=True), HostTensors([output], read=False)
        sizes = [output.nbytes] * self.size
        for one in inputs:
            _check_block(output.nbytes, one, "an input")
        starts = _at_starts([output] * self.size, sizes)
        ins = _at_starts(sent.flat, sizes) if self._rank == root else []
        label = f"scatter of {root} {tensor_label(output)}"
        outs = [(starts[self._rank][0], got.flat[0])]
        return self._move(label, regions.scatter(sizes, root), ins, outs, [output, *inputs], sent, got, opts)

    def barrier(self, opts: Any) -> dist.Work:
        """Complete when every rank has called it."""
        flag = torch.zeros(1, dtype=torch.uint8)
        host = HostTensors([flag], read=True)
        block = [(0, flag)]
        of = regions.all_reduce(1, self.size)
        return self._submit("barrier", of, block, block, [flag], host, host.store, ReduceOperation.maximum(), opts)

    def _move(
        self,
        label: str,
        of: list[Region],
        inputs: Sequence[tuple[int, torch.Tensor]],
        outputs: Sequence[tuple[int, torch.Tensor]],
        tensors: list[torch.Tensor],
        sent: HostTensors,
        got: HostTensors,
        opts: Any,
        piece_bytes: int | None = None,
    ) -> dist.Work:
        """Move tensors as bytes; addresses are in bytes."""
        ins, outs = ([(at, _as_bytes(one)) for at, one in blocks if one.numel()] for blocks in (inputs, outputs))
        return self._submit(label, of, ins, outs, tensors, sent, got.store, None, opts, piece_bytes)

    def _submit(
        self,
        label: str,
        of: list[Region],
        inputs: Sequence[tuple[int, torch.Tensor]],
        outputs: Sequence[tuple[int, torch.Tensor]],
        tensors: list[torch.Tensor],
        host: HostTensors,
        finish: Callable[[], None],
        operation: ReduceOperation | None,
        opts: Any,
        piece_bytes: int | None = None,
        *,
        prepare: Callable[[], None] | None = None,
    ) -> dist.Work:
        """Queue the collective; `piece_bytes` is for regions that differ between ranks.

        `prepare`, by default `host.synchronize`, makes the inputs ready.
        """
        element_bytes = next((one.element_size() for _, one in (*inputs, *outputs)), 1)
        num_bytes = sum(one.stop - one.start for one in of) * element_bytes if piece_bytes is None else 0
        pieces = min(max(num_bytes // (4 * self.size), MIN_PIECE_BYTES), MAX_PIECE_BYTES)
        collective = Collective(
            label,
            _program(
                tuple(of),
                self._clusters,
                self._rank,
                max((piece_bytes or pieces) // element_bytes, 1),
                self._senders,
                direct=num_bytes <= DIRECT_BYTES,
            ),
            inputs,
            outputs,
            tensors,
            operation.combine if operation else None,
            prepare=prepare or host.synchronize,
            finish=finish,
        )
        return CollectiveWork(self._runner.submit(collective, timeout_s(opts)), label.split()[0], tensors)

    def _library(self, tensor: torch.Tensor) -> VendorGroup | None:
        """Return the library for `tensor` (of any shape) inside this cluster: that of its device, else the host's."""
        return self._libraries.get(tensor.device.type) or self._libraries.get("cpu")

    def _local_library(self, tensor: torch.Tensor, operation: ReduceOperation | None = None) -> VendorGroup | None:
        """Return the library that executes a collective of `tensor` (of any shape); None if its steps are executed."""
        library = self._library(tensor) if self._is_local and tensor.numel() else None
        if library is None or (operation is not None and not library.reduces(operation, tensor.dtype)):
            return None
        return library

    def _sum_path(self, tensor: torch.Tensor, operation: ReduceOperation) -> SumPath:
        """Return the way of the sum of `tensor` (of any shape) over several clusters."""
        if self._composed is None or self._strategy is not None or not tensor.numel():
            return SumPath.STEPS
        if self._senders and tensor.device.type == "cpu":
            return SumPath.STEPS
        return self._composed.composition.path(tensor.nbytes, tensor.dtype, operation, len(set(self._clusters)))

    def _grid_for(self, tensor: torch.Tensor, operation: ReduceOperation | None = None) -> Grid | None:
        """Return the ranks by cluster if libraries and messages together move or sum `tensor`, the whole of it."""
        composed = self._composed
        if composed is None or composed.grid is None or (self._senders and tensor.device.type == "cpu"):
            return None
        if operation is not None and not composed.composition.sums(tensor.dtype, operation):
            return None
        return composed.grid if tensor.nbytes > composed.composition.chunk_bytes else None

    def _composed_move(
        self,
        label: str,
        flat: torch.Tensor,
        library: VendorGroup | None,
        move: GridMove,
        tensors: list[torch.Tensor],
        host: HostTensors,
        finish: Callable[[], None],
        opts: Any,
    ) -> dist.Work:
        if self._composed is None:
            raise RuntimeError("a group inside one cluster composes nothing")
        call = ComposedCall.of(label, flat, library, host.synchronize, finish)
        future = self._composed.submit_move(call, move, tensors, timeout_s(opts))
        return CollectiveWork(future, label.split()[0], tensors)

    def _local_work(
        self, work: dist.Work, operation: str, tensors: list[torch.Tensor], finish: Callable[[], None]
    ) -> dist.Work:
        return LocalWork(work, operation, self._loss_message, tensors, finish)


@lru_cache(maxsize=128)
def _program(
    of: tuple[Region, ...],
    clusters: tuple[str, ...],
    rank: int,
    piece_elements: int,
    senders: frozenset[int],
    *,
    direct: bool,
) -> RankProgram:
    """Return the program of `rank` for the regions `of`."""
    return rank_program(plan_steps(of, clusters, piece_elements, direct=direct, senders=senders), of, rank)


@lru_cache(maxsize=128)
def _named_program(name: str, num_elements: int, clusters: tuple[str, ...], rank: int) -> RankProgram:
    """Return the program of `rank` in an all-reduce by strategy `name`."""
    of = regions.all_reduce(num_elements, len(clusters))
    return rank_program(group_steps(name, clusters, num_elements), of, rank)


def _memory(tensors: Tensors, library: VendorGroup | None, *, read: bool) -> HostTensors:
    """Return flat memory for `tensors`, of any shape: on their device if `library` takes it, else on the host."""
    kind = tensors[0].device.type if tensors else "cpu"
    return HostTensors(tensors, read=read, on_device=library is not None and library.vendor.device_type == kind)


def _as_bytes(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def _at_starts(blocks: Tensors, sizes: Sequence[int]) -> list[tuple[int, torch.Tensor]]:
    """Return `blocks` with their addresses, one after the other."""
    return list(zip(accumulate(sizes, initial=0), blocks, strict=False))


def _sizes_label(sizes: Sequence[int]) -> str:
    return str(sizes[0]) if len(set(sizes)) == 1 else "/".join(map(str, sizes[:16]))


def _check_block(num_bytes: int, tensor: torch.Tensor, what: str) -> None:
    if tensor.nbytes != num_bytes:
        raise PlanError(f"{what} {tensor_label(tensor)} has {tensor.nbytes} bytes, where {num_bytes} are expected")


def timeout_s(opts: Any) -> float | None:
    """Return the time-out of the options of a call; None if they have none."""
    timeout: timedelta | None = getattr(opts, "timeout", None)
    return timeout.total_seconds() if timeout is not None and timeout.total_seconds() > 0 else None
