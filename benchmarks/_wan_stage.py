"""One rank of a pipeline of virtual chips, for `benchmarks.wan_pipeline`: runtime, transport, no model.

Real tensors of real size cross every link; computing is waiting. A stage's model costs next to nothing, so
that two cores carry six stages.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from isthmus.comm.channel.link_keys import LinkKeys
from isthmus.comm.connect_transport import connect_transport
from isthmus.comm.group.create_group import IsthmusOptions, register_backend
from isthmus.comm.group.isthmus_group import BACKEND
from isthmus.comm.tcp.endpoint import Endpoint
from isthmus.comm.tcp.greeting import Greeting
from isthmus.core.base_model import TransportKind
from isthmus.core.plan import StageTime
from isthmus.schedule import Schedule
from isthmus.train.communication.communicator import Communicator, TensorMessage
from isthmus.train.communication.exact_sleep import sleep_exactly
from isthmus.train.communication.step_metrics import StepTimer
from isthmus.train.model.model_chunks import ModelChunks
from isthmus.train.model.virtual_compute_stage import VirtualComputeStage
from isthmus.train.pipeline.micro_batches import MicroBatches
from isthmus.train.pipeline.stage_executor import StageExecutor
from isthmus.wan import listen
from isthmus.wan.netns import NAMESPACE_FOLDER

TIMEOUT_S = 60.0
PINGS, PAUSE_S = 20, 0.01
HEARD_S = 0.4
"""Longer than word from the first rank takes to any other."""

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


@dataclass(frozen=True, kw_only=True)
class StageJob:
    """The job of one rank: all of the pipeline, and which stage the rank is.

    Rank `r` listens at `hosts[r]`. Another cluster is reached by `routes`, or, in a `namespace` (emulated
    packets), directly. `congestion_control` None leaves it to the host.
    """

    rank: int
    clusters: tuple[str, ...]
    schedule: Schedule
    times: tuple[StageTime, ...]
    shape: tuple[int, int]
    steps: int
    hosts: tuple[str, ...]
    routes: dict[str, str] = field(default_factory=dict)
    namespace: str | None = None
    lanes: int = 4
    senders: tuple[int, ...] = ()
    congestion_control: str | None = "bbr"
    transport: TransportKind = "thread"


@dataclass(frozen=True)
class StepTime:
    """One step at one rank: epoch seconds; what computing took beyond its time, and communication calls."""

    start_s: float
    end_s: float
    overrun_s: float
    calls_s: float


def begin(job: StageJob) -> None:
    """Go where the job is: its namespace, and before whatever else the machine does.

    A chip does not wait for a processor that others use. Where the privilege is missing (CAP_SYS_NICE), the
    steps in which it did are left out.
    """
    torch.set_num_threads(1)
    if job.namespace is not None:
        with (NAMESPACE_FOLDER / job.namespace).open() as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NETWORK):
                raise OSError(ctypes.get_errno(), f"namespace {job.namespace}")
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def run_stage(job: StageJob, pipe: Connection) -> None:
    """Run the steps among all ranks of the job; send a `StepTime` of each back."""
    with joined(job, pipe) as exchange:
        layers = (job.rank, job.rank + 1)
        model = VirtualComputeStage(
            layers, len(job.clusters), job.shape[1], dtype=torch.float32, device=torch.device("cpu")
        )
        executor = StageExecutor(
            ModelChunks([model]),
            job.rank,
            range(len(job.clusters)),
            exchange,
            dtype=torch.float32,
            stage_time=job.times[job.rank],
        )
        pipe.send([_step(executor, exchange, job) for _ in range(job.steps)])


def run_ping(job: StageJob, pipe: Connection) -> None:
    """Send a tensor of the job's shape to and fro between two ranks; send back half of each round trip."""
    with joined(job, pipe) as exchange:
        pipe.send(ping(exchange, job.rank, job.shape))


def ping(exchange: Communicator, rank: int, shape: tuple[int, ...]) -> list[float]:
    """Send a tensor to and fro between two ranks; return half of each round trip, in seconds."""
    exchange.timer = StepTimer()
    found, out = [], torch.zeros(shape)
    for number in range(PINGS):
        back = torch.empty(shape)
        receive = TensorMessage(back, 1 - rank, 2 * number + rank, False)
        send = TensorMessage(out, 1 - rank, 2 * number + 1 - rank, True)
        time.sleep(PAUSE_S)
        start_s = time.perf_counter()
        for one in (send, receive) if rank == 0 else (receive, send):
            (work,) = exchange.start([one])
            exchange.wait(work)
        found.append((time.perf_counter() - start_s) / 2)
    exchange.barrier()
    return found


@contextmanager
def joined(job: StageJob, pipe: Connection) -> Iterator[Communicator]:
    """Meet the others by way of `pipe` (own port out, all ports in)."""
    begin(job)
    size, host = len(job.clusters), job.hosts[job.rank]
    greeting = Greeting("wan-pipeline", 1, job.rank, size)
    with listen(host) as listener:
        pipe.send(int(listener.getsockname()[1]))
        endpoints = [_endpoint(job, rank, port) for rank, port in enumerate(pipe.recv())]
        transport = connect_transport(job.transport, greeting, endpoints, listener, TIMEOUT_S, keys=_keys(job))
    register_backend()
    dist.init_process_group(
        BACKEND,
        store=dist.HashStore(),
        rank=job.rank,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT_S),
        pg_options=IsthmusOptions(transport, job.clusters, host, names_sources=True, senders=job.senders),
    )
    yield Communicator(job.clusters, job.rank)
    dist.destroy_process_group()


def _step(executor: StageExecutor, exchange: Communicator, job: StageJob) -> StepTime:
    count, account = job.schedule.num_micro_batches, StepTimer()
    ids = torch.zeros(count, job.shape[0], dtype=torch.int64)
    batches = MicroBatches.split(count, 1, job.shape[0], ids, ids[:, :1])
    start_s = together_s(exchange.broadcast_from_first([start_ns()])[0])
    executor.run(job.schedule, batches, account)
    return StepTime(start_s, time.time(), account.overrun_s, account.calls_s)


def _keys(job: StageJob) -> LinkKeys | None:
    """Return the keys of this rank's site, which any address but loopback needs; ranks derive the same ones."""
    if job.namespace is None:
        return None
    own = job.clusters[job.rank]
    pairs = {site: "".join(sorted((own, site))).encode() for site in job.clusters}
    return LinkKeys(own, job.clusters, {site: hashlib.sha256(pair).digest() for site, pair in pairs.items()})


def _endpoint(job: StageJob, rank: int, port: int) -> Endpoint:
    mine, theirs = job.clusters[job.rank], job.clusters[rank]
    if mine == theirs:
        return Endpoint(job.hosts[rank], port)
    return Endpoint(job.hosts[rank], port, job.routes.get(theirs), job.lanes, job.congestion_control)


def start_ns() -> int:
    """Return when the first rank wants all to start, late enough to reach them (epoch nanoseconds)."""
    return time.time_ns() + int(HEARD_S * 1e9)


def together_s(wanted_ns: int) -> float:
    """Wait until it is `wanted_ns`, and return that in seconds: all stages start together, as simulated."""
    sleep_exactly(max(wanted_ns - time.time_ns(), 0) / 1e9)
    return wanted_ns / 1e9


def span_s(steps: Sequence[StepTime]) -> float:
    """Return the seconds of one step, given those of all ranks: from the common start to the last end."""
    return max(one.end_s for one in steps) - min(one.start_s for one in steps)
