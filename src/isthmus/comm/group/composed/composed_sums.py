"""`ComposedSums`: sums and copies over several clusters, by the vendor's library in each and by messages between them.

Source: section 2.3.3 of the report on heterogeneous training: same-kind, cross-kind, same-kind, and figure 11.

A tensor is cut into chunks. The library of each cluster reduces a chunk, so that every rank leads a share of it;
ranks that lead the same elements exchange their sums over the transport, from host memory; the library gathers the
shares. Chunks overlap: while some cross the network, the library works on the next. All ranks of a cluster call the
library in one order: one thread runs one sum after the other, and a chunk is gathered `CHUNKS_AHEAD` chunks behind.

All-gathers, reduce-scatters and broadcasts of clusters with equally many ranks go the same way (`move_chunks.py`).

A short tensor goes by one rank of each cluster (figure 11): the library reduces it to the first rank, which sends the
sum to the second rank of the other cluster; the library then adds the sum of the first rank, the foreign sum of the
second, and zeros of the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache, partial

import torch

from isthmus.comm.group.collective_runner import CollectiveRunner, CollectiveTurn
from isthmus.comm.group.composed.composition import Composition, SumPath
from isthmus.comm.group.composed.move_chunks import GridMove, grid_of
from isthmus.comm.group.composed.shares import cut_chunks, share_regions
from isthmus.comm.group.composed.sum_chunk import ComposedCall, ComposedChunk, SumChunk
from isthmus.comm.group.reduce_operation import ReduceOperation
from isthmus.comm.group.run_program import run_program
from isthmus.comm.group.transport_messages import TransportMessages, sends_of
from isthmus.comm.group.vendors.vendor_group import VendorGroup
from isthmus.strategies import Message, RankProgram, Region, plan_steps, rank_program

CHUNK_BYTES = 4 * 2**20
CHUNKS_AHEAD = 6
"""Chunks that cross the network at a time: 24 MiB, which fill 10 Gbit/s over 20 ms."""

PIECE_BYTES = 2**20


class ComposedSums:
    """Sums of a group; `rank` is this one of the group, `clusters[r]` the cluster of its rank `r`."""

    def __init__(self, runner: CollectiveRunner, rank: int, clusters: Sequence[str], composition: Composition) -> None:
        self._runner, self._rank, self._clusters = runner, rank, tuple(clusters)
        self.composition, self.grid = composition, grid_of(clusters)
        self._near = [one for one, name in enumerate(clusters) if name == clusters[rank]]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="isthmus-composed")
        self._network = ThreadPoolExecutor(CHUNKS_AHEAD, thread_name_prefix="isthmus-chunk")

    def submit(
        self,
        path: SumPath,
        label: str,
        tensor: torch.Tensor,
        flat: torch.Tensor,
        operation: ReduceOperation,
        library: VendorGroup | None,
        prepare: Callable[[], None],
        finish: Callable[[], None],
        timeout_s: float | None,
    ) -> Future[None]:
        """Queue the sum of `flat` [N], the memory of the caller's `tensor` (of any shape), or a copy of it.

        `library` is None in a cluster with one rank of the group. `prepare` waits until `flat` has its values,
        `finish` is called when it has the sums.
        """
        call = ComposedCall.of(label, flat, library, prepare, finish)
        if path is SumPath.SHORT:
            return self._runner.submit_run(partial(self._short, call, operation), self._thread, [tensor], timeout_s, 2)
        chunks = cut_chunks(flat.numel(), max(CHUNK_BYTES // flat.element_size(), 1), self._clusters)
        piece, place = max(PIECE_BYTES // flat.element_size(), 1), self._near.index(self._rank)
        programs = [_cross_program(stop - start, self._clusters, self._rank, piece) for start, stop in chunks]
        parts = [partial(SumChunk, call, operation, place, len(self._near), *span) for span in chunks]
        return self._submit(call, programs, parts, [tensor], timeout_s)

    def submit_move(
        self, call: ComposedCall, move: GridMove, tensors: Sequence[torch.Tensor], timeout_s: float | None
    ) -> Future[None]:
        """Queue the copy or sum `move`; `tensors`, of any shape, are those of the caller."""
        chunks, piece = move.cut(CHUNK_BYTES), max(PIECE_BYTES // call.flat.element_size(), 1)
        programs = [_grid_program(move.regions(b - a), self._clusters, self._rank, piece) for a, b in chunks]
        parts = [partial(move.chunk, call, *span) for span in chunks]
        return self._submit(call, programs, parts, tensors, timeout_s)

    def _submit(
        self,
        call: ComposedCall,
        programs: Sequence[RankProgram],
        parts: Sequence[Callable[[], ComposedChunk]],
        tensors: Sequence[torch.Tensor],
        timeout_s: float | None,
    ) -> Future[None]:
        run = partial(self._in_chunks, call, programs, parts)
        return self._runner.submit_run(run, self._thread, tensors, timeout_s, 1 + len(programs))

    def close(self, *, wait: bool) -> None:
        """Stop the threads, after all queued sums if `wait`."""
        self._thread.shutdown(wait=wait, cancel_futures=not wait)
        self._network.shutdown(wait=wait, cancel_futures=not wait)

    def _in_chunks(
        self,
        call: ComposedCall,
        programs: Sequence[RankProgram],
        parts: Sequence[Callable[[], ComposedChunk]],
        turn: CollectiveTurn,
    ) -> None:
        agreement = self._agreement(call, turn)
        crossing = [
            self._runner.messages(turn.sequence + 1 + number, call.label, sends_of(program), turn.limit_s)
            for number, program in enumerate(programs)
        ]
        with self._owing(call, turn, [agreement, *crossing]):
            self._agree(agreement)
            with call.memory.stream(call.flat.device, call.mark):
                ahead: deque[tuple[ComposedChunk, Future[None]]] = deque()
                for part, program, messages in zip(parts, programs, crossing, strict=True):
                    chunk = part()
                    chunk.begin(turn.limit_s)
                    ahead.append((chunk, self._network.submit(chunk.exchange, program, messages)))
                    if len(ahead) == CHUNKS_AHEAD:
                        _end(ahead, turn.limit_s)
                while ahead:
                    _end(ahead, turn.limit_s)
            call.finish()

    def _short(self, call: ComposedCall, operation: ReduceOperation, turn: CollectiveTurn) -> None:
        """Figure 11; the group spans two clusters and the operation adds."""
        away = [one for one in range(len(self._clusters)) if one not in self._near]
        here, there = self._near[min(1, len(self._near) - 1)], away[min(1, len(away) - 1)]
        leads, takes = self._rank == self._near[0], self._rank == here
        agreement = self._agreement(call, turn)
        outgoing = [Message(there, 0)] if leads else []
        messages = self._runner.messages(turn.sequence + 1, call.label, outgoing, turn.limit_s)
        limit = timedelta(seconds=turn.limit_s)
        with self._owing(call, turn, [agreement, messages]):
            self._agree(agreement)
            foreign = torch.empty(call.flat.numel() if takes else 0, dtype=call.flat.dtype)
            receive = messages.receive(Message(away[0], 0), foreign) if takes else None
            with call.memory.stream(call.flat.device, call.mark):
                total = call.flat.clone()
                if call.library is not None:
                    call.library.reduce(total, 0, operation).wait(limit)
                if leads:
                    host, wait = call.memory.to_host(total)
                    wait()
                    messages.send(Message(there, 0), host.clone())
                term = total if leads else _zeros(total)
                if receive is not None:
                    messages.wait(away[0], receive)
                    term = term + foreign.to(term.device)
                if call.library is not None:
                    call.library.all_reduce(term, operation).wait(limit)
                call.flat.copy_(term)
            call.finish()

    def _agreement(self, call: ComposedCall, turn: CollectiveTurn) -> TransportMessages:
        """Return the messages by which the ranks of this cluster agree on the call, before the library is called."""
        owed = sends_of(_agreement_program(self._clusters, self._rank))
        return self._runner.messages(turn.sequence, call.label, owed, turn.limit_s)

    def _agree(self, messages: TransportMessages) -> None:
        flag = [(0, torch.zeros(1, dtype=torch.uint8))]
        run_program(_agreement_program(self._clusters, self._rank), flag, flag, torch.maximum, messages)

    @contextmanager
    def _owing(self, call: ComposedCall, turn: CollectiveTurn, several: Sequence[TransportMessages]) -> Iterator[None]:
        """Run a block that owes messages; if it fails, so do they, and operations of the library that wait."""
        with self._runner.failing(several):
            try:
                turn.wait_for_earlier()
                call.prepare()
                yield
            except Exception:
                if call.library is not None:
                    call.library.abort()
                raise


def _end(ahead: deque[tuple[ComposedChunk, Future[None]]], limit_s: float) -> None:
    chunk, exchanged = ahead.popleft()
    exchanged.result(limit_s)
    chunk.end(limit_s)


def _zeros(like: torch.Tensor) -> torch.Tensor:
    """Return what changes no sum: zeros, negative ones for floating point, since -0.0 + 0.0 is 0.0; [N]."""
    return torch.full_like(like, -0.0) if like.is_floating_point() else torch.zeros_like(like)


@lru_cache(maxsize=128)
def _cross_program(num_elements: int, clusters: tuple[str, ...], rank: int, piece_elements: int) -> RankProgram:
    """Return what `rank` exchanges of a chunk."""
    of = share_regions(num_elements, clusters)
    return rank_program(plan_steps(of, clusters, piece_elements), of, rank)


@lru_cache(maxsize=128)
def _grid_program(of: tuple[Region, ...], clusters: tuple[str, ...], rank: int, piece_elements: int) -> RankProgram:
    """Return what `rank` exchanges of a chunk of a copy."""
    return rank_program(plan_steps(of, clusters, piece_elements), of, rank)


@lru_cache(maxsize=128)
def _agreement_program(clusters: tuple[str, ...], rank: int) -> RankProgram:
    """Return the exchange of one byte inside the cluster of `rank`."""
    near = tuple(one for one, name in enumerate(clusters) if name == clusters[rank])
    of = (Region(0, 1, near, near),)
    return rank_program(plan_steps(of, clusters, 1), of, rank)
