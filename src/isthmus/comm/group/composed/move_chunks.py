"""All-gathers, reduce-scatters and broadcasts over clusters, chunk by chunk: library, messages, library.

Every cluster has equally many ranks of the group (`grid_of`). Ranks of one place in their clusters exchange with each
other alone, so every rank, and every network card, sends a share; each byte, or sum, goes once to each cluster that
needs it. Source: section 2.3.3 of the report on heterogeneous training.

Shapes: C clusters of P ranks each; N elements of a rank's block, of which a chunk has L.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch

from isthmus.comm.group.composed.shares import share
from isthmus.comm.group.composed.sum_chunk import ComposedCall, ComposedChunk
from isthmus.comm.group.reduce_operation import ReduceOperation
from isthmus.comm.group.run_program import Block, Combine, run_program
from isthmus.comm.group.transport_messages import TransportMessages
from isthmus.strategies import RankProgram, Region

Grid = tuple[tuple[int, ...], ...]
"""The ranks of each cluster, in order: `grid[c][p]`."""


def grid_of(clusters: Sequence[str]) -> Grid | None:
    """Return the ranks by cluster; None if clusters have unequally many, or one each, which need no library."""
    near: dict[str, list[int]] = {}
    for rank, name in enumerate(clusters):
        near.setdefault(name, []).append(rank)
    sizes = {len(ranks) for ranks in near.values()}
    return tuple(tuple(ranks) for ranks in near.values()) if len(sizes) == 1 and sizes != {1} else None


class GridMove(Protocol):
    """One collective of a grid, as a rank takes part in it."""

    def cut(self, chunk_bytes: int) -> list[tuple[int, int]]:
        """Return (start, stop) of the chunks of a block [N], each about `chunk_bytes` at a rank."""
        ...

    def regions(self, num_elements: int) -> tuple[Region, ...]:
        """Return what crosses between clusters of a chunk of `num_elements` of a block."""
        ...

    def chunk(self, call: ComposedCall, start: int, stop: int) -> ComposedChunk:
        """Return the elements [start, stop) of a block."""
        ...


class GatherMove:
    """Fills `call.flat` [C P N] with the blocks [N] of all ranks, in the order of ranks; `own` is this rank's."""

    def __init__(self, grid: Grid, rank: int, own: torch.Tensor) -> None:
        self._grid, self._own = grid, own
        self._cluster, self._place = _find(grid, rank)

    def cut(self, chunk_bytes: int) -> list[tuple[int, int]]:
        """Return the chunks of a block."""
        return _cut(self._own, len(self._grid) * len(self._grid[0]), chunk_bytes)

    def regions(self, num_elements: int) -> tuple[Region, ...]:
        """Each cluster's block of this place goes to all of this place."""
        column = tuple(row[self._place] for row in self._grid)
        return tuple(
            Region(number * num_elements, (number + 1) * num_elements, (one,), tuple(sorted(column)))
            for number, one in enumerate(column)
        )

    def chunk(self, call: ComposedCall, start: int, stop: int) -> ComposedChunk:
        """Return the chunk: blocks of this place [C, L] cross, then the library gathers those of all places."""
        size, grid = stop - start, self._grid
        column = self._own.new_empty(len(grid) * size)
        first = self._cluster * size
        column[first : first + size] = self._own[start:stop]

        def gather(limit: timedelta) -> None:
            rows = column.new_empty(len(grid[0]) * column.numel())
            if call.library is not None:
                call.library.all_gather_flat(rows, column).wait(limit)
            found, blocks = rows.view(len(grid[0]), len(grid), size), call.flat.view(-1, self._own.numel())
            for number, row in enumerate(grid):
                for place, rank in enumerate(row):
                    blocks[rank, start:stop] = found[place, number]

        return _Chunk(call, column, (first, size), (0, column.numel()), None, None, gather)


class ScatterMove:
    """Sums the blocks [N] of `inputs` [C P N] over all ranks, each into `call.flat` [N] of its rank."""

    def __init__(self, grid: Grid, rank: int, inputs: torch.Tensor, operation: ReduceOperation) -> None:
        self._grid, self._inputs, self._operation = grid, inputs, operation
        self._cluster, self._place = _find(grid, rank)

    def cut(self, chunk_bytes: int) -> list[tuple[int, int]]:
        """Return the chunks of a block."""
        ranks = len(self._grid) * len(self._grid[0])
        return _cut(self._inputs[: self._inputs.numel() // ranks], ranks, chunk_bytes)

    def regions(self, num_elements: int) -> tuple[Region, ...]:
        """The clusters' sums for a rank of this place go to it."""
        column = tuple(row[self._place] for row in self._grid)
        return tuple(
            Region(number * num_elements, (number + 1) * num_elements, tuple(sorted(column)), (one,))
            for number, one in enumerate(column)
        )

    def chunk(self, call: ComposedCall, start: int, stop: int) -> ComposedChunk:
        """Return the chunk: the library sums [P, C, L] to [C, L] at each place, which cross to their ranks."""
        size, grid = stop - start, self._grid
        column = call.flat.new_empty(len(grid) * size)

        def reduce(limit: timedelta) -> None:
            blocks = self._inputs.view(len(grid) * len(grid[0]), -1)
            rows = torch.cat([blocks[row[place], start:stop] for place in range(len(grid[0])) for row in grid])
            if call.library is not None:
                call.library.reduce_scatter_flat(column, rows, self._operation).wait(limit)

        first = self._cluster * size

        def store(limit: timedelta) -> None:
            del limit
            call.flat[start:stop] = column[first : first + size]

        combine = self._operation.combine
        return _Chunk(call, column, (0, column.numel()), (first, size), combine, reduce, store)


class BroadcastMove:
    """Copies `call.flat` [N] of rank `root` to that of every rank."""

    def __init__(self, grid: Grid, rank: int, root: int, flat: torch.Tensor) -> None:
        self._grid, self._flat = grid, flat
        self._cluster, self._place = _find(grid, rank)
        self._source, self._root_place = _find(grid, root)

    def cut(self, chunk_bytes: int) -> list[tuple[int, int]]:
        """Return the chunks of the tensor."""
        return _cut(self._flat, 1, chunk_bytes)

    def regions(self, num_elements: int) -> tuple[Region, ...]:
        """Each place of the root's cluster sends its share to this place of the others."""
        places = len(self._grid[0])
        spans = [share(num_elements, places, place) for place in range(places)]
        return tuple(
            Region(first, last, (self._grid[self._source][place],), tuple(sorted(row[place] for row in self._grid)))
            for place, (first, last) in enumerate(spans)
            if last > first
        )

    def chunk(self, call: ComposedCall, start: int, stop: int) -> ComposedChunk:
        """Return the chunk: the library copies it in the root's cluster, shares cross, other clusters gather them."""
        values, places, sends = call.flat[start:stop], len(self._grid[0]), self._cluster == self._source
        first, last = share(stop - start, places, self._place)
        own = values.new_empty(-(-(stop - start) // places))

        def spread(limit: timedelta) -> None:
            if sends:
                if call.library is not None:
                    call.library.broadcast(values, self._root_place).wait(limit)
                own[: last - first] = values[first:last]

        def gather(limit: timedelta) -> None:
            if not sends:
                padded = own.new_empty(own.numel() * places)
                if call.library is not None:
                    call.library.all_gather_flat(padded, own).wait(limit)
                values.copy_(padded[: values.numel()])

        span = (0, last - first)
        return _Chunk(call, own, span if sends else (0, 0), span, None, spread, gather, address=first)


class _Chunk:
    """Memory `block` of a device, of which (start, size) `sent` are this rank's and `got` arrive.

    `address` is that of its first element in the regions. `before` and `after` are the library's parts.
    """

    def __init__(
        self,
        call: ComposedCall,
        block: torch.Tensor,
        sent: tuple[int, int],
        got: tuple[int, int],
        combine: Combine | None,
        before: Callable[[timedelta], None] | None,
        after: Callable[[timedelta], None],
        *,
        address: int = 0,
    ) -> None:
        self._call, self._block, self._sent, self._got = call, block, sent, got
        self._combine, self._before, self._after, self._address = combine, before, after, address
        self._host: torch.Tensor = block
        self._wait: Callable[[], None] = _nothing

    def begin(self, limit_s: float) -> None:
        """Call the library, and begin to copy the block to host memory."""
        if self._before is not None:
            self._before(timedelta(seconds=limit_s))
        self._host, self._wait = self._call.memory.to_host(self._block)

    def exchange(self, program: RankProgram, messages: TransportMessages) -> None:
        """Exchange with the ranks of this place; in any thread."""
        self._wait()
        run_program(program, self._at(self._sent), self._at(self._got), self._combine, messages)

    def end(self, limit_s: float) -> None:
        """Store what has arrived."""
        self._call.memory.to_device(self._host, self._block)
        self._after(timedelta(seconds=limit_s))

    def _at(self, span: tuple[int, int]) -> list[Block]:
        start, size = span
        return [(self._address + start, self._host[start : start + size])] if size else []


def _find(grid: Grid, rank: int) -> tuple[int, int]:
    """Return cluster and place of a rank."""
    return next((number, row.index(rank)) for number, row in enumerate(grid) if rank in row)


def _cut(block: torch.Tensor, copies: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """Return the chunks of `block` [N], of which a rank has `copies` at a time."""
    step = max(chunk_bytes // (copies * block.element_size()), 1)
    return [(start, min(start + step, block.numel())) for start in range(0, block.numel(), step)]


def _nothing() -> None:
    pass
