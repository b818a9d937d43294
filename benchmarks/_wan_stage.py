"""One rank of a pipeline of virtual chips, for `benchmarks.wan_pipeline`: runtime, transport, no model.

Real tensors of real size cross every link; computing is waiting. A stage's model costs next to nothing, so
that two cores carry six stages.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from isthmus.comm.frame import Greeting
from isthmus.comm.group import BACKEND, IsthmusOptions, register_backend
from isthmus.comm.mesh import Endpoint, connect, listen
from isthmus.comm.tcp import TcpTransport
from isthmus.core.plan import StageTime
from isthmus.schedule import Schedule
from isthmus.train.exchange import Exchange
from isthmus.train.executor import Executor
from isthmus.train.metrics import Account
from isthmus.train.micro_batches import MicroBatches
from isthmus.train.pieces import StagePieces
from isthmus.train.virtual_stage import VirtualStage

TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class StageJob:
    """What one rank is told: all of the pipeline, and which stage it is."""

    rank: int
    clusters: tuple[str, ...]
    routes: dict[str, str]
    schedule: Schedule
    time: StageTime
    shape: tuple[int, int]
    steps: int
    lanes: int = 4


@dataclass(frozen=True)
class StepTime:
    """One step at one rank: epoch seconds, what computing took beyond its time, waiting for messages."""

    start_s: float
    end_s: float
    overrun_s: float
    exposed_s: float


def take_precedence() -> None:
    """Ask that this process and its threads run as soon as they can, whatever else the machine does.

    A chip does not wait for a processor that others use. Where the privilege is missing (CAP_SYS_NICE), the
    steps in which it did are left out.
    """
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def run_stage(job: StageJob, pipe: Connection) -> None:
    """Meet the others by way of `pipe` (own port out, all ports in), run the steps, send the times back."""
    torch.set_num_threads(1)
    take_precedence()
    size = len(job.clusters)
    greeting = Greeting("wan-pipeline", 1, job.rank, size)
    with listen("127.0.0.1") as listener:
        pipe.send(int(listener.getsockname()[1]))
        endpoints = [_endpoint(job, rank, port) for rank, port in enumerate(pipe.recv())]
        met = connect(greeting, endpoints, listener, TIMEOUT_S)
        transport = TcpTransport(greeting, endpoints, met, listener.dup())
    register_backend()
    dist.init_process_group(
        BACKEND,
        store=dist.HashStore(),
        rank=job.rank,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT_S),
        pg_options=IsthmusOptions(transport, job.clusters),
    )
    exchange = Exchange(job.clusters, job.rank)
    layers = (job.rank, job.rank + 1)
    model = VirtualStage(layers, size, job.shape[1], dtype=torch.float32, device=torch.device("cpu"))
    executor = Executor(
        StagePieces([model]),
        job.rank,
        range(size),
        exchange,
        dtype=torch.float32,
        stage_time=job.time,
    )
    pipe.send([_step(executor, exchange, job) for _ in range(job.steps)])
    dist.destroy_process_group()


def _step(executor: Executor, exchange: Exchange, job: StageJob) -> StepTime:
    count, account = job.schedule.num_micro_batches, Account()
    ids = torch.zeros(count, job.shape[0], dtype=torch.int64)
    batches = MicroBatches.cut(count, 1, job.shape[0], ids, ids[:, :1])
    exchange.meet()
    start_s = time.time()
    executor.run(job.schedule, batches, account)
    return StepTime(start_s, time.time(), account.overrun_s, account.exposed_communication_s)


def _endpoint(job: StageJob, rank: int, port: int) -> Endpoint:
    mine, theirs = job.clusters[job.rank], job.clusters[rank]
    if mine == theirs:
        return Endpoint("127.0.0.1", port)
    return Endpoint("127.0.0.1", port, job.routes[theirs], job.lanes)


def span_s(steps: Sequence[StepTime]) -> float:
    """Return the seconds of one step, given those of all ranks: from the last to start to the last to end."""
    return max(one.end_s for one in steps) - max(one.start_s for one in steps)
