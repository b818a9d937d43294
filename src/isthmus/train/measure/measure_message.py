"""Measure message latency between two workers: `python -m isthmus.train.measure.measure_message`.

Two processes exchange a tensor through the runtime's process group, directly or over the route to an emulated
link. Pauses between messages stand for the computation of a pipeline. Prints a JSON list of half round-trip
times in seconds, which include thread hand-over, torch dispatch, copies, relaying and the link.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from isthmus.comm.connect_transport import connect_transport
from isthmus.comm.group.create_group import IsthmusOptions, register_backend
from isthmus.comm.group.isthmus_group import BACKEND
from isthmus.comm.tcp.endpoint import Endpoint
from isthmus.comm.tcp.greeting import Greeting
from isthmus.wan import listen

NUM_WARM_UP = 5
PAUSE_S = 0.01
TIMEOUT_S = 30.0


def main() -> None:
    """Run both ranks and print the time of each message, in seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--route", default=None, help="host:port through which rank 1 reaches rank 0 (default: direct)")
    parser.add_argument("--bytes", type=int, default=1 << 18, help="message size in bytes")
    parser.add_argument("--count", type=int, default=20, help="number of round trips")
    parser.add_argument("--cores", action="store_true", help="pin rank 0 to core 0 and rank 1 to core 1")
    args = parser.parse_args()
    mine, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(
        target=_run_rank, args=(1, theirs, args.route, args.bytes, args.count, args.cores)
    )
    child.start()
    found = _run_rank(0, mine, None, args.bytes, args.count, args.cores)
    child.join(TIMEOUT_S)
    print(json.dumps(found))


def _run_rank(
    rank: int, pipe: Connection, route: str | None, num_bytes: int, count: int, pin_cores: bool
) -> list[float]:
    """Run one of the two ranks; return half of each round trip in seconds on rank 0, [] on rank 1."""
    torch.set_num_threads(1)
    if pin_cores:
        os.sched_setaffinity(0, {rank})
    greeting = Greeting("message-benchmark", 1, rank, 2)
    with listen("127.0.0.1") as listener:
        port = int(listener.getsockname()[1])
        pipe.send(port)
        ports = (port, int(pipe.recv())) if rank == 0 else (int(pipe.recv()), port)
        endpoints = [Endpoint("127.0.0.1", one, route) for one in ports]
        transport = connect_transport("thread", greeting, endpoints, listener, TIMEOUT_S)
        register_backend()
        dist.init_process_group(
            BACKEND,
            store=dist.HashStore(),
            rank=rank,
            world_size=2,
            pg_options=IsthmusOptions(transport, ("first", "second")),
        )
    found = _ping(num_bytes, count) if rank == 0 else _pong(num_bytes, count)
    dist.destroy_process_group()
    return found


def _ping(num_bytes: int, count: int) -> list[float]:
    """Make `count` round trips after a warm-up; return half of each, in seconds."""
    found = []
    out, back = torch.zeros(num_bytes // 4), torch.empty(num_bytes // 4)
    for number in range(NUM_WARM_UP + count):
        time.sleep(PAUSE_S)
        begun_s = time.perf_counter()
        answer = dist.irecv(back, 1, tag=2 * number + 2)
        sent = dist.isend(out, 1, tag=2 * number + 1)
        sent.wait()
        answer.wait()
        found.append((time.perf_counter() - begun_s) / 2)
    return found[NUM_WARM_UP:]


def _pong(num_bytes: int, count: int) -> list[float]:
    """Echo every message of `_ping`."""
    tensor = torch.empty(num_bytes // 4)
    for number in range(NUM_WARM_UP + count):
        dist.irecv(tensor, 0, tag=2 * number + 1).wait()
        dist.isend(tensor, 0, tag=2 * number + 2).wait()
    return []


if __name__ == "__main__":
    main()
