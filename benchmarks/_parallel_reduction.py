"""Gradients of two replicas, summed after the last backward pass, during it, and by DDP over gloo: what is exposed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks._collective_ranks import gloo_joined
from benchmarks._wan_run import Bed, launch
from benchmarks._wan_stage import StageJob, begin, joined
from benchmarks.table import Row, compared
from isthmus.core.job import TrainingConfig
from isthmus.schedule import gpipe
from isthmus.train.communication.step_metrics import StepTimer
from isthmus.train.update.buckets import HeldRows
from isthmus.train.update.gradient_reducer import GradientReducer
from isthmus.train.update.optimizer import Optimizer
from isthmus.train.update.ownership import Ownership

WIDTH, LAYERS = 1024, 8
ROWS, MICRO_BATCHES = 512, 2
"""Rows of a batch, in how many micro-batches."""

TRAINING = TrainingConfig(steps=10**6, precision="fp32", clip_norm=0, learning_rate=1e-4)


@dataclass(frozen=True)
class ReducedStep:
    """Seconds of one step at one rank: all of it, its last backward pass, and waits for sums after that."""

    step_s: float
    backward_s: float
    waited_s: float


def measure(quick: bool) -> list[Row]:
    """Return the rows."""
    steps = 5 if quick else 15
    found = {name: _median(run, steps) for name, run in RUNS.items()}
    after, during, ddp = (found[name] for name in RUNS)
    bound_s = max(after.waited_s - after.backward_s, 0.0) + 0.05 * after.waited_s
    what = f"exposed reduction, 2 replicas, {LAYERS} layers of {WIDTH} x {WIDTH}"
    return [
        compared(
            f"{what}: waited for after the last backward pass", 1e3 * during.waited_s, "ms", "summed after it",
            1e3 * after.waited_s, target="what exceeds that pass, and 5 %", met=during.waited_s <= bound_s,
        ),
        compared(
            f"{what}: a step", 1e3 * during.step_s, "ms", "DDP over gloo", 1e3 * ddp.step_s,
            target="no slower", met=during.step_s <= ddp.step_s,
        ),
    ]  # fmt: skip


def _median(run: Callable[[StageJob, Connection], None], steps: int) -> ReducedStep:
    """Return the median step but the first two, each as its slowest rank saw it."""
    ranks: list[list[ReducedStep]] = launch(Bed(), "aa", gpipe(2, 1), (), (WIDTH, LAYERS), steps + 2, run)
    each = list(zip(*(one[2:] for one in ranks), strict=True))
    return ReducedStep(
        statistics.median(max(one.step_s for one in step) for step in each),
        statistics.median(max(one.backward_s for one in step) for step in each),
        statistics.median(max(one.waited_s for one in step) for step in each),
    )


def run_by_reducer(job: StageJob, pipe: Connection, overlap: bool) -> None:
    """Train by the runtime's optimizer; send a list of `ReducedStep` back."""
    with joined(job, pipe) as communicator:
        communicator.timer = timer = StepTimer()
        model = _make_model(job)
        parameters = list(model.named_parameters())
        held = [[HeldRows.full(name, one.shape) for name, one in parameters]] * len(job.clusters)
        own = Ownership(held, job.rank, job.clusters)
        optimizer = Optimizer(
            parameters,
            TRAINING,
            sum_over_all=communicator.sum_over_all,
            ownership=own,
            reducer=GradientReducer(own.buckets, job.rank, communicator),
            overlap_reduction=overlap,
        )
        found = []
        for step in range(job.steps):
            communicator.barrier()
            start_s = time.perf_counter()
            optimizer.begin_step()
            for part in _batch(job, step)[:-1]:
                _loss(model, part).backward()
            loss = _loss(model, _batch(job, step)[-1])
            last_s = time.perf_counter()
            loss.backward()
            end_s, waited_s = time.perf_counter(), timer.idle_s + timer.exposed_communication_s
            optimizer.apply(step)
            waited_s = timer.idle_s + timer.exposed_communication_s - waited_s
            found.append(ReducedStep(time.perf_counter() - start_s, end_s - last_s, waited_s))
        pipe.send(found)


def run_by_ddp(job: StageJob, pipe: Connection) -> None:
    """Train by DDP over gloo, with the same update; send a list of `ReducedStep` back."""
    begin(job)
    with gloo_joined(job, pipe):
        model = DistributedDataParallel(_make_model(job))
        optimizer = torch.optim.AdamW(model.parameters(), TRAINING.learning_rate, fused=True)
        found = []
        for step in range(job.steps):
            torch.distributed.barrier()
            start_s = time.perf_counter()
            with model.no_sync():
                for part in _batch(job, step)[:-1]:
                    _loss(model, part).backward()
            loss = _loss(model, _batch(job, step)[-1])
            last_s = time.perf_counter()
            loss.backward()
            end_s = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            found.append(ReducedStep(time.perf_counter() - start_s, end_s - last_s, 0.0))
        pipe.send(found)


def _make_model(job: StageJob) -> nn.Module:
    width, layers = job.shape
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))


def _batch(job: StageJob, step: int) -> tuple[torch.Tensor, ...]:
    """Return the micro-batches of a step, each [rows, width]."""
    generator = torch.Generator().manual_seed(1000 * step + job.rank)
    parts: tuple[torch.Tensor, ...] = torch.randn(ROWS, job.shape[0], generator=generator).chunk(MICRO_BATCHES)
    return parts


def _loss(model: nn.Module, part: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = (model(part) - part.roll(1, 1)).square().mean()
    return result


RUNS: dict[str, Callable[[StageJob, Connection], None]] = {
    "after": partial(run_by_reducer, overlap=False),
    "during": partial(run_by_reducer, overlap=True),
    "DDP": run_by_ddp,
}
"""The ways to sum gradients."""
