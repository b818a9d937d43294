"""One rank that adds up gradients with others, as training does, for `benchmarks.collectives`."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection

import torch

from benchmarks._collective_ranks import SumTime
from benchmarks._wan_stage import StageJob, joined, start_ns, together_s
from isthmus.train.communication.step_metrics import StepTimer
from isthmus.train.update.buckets import HeldRows, ParameterSegment, make_buckets
from isthmus.train.update.gradient_reducer import GradientReducer

ROW = 1024
"""Elements of a row of the parameter."""


def run_gradients(job: StageJob, pipe: Connection) -> None:
    """Add up gradients of the job's size, which all ranks have, `steps` times; send a `SumTime` of each back.

    Raises `ValueError` if a sum is wrong.
    """
    found, size = [], len(job.clusters)
    with joined(job, pipe) as communicator:
        communicator.timer = StepTimer()
        rows = job.shape[0] // ROW
        held = [[HeldRows(name="w", start=0, stop=rows, row_elements=ROW)]] * size
        reducer = GradientReducer(make_buckets(held, job.clusters), job.rank, communicator)
        for _ in range(job.steps):
            gradient = torch.full((rows, ROW), float(job.rank + 1))

            def view(segment: ParameterSegment, of: torch.Tensor = gradient) -> torch.Tensor:
                return of[segment.start : segment.stop]

            start_s = together_s(communicator.broadcast_from_first([start_ns()])[0])
            cpu_s = time.process_time()
            reducer.reduce(view, to_all_owners=True)
            found.append(SumTime(start_s, time.time(), time.process_time() - cpu_s))
            if not bool((gradient == size * (size + 1) / 2).all()):
                raise ValueError(f"rank {job.rank} has a wrong sum")
            communicator.barrier()
        pipe.send(found)
