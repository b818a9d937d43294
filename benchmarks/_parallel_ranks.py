"""One rank that trains by DDP, FSDP2 or HSDP, for `benchmarks.collectives`: over isthmus, or over gloo."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks._collective_ranks import gloo_joined
from benchmarks._wan_stage import StageJob, begin, joined

BATCH = 16


@dataclass(frozen=True)
class Trained:
    """What one rank has seen: the loss of each step, and its seconds."""

    losses: tuple[float, ...]
    steps_s: tuple[float, ...]


def run_over_isthmus(job: StageJob, pipe: Connection, kind: str) -> None:
    """Train by `kind` over isthmus; send a `Trained` back."""
    with joined(job, pipe):
        pipe.send(_train(job, kind))


def run_over_gloo(job: StageJob, pipe: Connection, kind: str) -> None:
    """Train by `kind` over gloo; send a `Trained` back."""
    begin(job)
    with gloo_joined(job, pipe):
        pipe.send(_train(job, kind))


def _train(job: StageJob, kind: str) -> Trained:
    """Train layers of width and number `job.shape` for `job.steps` steps; batches and weights have seeds."""
    width, layers = job.shape
    torch.manual_seed(0)
    model = KINDS[kind](nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses, steps_s = [], []
    for step in range(job.steps):
        generator = torch.Generator().manual_seed(1000 * step + job.rank)
        batch = torch.randn(BATCH, width, generator=generator)
        dist.barrier()
        start_s = time.perf_counter()
        loss = (model(batch) - batch.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().double()
        dist.all_reduce(total)
        losses.append(float(total))
        steps_s.append(time.perf_counter() - start_s)
    return Trained(tuple(losses), tuple(steps_s))


def _ddp(model: nn.Sequential) -> nn.Module:
    return DistributedDataParallel(model)


def _fsdp2(model: nn.Sequential) -> nn.Module:
    return _sharded(model, (dist.get_world_size(),), ("shard",))


def _hsdp(model: nn.Sequential) -> nn.Module:
    return _sharded(model, (2, dist.get_world_size() // 2), ("replica", "shard"))


def _sharded(model: nn.Sequential, shape: tuple[int, ...], names: tuple[str, ...]) -> nn.Module:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


KINDS: dict[str, Callable[[nn.Sequential], nn.Module]] = {"FSDP2": _fsdp2, "DDP": _ddp, "HSDP": _hsdp}
