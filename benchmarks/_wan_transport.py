"""Two ranks that stream to each other, for `benchmarks.wan_pipeline transport`: what that costs them."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks._wan_stage import StageJob, joined, ping
from isthmus.comm.process.process_transport import ProcessTransport
from isthmus.train.communication.communicator import Communicator, CommWork, TensorMessage
from isthmus.train.communication.step_metrics import StepTimer

AHEAD = 4
SMALL = (16, 1024)
GBPS = 1.0
_TICKS = os.sysconf("SC_CLK_TCK")
_MATRIX = 192


@dataclass(frozen=True)
class Cost:
    """What one rank found. CPU seconds are per GB that it sent or received: `own_s` in all its threads,
    `beside_s` in its transport's process; `call_s` is the computing thread's per message. `small_s` and
    `large_s` are half round trips, `share` the computing thread's rate beside messages over that alone.
    """

    own_s: float
    beside_s: float
    call_s: float
    small_s: list[float]
    large_s: list[float]
    share: float


def run_cost(job: StageJob, pipe: Connection) -> None:
    """Send messages of the job's shape both ways, `steps` of them as fast as they go; send a `PipelineCost` back."""
    with joined(job, pipe) as exchange:
        small_s, large_s = (ping(exchange, job.rank, shape)[5:] for shape in (SMALL, job.shape))
        own_s, beside_s = time.process_time(), _process_s()
        exchange.timer = StepTimer()
        gigabytes = _stream(exchange, job, 10_000, job.steps, 0.0)
        own_s, beside_s = time.process_time() - own_s, _process_s() - beside_s
        calls_s = exchange.timer.calls_s / (2 * job.steps)
        share = _share(exchange, job)
        pipe.send(Cost(own_s / gigabytes, beside_s / gigabytes, calls_s, small_s, large_s, share))


def _stream(exchange: Communicator, job: StageJob, tag: int, count: int, pause_s: float) -> float:
    """Send and receive `count` messages, one each in `pause_s` at most; return the GB of both."""
    out, into = torch.zeros(job.shape), [torch.empty(job.shape) for _ in range(AHEAD)]
    waiting: list[list[CommWork]] = []
    start_s = time.perf_counter()
    for number in range(count):
        if len(waiting) == AHEAD:
            for work in waiting.pop(0):
                exchange.wait(work)
        time.sleep(max(start_s + number * pause_s - time.perf_counter(), 0.0))
        receive = TensorMessage(into[number % AHEAD], 1 - job.rank, tag + number, False)
        waiting.append(exchange.start([receive, TensorMessage(out, 1 - job.rank, tag + number, True)]))
    for works in waiting:
        for work in works:
            exchange.wait(work)
    exchange.barrier()
    return 2 * count * out.nbytes / 1e9


def _share(exchange: Communicator, job: StageJob) -> float:
    """Return the rate of many small products while messages go at `PIPELINE_GBPS` each way, over that without."""
    exchange.barrier()
    count = job.steps
    pause_s = job.shape[0] * job.shape[1] * 4 / (GBPS * 1e9 / 8)
    alone = _rate(count * pause_s / 2, threading.Event()) if job.rank == 0 else 1.0
    exchange.barrier()
    over = threading.Event()

    def talk() -> None:
        _stream(exchange, job, 20_000, count, pause_s)
        over.set()

    talking = threading.Thread(target=talk)
    talking.start()
    beside = _rate(float("inf"), over) if job.rank == 0 else 1.0
    talking.join()
    return beside / alone


def _rate(seconds: float, over: threading.Event) -> float:
    """Return products a second, until `over` or for `seconds`."""
    left, right = torch.rand(_MATRIX, _MATRIX), torch.rand(_MATRIX, _MATRIX)
    start_s, count = time.perf_counter(), 0
    while not over.is_set() and time.perf_counter() - start_s < seconds:
        torch.mm(left, right)
        count += 1
    return count / (time.perf_counter() - start_s)


def _process_s() -> float:
    """Return the CPU seconds of the transport's process, 0 where there is none."""
    transport = dist.group.WORLD.transport
    if not isinstance(transport, ProcessTransport):
        return 0.0
    fields = Path(f"/proc/{transport.process_id}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS
