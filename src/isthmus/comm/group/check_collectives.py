"""`check_collectives`: the collectives of the conformance kit, each against the result of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial, reduce
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from isthmus.comm.transport.check_transport import expect, run_on_ranks

ALL_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
)
"""Dtypes that torch itself adds."""

GLOO_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int32)
"""Those of them that gloo reduces by every operation."""

SIZES = (1, 7, 100_003)
"""Numbers of elements: one, some, and several pieces with a rest, which `CUT_DTYPES` try."""

CUT_DTYPES = (torch.float32, torch.bfloat16)

LIMIT = timedelta(seconds=30)

_REDUCTIONS: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.PRODUCT: torch.mul,
}


def check_collectives(
    groups: Sequence[Any], dtypes: Sequence[torch.dtype] = ALL_DTYPES, *, uneven: bool, device: str = "cpu"
) -> None:
    """Check every collective x dtype x size x root; `groups[r]` is rank `r` of one group.

    Calls are under way at once and waited for in another order, but for reductions to one rank.

    Values are small integers, so that every sum is exact and results are compared bit by bit. `uneven` adds
    all-gathers and reduce-scatters of tensors that differ in size, which gloo does not have. Tensors are on `device`.
    """
    checks = (_all_reduce, _reduce_to_each_root, _reduce_scatter, _move, _all_to_all, *((_uneven,) if uneven else ()))
    for dtype in dtypes:
        for size in SIZES if dtype in CUT_DTYPES else SIZES[:-1]:
            for check in checks:
                run_on_ranks(groups, partial(_on_device, device, partial(check, dtype=dtype, size=size)))
    run_on_ranks(groups, partial(_on_device, device, _coalesced))


def _on_device(device: str, check: Callable[[Any], None], group: Any) -> None:
    with torch.device(device):
        check(group)


def wrapped(backend: Any, store: dist.Store, rank: int, size: int, device: str = "cpu") -> dist.ProcessGroup:
    """Return a process group of torch that calls `backend` for tensors on `device`."""
    types = dist.ProcessGroup.BackendType
    kind = types.GLOO if device == "cpu" else types.CUSTOM
    group = dist.ProcessGroup(store, rank, size)
    group._register_backend(torch.device(device), kind, backend)
    group._set_default_backend(kind)
    return group


def values(rank: int, dtype: torch.dtype, size: int, low: int = 0) -> torch.Tensor:
    """Return what `rank` contributes: integers 0 to 3 from a seed, [size]."""
    generator = torch.Generator().manual_seed(1000 * rank + size + low)
    return torch.randint(low, 4, (size,), generator=generator, device="cpu").to(torch.get_default_device(), dtype)


def _reduced(parts: Sequence[torch.Tensor], op: Any) -> torch.Tensor:
    if op == dist.ReduceOp.AVG:
        total = reduce(torch.add, parts)
        exact = total.is_floating_point() or total.is_complex()
        return total.div(len(parts), rounding_mode=None if exact else "trunc").to(total.dtype)
    return reduce(_REDUCTIONS[op], parts)


def _all_reduce(group: Any, dtype: torch.dtype, size: int) -> None:
    rank, num = group.rank(), group.size()
    started = []
    for op in (*_REDUCTIONS, dist.ReduceOp.AVG):
        if (dtype.is_complex and op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX)) or (
            op == dist.ReduceOp.AVG and not (dtype.is_floating_point or dtype.is_complex)
        ):
            continue
        parts = [values(one, dtype, size) for one in range(num)]
        everywhere, at_root = parts[rank].clone(), parts[rank].clone()
        options, to_root = dist.AllreduceOptions(), dist.ReduceOptions()
        options.reduceOp = to_root.reduceOp = op
        to_root.rootRank, to_root.rootTensor = num - 1, 0
        works = [group.allreduce([everywhere], options)]
        if op != dist.ReduceOp.AVG:
            works.append(group.reduce([at_root], to_root))
        started.append((op, works, everywhere, at_root, _reduced(parts, op)))
    for op, works, everywhere, at_root, expected in reversed(started):
        for work in works:
            work.wait(LIMIT)
        expect(torch.equal(everywhere, expected), f"allreduce {op} of {size} x {dtype}")
        if rank == num - 1 and len(works) > 1:
            expect(torch.equal(at_root, expected), f"reduce {op} of {size} x {dtype}")


def _reduce_to_each_root(group: Any, dtype: torch.dtype, size: int) -> None:
    """One after the other: each is waited for before the next is called."""
    rank, num = group.rank(), group.size()
    parts = [values(one, dtype, size) for one in range(num)]
    for root in range(num):
        tensor, options = parts[rank].clone(), dist.ReduceOptions()
        options.reduceOp, options.rootRank, options.rootTensor = dist.ReduceOp.SUM, root, 0
        group.reduce([tensor], options).wait(LIMIT)
        expect(rank != root or torch.equal(tensor, reduce(torch.add, parts)), f"reduce to {root} of {size} x {dtype}")


def _reduce_scatter(group: Any, dtype: torch.dtype, size: int) -> None:
    rank, num = group.rank(), group.size()
    options = dist.ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp.SUM
    inputs = [torch.cat([values(100 * one + to, dtype, size) for to in range(num)]) for one in range(num)]
    listed, single = torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype)
    group.reduce_scatter([listed], [list(inputs[rank].split(size))], options).wait(LIMIT)
    group.reduce_scatter_single(single, inputs[rank], options).wait(LIMIT)
    expected = reduce(torch.add, inputs)[rank * size :][:size]
    for name, got in (("reduce_scatter", listed), ("reduce_scatter_single", single)):
        expect(torch.equal(got, expected), f"{name} of {size} x {dtype}")


def _move(group: Any, dtype: torch.dtype, size: int) -> None:
    rank, num = group.rank(), group.size()
    parts = [values(one, dtype, size) for one in range(num)]
    listed, single = [torch.zeros(size, dtype=dtype) for _ in range(num)], torch.zeros(num * size, dtype=dtype)
    works = [group.allgather([listed], [parts[rank]]), group.all_gather_single(single, parts[rank])]
    copies, gathered, scattered = [], [torch.zeros(size, dtype=dtype) for _ in range(num)], []
    for root in range(num):
        to_all, to_root, from_root = dist.BroadcastOptions(), dist.GatherOptions(), dist.ScatterOptions()
        to_all.rootRank = to_root.rootRank = from_root.rootRank = root
        to_all.rootTensor = 0
        copies.append(parts[rank].clone())
        scattered.append(torch.zeros(size, dtype=dtype))
        works.append(group.broadcast([copies[-1]], to_all))
        works.append(group.gather([gathered] if rank == root else [], [parts[rank]], to_root))
        blocks = [values(100 * root + to, dtype, size) for to in range(num)]
        works.append(group.scatter([scattered[-1]], [blocks] if rank == root else [], from_root))
    for work in works:
        work.wait(LIMIT)
    what = f"of {size} x {dtype}"
    for one, part in enumerate(parts):
        expect(torch.equal(listed[one], part), f"allgather {what}")
        expect(torch.equal(single[one * size :][:size], part), f"all_gather_single {what}")
        expect(torch.equal(gathered[one], part), f"gather {what}")
        expect(torch.equal(copies[one], part), f"broadcast {what}")
        expect(torch.equal(scattered[one], values(100 * one + rank, dtype, size)), f"scatter {what}")


def _all_to_all(group: Any, dtype: torch.dtype, size: int) -> None:
    """Uneven splits, some of them empty."""
    rank, num = group.rank(), group.size()
    splits = [[(source + 2 * to) % 3 * size // 3 for to in range(num)] for source in range(num)]
    sent = [values(100 * rank + to, dtype, splits[rank][to]) for to in range(num)]
    column = [row[rank] for row in splits]
    got = torch.zeros(sum(column), dtype=dtype)
    group.all_to_all_single(got, torch.cat(sent), column, splits[rank]).wait(LIMIT)
    for source, (part, num_elements) in enumerate(zip(got.split(column), column, strict=True)):
        expected = values(100 * source + rank, dtype, num_elements)
        expect(torch.equal(part, expected), f"all_to_all_single of {size} x {dtype}")
    even = torch.zeros(num * size, dtype=dtype)
    group.all_to_all_single(even, values(rank, dtype, num * size), [], []).wait(LIMIT)
    expected = torch.cat([values(one, dtype, num * size)[rank * size :][:size] for one in range(num)])
    expect(torch.equal(even, expected), f"all_to_all_single of {size} x {dtype}, even splits")


def _uneven(group: Any, dtype: torch.dtype, size: int) -> None:
    rank, num = group.rank(), group.size()
    sizes = [size * (one % 3) // 2 for one in range(num)]
    got = [torch.zeros(one, dtype=dtype) for one in sizes]
    group.allgather([got], [values(rank, dtype, sizes[rank])]).wait(LIMIT)
    for one, part in enumerate(got):
        expect(torch.equal(part, values(one, dtype, sizes[one])), f"allgather of {sizes} x {dtype}")
    inputs = [values(one, dtype, sum(sizes)) for one in range(num)]
    mine = torch.zeros(sizes[rank], dtype=dtype)
    group.reduce_scatter([mine], [list(inputs[rank].split(sizes))], dist.ReduceScatterOptions()).wait(LIMIT)
    first = list(accumulate(sizes, initial=0))[rank]
    expected = reduce(torch.add, inputs)[first : first + sizes[rank]]
    expect(torch.equal(mine, expected), f"reduce_scatter of {sizes} x {dtype}")


def _coalesced(group: Any) -> None:
    """Several tensors in one call."""
    rank, num = group.rank(), group.size()
    several = [values(rank, torch.float32, size) for size in SIZES]
    group.allreduce_coalesced(several, dist.AllreduceCoalescedOptions()).wait(LIMIT)
    outputs = [torch.zeros(num * size) for size in SIZES]
    group.all_gather_single_coalesced(outputs, [values(rank, torch.float32, size) for size in SIZES]).wait(LIMIT)
    blocks = [torch.zeros(size) for size in SIZES]
    inputs = [values(rank, torch.float32, num * size) for size in SIZES]
    group.reduce_scatter_single_coalesced(blocks, inputs, dist.ReduceScatterOptions()).wait(LIMIT)
    listed = [[torch.zeros(size) for size in SIZES] for _ in range(num)]
    group.allgather_coalesced(listed, [values(rank, torch.float32, size) for size in SIZES]).wait(LIMIT)
    for place, size in enumerate(SIZES):
        parts = [values(one, torch.float32, size) for one in range(num)]
        expect(torch.equal(several[place], reduce(torch.add, parts)), "allreduce_coalesced")
        expect(torch.equal(outputs[place], torch.cat(parts)), "all_gather_single_coalesced")
        expect(all(torch.equal(listed[one][place], part) for one, part in enumerate(parts)), "allgather_coalesced")
        total = reduce(torch.add, [values(one, torch.float32, num * size) for one in range(num)])
        expect(torch.equal(blocks[place], total[rank * size :][:size]), "reduce_scatter_single_coalesced")
