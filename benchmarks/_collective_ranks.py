"""One rank for `benchmarks.collectives`: sums a tensor with others, over isthmus or gloo, or only exchanges bytes."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from benchmarks._wan_stage import TIMEOUT_S, StageJob, begin, joined, start_ns, together_s
from isthmus.comm.channel.receive_exactly import receive_exactly
from isthmus.comm.tcp.endpoint import set_socket_options
from isthmus.wan import listen


@dataclass(frozen=True)
class SumTime:
    """One all-reduce at one rank: epoch seconds, and the CPU seconds of the process."""

    start_s: float
    end_s: float
    cpu_s: float


def run_isthmus(job: StageJob, pipe: Connection) -> None:
    """Sum among all ranks over isthmus; send a `SumTime` of each sum back."""
    with joined(job, pipe):
        pipe.send(_sums(job))


def run_gloo(job: StageJob, pipe: Connection) -> None:
    """Sum among all ranks over gloo; send a `SumTime` of each sum back."""
    begin(job)
    with gloo_joined(job, pipe):
        pipe.send(_sums(job))


def run_sockets(job: StageJob, pipe: Connection) -> None:
    """Exchange the bytes of [shape] of fp32 with the other rank over one socket, `steps` times: what any sum needs.

    Sends a `SumTime` of each exchange back.
    """
    begin(job)
    with listen(job.hosts[job.rank]) as listener:
        pipe.send(int(listener.getsockname()[1]))
        ports = pipe.recv()
        other = socket.create_connection((job.hosts[0], ports[0])) if job.rank else listener.accept()[0]
    with other:
        set_socket_options(other, job.congestion_control)
        pipe.send([_exchange(other, bytearray(4 * math.prod(job.shape)), job.rank) for _ in range(job.steps)])


def _exchange(other: socket.socket, data: bytearray, rank: int) -> SumTime:
    wanted = bytearray(start_ns().to_bytes(8, "big"))
    if rank == 0:
        other.sendall(wanted)
    else:
        receive_exactly(other, memoryview(wanted))
    start_s, cpu_s = together_s(int.from_bytes(wanted, "big")), time.process_time()
    sender = threading.Thread(target=other.sendall, args=(bytes(data),))
    sender.start()
    receive_exactly(other, memoryview(data))
    end_s = time.time()
    sender.join()
    return SumTime(start_s, end_s, time.process_time() - cpu_s)


@contextmanager
def gloo_joined(job: StageJob, pipe: Connection) -> Iterator[None]:
    """Meet the others by way of `pipe` (own port out, all ports in), in torch's default group over gloo."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if job.namespace is None else "wan"
    listener = listen(job.hosts[job.rank])
    pipe.send(int(listener.getsockname()[1]))
    port, limit, serving = pipe.recv()[0], timedelta(seconds=TIMEOUT_S), job.rank == 0
    descriptor = listener.detach() if serving else None
    store = dist.TCPStore(job.hosts[0], port, None, serving, limit, wait_for_workers=False, master_listen_fd=descriptor)
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=len(job.clusters), timeout=limit)
    yield
    dist.barrier()
    dist.destroy_process_group()


def _sums(job: StageJob) -> list[SumTime]:
    """All-reduce [shape] of fp32 `steps` times; raises if a sum is wrong."""
    found, size = [], len(job.clusters)
    for _ in range(job.steps):
        tensor = torch.full(job.shape, float(job.rank + 1))
        wanted = torch.tensor([start_ns()])
        dist.broadcast(wanted, 0)
        start_s, cpu_s = together_s(int(wanted)), time.process_time()
        dist.all_reduce(tensor)
        found.append(SumTime(start_s, time.time(), time.process_time() - cpu_s))
        if not bool((tensor == size * (size + 1) / 2).all()):
            raise ValueError(f"rank {job.rank} has a wrong sum")
    return found
