"""What torch's own parallelism computes over an isthmus group, beside gloo: run by four processes of one machine.

`python -m tests.comm.torch_programs FOLDER`: the ranks, forks of this process, meet by files in FOLDER; rank `r` is in
cluster "aabb"[r].
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from isthmus.comm.connect_transport import connect_transport
from isthmus.comm.group.create_group import IsthmusOptions, register_backend
from isthmus.comm.group.isthmus_group import IsthmusGroup
from isthmus.comm.tcp.endpoint import Endpoint
from isthmus.comm.tcp.greeting import Greeting
from isthmus.comm.transport.transport import JoinedTransport
from isthmus.core.errors import PeerError
from isthmus.strategies import RANK_STRATEGIES
from isthmus.wan import listen
from tests.forks import run_ranks

CLUSTERS = "aabb"
SIZE = len(CLUSTERS)
TIMEOUT = timedelta(seconds=120)
STEPS = 4


def meet(rank: int, folder: Path, clusters: str) -> JoinedTransport:
    """Return a transport that is connected to all ranks, which tell their ports by files."""
    listener = listen("127.0.0.1")
    part = folder / f"{rank}.part"
    part.write_text(str(listener.getsockname()[1]))
    part.rename(folder / f"{rank}.port")
    endpoints = [Endpoint("127.0.0.1", _port(folder / f"{one}.port"), None, 1) for one in range(len(clusters))]
    with listener:
        return connect_transport("thread", Greeting("job", 1, rank, len(clusters)), endpoints, listener, 120)


def _port(path: Path) -> int:
    deadline = time.monotonic() + 120
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return int(path.read_text())


class Net(nn.Module):
    """Two layers: enough for tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [B, 16] -> [B, 4]."""
        down: torch.Tensor = self.down(torch.relu(self.up(x)))
        return down


def train(model: nn.Module, data_rank: int) -> list[float]:
    """Train on the batches of `data_rank`; return the losses and the norm of the parameters at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * data_rank + step))
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in model.parameters()]
    return [*losses, sum(float(one.detach().square().sum()) for one in whole)]


def ddp(group: dist.ProcessGroup, rank: int) -> list[float]:
    """Data parallelism with a bucket per layer."""
    return train(DistributedDataParallel(Net(), process_group=group, bucket_cap_mb=1e-4), rank)


def fsdp(mesh: DeviceMesh, rank: int) -> list[float]:
    """FSDP2 over a mesh of one dimension, HSDP over one of two."""
    model = Net()
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh)
    return train(fully_shard(model, mesh=mesh), rank)


def tensor_parallel(mesh: DeviceMesh, rank: int) -> list[float]:
    """DTensor: columns of the first layer, rows of the second; every rank has the same batch."""
    del rank
    return train(parallelize_module(Net(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}), 0)


def meshes(backend: str) -> dict[str, DeviceMesh]:
    """Return the meshes whose groups are of `backend`: replicas across clusters, shards inside them, and one of all."""
    names = ("replica", "shard")
    options = dict.fromkeys(names, (backend, None))
    two: Any = init_device_mesh("cpu", (2, 2), mesh_dim_names=names, backend_override=options)
    flat = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("all",), backend_override={"all": (backend, None)})
    return {"two": two, "flat": flat, "shard": two["shard"], "replica": two["replica"]}


def compare_training(rank: int, gloo: dist.ProcessGroup) -> Iterator[str]:
    """Yield each kind of parallelism over isthmus whose losses differ from gloo's by more than 1e-6."""
    ours, theirs = meshes("isthmus"), meshes("gloo")
    assert all(isinstance(ours[name].get_group(), IsthmusGroup) for name in ("flat", "shard", "replica"))
    world = dist.group.WORLD
    assert world is not None
    kinds: dict[str, tuple[Callable[[], list[float]], Callable[[], list[float]]]] = {
        "DDP": (lambda: ddp(world, rank), lambda: ddp(gloo, rank)),
        "FSDP2": (lambda: fsdp(ours["flat"], rank), lambda: fsdp(theirs["flat"], rank)),
        "HSDP": (lambda: fsdp(ours["two"], rank), lambda: fsdp(theirs["two"], rank)),
        "TP in a cluster": (
            lambda: tensor_parallel(ours["shard"], rank),
            lambda: tensor_parallel(theirs["shard"], rank),
        ),
        "TP over all": (lambda: tensor_parallel(ours["flat"], rank), lambda: tensor_parallel(theirs["flat"], rank)),
    }
    for kind, (one, other) in kinds.items():
        got, expected = one(), other()
        if any(abs(a - b) > 1e-6 * max(1.0, abs(b)) for a, b in zip(got, expected, strict=True)):
            yield f"{kind}: {got} where gloo has {expected}"


def compare_collectives(rank: int, gloo: dist.ProcessGroup) -> Iterator[str]:
    """Yield each call of `dist.*` whose result differs from gloo's by a bit; values are integers."""

    def values(seed: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, 9, shape, generator=torch.Generator().manual_seed(seed)).float()

    def objects(group: Any) -> list[Any]:
        everywhere: list[Any] = [None] * SIZE
        dist.all_gather_object(everywhere, {"rank": rank, "text": "x" * 1000 * rank}, group=group)
        from_first = [f"from {rank}"]
        dist.broadcast_object_list(from_first, src=0, group=group)
        at_last: list[Any] | None = [None] * SIZE if rank == SIZE - 1 else None
        dist.gather_object((rank,), at_last, dst=SIZE - 1, group=group)
        scattered: list[Any] = [None]
        dist.scatter_object_list(scattered, list(range(SIZE)) if rank == 1 else None, src=1, group=group)
        return [everywhere, from_first, at_last, scattered]

    def tensors(group: Any) -> list[Any]:
        total, gathered = values(rank, 5, 3).t(), torch.zeros(SIZE * 6)
        dist.all_reduce(total, group=group)
        dist.all_gather_into_tensor(gathered, values(rank, 6), group=group)
        block = torch.zeros(2)
        work = dist.reduce_scatter_tensor(block, values(rank, 2 * SIZE), group=group, async_op=True)
        work.wait()
        got = torch.zeros(sum(one + rank for one in range(SIZE)), 2)
        splits = [one + rank for one in range(SIZE)]
        dist.all_to_all_single(got, values(rank, sum(splits), 2), splits, splits, group=group)
        functional = all_reduce(values(rank, 4), "sum", group or dist.group.WORLD)
        dist.barrier(group=group)
        return [total.contiguous(), gathered, block, got, functional + 0]

    def messages(group: Any) -> list[Any]:
        got = torch.zeros(3)
        operations = [
            dist.P2POp(dist.isend, values(rank, 3), (rank + 1) % SIZE, group),
            dist.P2POp(dist.irecv, got, (rank - 1) % SIZE, group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        if rank > 0:
            dist.send(values(rank, 2), 0, group=group)
            return [got]
        found, part = {}, torch.zeros(2)
        for _ in range(1, SIZE):  # from any rank: torch returns which it was
            source = dist.recv(part, group=group)
            found[source] = part.tolist()
        return [got, sorted(found.items())]

    for call in (objects, messages):
        if str(call(None)) != str(call(gloo)):
            yield f"{call.__name__} differ"
    for place, (one, other) in enumerate(zip(tensors(None), tensors(gloo), strict=True)):
        if not torch.equal(one, other):
            yield f"tensors: result {place} is {one}, gloo's {other}"


def sub_groups(rank: int) -> Iterator[str]:
    """Yield each subset of the ranks whose sum is wrong: all subsets, groups under way at once."""
    subsets = [[one for one in range(SIZE) if bits >> one & 1] for bits in range(1, 2**SIZE)]
    groups = [(ranks, dist.new_group(ranks)) for ranks in subsets]
    works: list[tuple[Sequence[int], torch.Tensor, dist.Work]] = []
    for ranks, group in groups:
        if rank in ranks:
            tensor = torch.full((70_000,), float(2**rank))
            works.append((ranks, tensor, dist.all_reduce(tensor, group=group, async_op=True)))
    for ranks, tensor, work in reversed(works):
        work.wait()
        if not bool((tensor == sum(2**one for one in ranks)).all()):
            yield f"the sum of {ranks} is {tensor[0]}"
    sharded = distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (SIZE,)), [Shard(0)])
    if sharded.full_tensor().tolist() != list(range(8)):
        yield "a DTensor over all ranks does not come back"


def named_strategies(rank: int) -> Iterator[str]:
    """Yield each named strategy whose sum over the processes is wrong."""
    world: Any = dist.group.WORLD
    for name in RANK_STRATEGIES:
        options = IsthmusOptions(world.transport, world.clusters, synchronisation=name)
        group = dist.new_group(pg_options=options)
        for num in (3, 700_001):
            tensor = torch.arange(num, dtype=torch.float64) * (rank + 1)
            dist.all_reduce(tensor, group=group)
            if not torch.equal(tensor, torch.arange(num, dtype=torch.float64) * 10):
                yield f"{name}: the sum of {num} elements is {tensor}"


def disagreement(rank: int) -> Iterator[str]:
    """Yield what is wrong, if ranks that disagree get no error; the group of all ranks goes on."""
    group = dist.new_group([0, 1, 2])
    if rank < 3:
        try:
            dist.all_reduce(torch.ones(4 if rank else 5), group=group)
            yield "ranks that disagree on a shape got a result"
        except PeerError as error:
            if "float32" not in str(error):
                yield f"the error names no shape: {error}"
    dist.barrier()


def run(rank: int, folder: Path) -> int:
    """Run one rank; print what differs, and return 1 if anything does."""
    torch.set_num_threads(1)
    transport = meet(rank, folder, CLUSTERS)
    register_backend()
    dist.init_process_group(
        "isthmus",
        store=dist.FileStore(str(folder / "store"), SIZE),
        rank=rank,
        world_size=SIZE,
        timeout=TIMEOUT,
        pg_options=IsthmusOptions(transport, tuple(CLUSTERS)),
    )
    gloo = dist.new_group(backend="gloo")
    found: list[str] = []
    for check in (compare_collectives, compare_training):
        found += check(rank, gloo)
    for alone in (sub_groups, named_strategies, disagreement):
        found += alone(rank)
    dist.barrier()
    dist.destroy_process_group()
    print(*found, sep="\n", flush=True)
    return bool(found)


if __name__ == "__main__":
    sys.exit(run_ranks(SIZE, partial(run, folder=Path(sys.argv[1]))))
