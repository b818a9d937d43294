"""One rank of data-parallel steps, for `benchmarks.passing`: a virtual chip computes, the runtime's reducer sums."""

from __future__ import annotations

import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from benchmarks._wan_stage import StageJob, joined, ping, start_ns, together_s
from isthmus.comm.group.passing.passing_sums import PassingOptions
from isthmus.train.communication.communicator import Communicator, TensorMessage
from isthmus.train.communication.exact_sleep import sleep_exactly
from isthmus.train.communication.step_metrics import StepTimer
from isthmus.train.update.buckets import HeldRows, ParameterSegment, make_buckets
from isthmus.train.update.gradient_options import PASSING, GradientOptions
from isthmus.train.update.gradient_reducer import GradientReducer

SLOTS = 16
"""Slots of each share: far more than the scaled links hold, as 64 are for links at full rate."""

ROW = 64
"""Elements of a row of the parameter."""


NUM_EXCHANGES = 8


@dataclass(frozen=True, kw_only=True)
class StrategyWork:
    """What each rank does: gradients of fp32 [num_elements], `steps` times, by `strategy`; the first is not measured.

    `computes_s` is what a virtual chip computes before it sums. Without `strategy`, the default is used.
    """

    num_elements: int
    computes_s: float
    steps: int
    strategy: str | None
    switch: tuple[str, int] | None = None
    key: bytes = b""


@dataclass(frozen=True)
class StepSpan:
    """One step at one rank: epoch seconds, and the CPU seconds of the process."""

    start_s: float
    end_s: float
    cpu_s: float


def run_works(works: tuple[StrategyWork, ...], job: StageJob, pipe: Connection) -> None:
    """Do `works` one after the other with all ranks; send for each the `StepSpan`s of its steps back.

    Raises `ValueError` if a sum is wrong.
    """
    with joined(job, pipe) as communicator:
        communicator.timer = StepTimer()
        found = []
        for work in works:
            rows = work.num_elements // ROW
            held = [[HeldRows(name="w", start=0, stop=rows, row_elements=ROW)]] * len(job.clusters)
            buckets = make_buckets(held, job.clusters)
            reducer = GradientReducer(buckets, job.rank, communicator, options=_options(work, job))
            found.append([_step(work, job, communicator, reducer) for _ in range(work.steps + 1)][1:])
            communicator.barrier()
            reducer.close()
        pipe.send(found)


def run_micro(num_elements: int, job: StageJob, pipe: Connection) -> None:
    """Send back the seconds of messages between two ranks: half round trips of an element, and of `num_elements` each.

    The large ones go both ways at once, as in a strategy: each way then carries the other's acknowledgements.
    """
    with joined(job, pipe) as communicator:
        pipe.send([ping(communicator, job.rank, (1,)), _both_ways(communicator, job.rank, num_elements)])


def _both_ways(communicator: Communicator, rank: int, num_elements: int) -> list[float]:
    """Return the seconds until a message has come from the other rank, to which one goes at the same time."""
    found, out, back = [], torch.zeros(num_elements), torch.empty(num_elements)
    for number in range(NUM_EXCHANGES):
        communicator.barrier()
        start_s = time.perf_counter()
        messages = [TensorMessage(out, 1 - rank, number, True), TensorMessage(back, 1 - rank, number, False)]
        _, received = communicator.start(messages)
        communicator.wait(received)
        found.append(time.perf_counter() - start_s)
    communicator.barrier()
    return found


def _options(work: StrategyWork, job: StageJob) -> GradientOptions:
    if work.strategy != PASSING:
        return GradientOptions(strategy=work.strategy)
    switches = () if work.switch is None else (work.switch,)
    passing = PassingOptions(switches=switches, key=work.key, host=job.hosts[job.rank], slots=SLOTS, silence_s=60.0)
    return GradientOptions(strategy=PASSING, passing=passing)


def _step(work: StrategyWork, job: StageJob, communicator: object, reducer: GradientReducer) -> StepSpan:
    size = len(job.clusters)
    gradient = torch.full((work.num_elements // ROW, ROW), float(job.rank + 1))

    def view(segment: ParameterSegment) -> torch.Tensor:
        return gradient[segment.start : segment.stop]

    start_s = together_s(communicator.broadcast_from_first([start_ns()])[0])  # type: ignore[attr-defined]
    cpu_s = time.process_time()
    sleep_exactly(work.computes_s)
    reducer.reduce(view, to_all_owners=True)
    span = StepSpan(start_s, time.time(), time.process_time() - cpu_s)
    if not bool(((gradient - size * (size + 1) / 2).abs() < 1e-3).all()):
        raise ValueError(f"rank {job.rank} has a wrong sum")
    return span
