"""Ranks of one run in a process of their own, for `benchmarks.neighbours`: they meet, talk in a ring, and idle."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection

from isthmus.comm.join_ranks import join_ranks
from isthmus.comm.tcp.endpoint import Endpoint
from isthmus.comm.tcp.greeting import Greeting
from isthmus.comm.tcp.rendezvous import connect_ranks
from isthmus.comm.tcp.tcp_transport import TcpTransport
from isthmus.wan import listen

HEARTBEAT_S = 0.3
"""That of a job's workers."""
LIMIT_S = 300.0
SETTLE_S = 6.0
"""Time after the first messages until the links count as idle."""


@dataclass(frozen=True)
class IdleRanks:
    """What the ranks of one process measured."""

    met_s: float
    """When the last of them had met all others, on the monotonic clock of the machine."""
    talked_s: float
    """When the last of them had a message of the rank before it, over a link dialled for that."""
    num_threads: int
    """Threads of all transports of the process, in a run that idles after its first messages."""
    num_links: int
    """Links of all transports of the process."""
    cpu_s: float
    """CPU seconds of the process while it idled."""


def run_ranks(ranks: Sequence[int], size: int, idle_s: float, every: bool, line: Connection) -> None:
    """Run `ranks` of `size` in this process: exchange ports over `line`, meet, send to the next rank, idle, report.

    With `every`, each rank dials every other one, as a transport without a tree does.
    """
    listeners = {rank: listen("127.0.0.1") for rank in ranks}
    line.send([one.getsockname()[1] for one in listeners.values()])
    endpoints = [Endpoint("127.0.0.1", port) for port in line.recv()]
    before = threading.active_count()

    def join(rank: int) -> TcpTransport:
        greeting, listener = Greeting("bench", 1, rank, size), listeners[rank]
        if not every:
            return join_ranks(greeting, endpoints, listener, LIMIT_S, heartbeat_s=HEARTBEAT_S, peer_timeout_s=LIMIT_S)
        channels = connect_ranks(greeting, endpoints, listener, LIMIT_S)
        return TcpTransport(greeting, endpoints, channels, listener, heartbeat_s=HEARTBEAT_S, peer_timeout_s=LIMIT_S)

    with ThreadPoolExecutor(len(ranks)) as pool:
        transports = list(pool.map(join, ranks))
        met_s = time.monotonic()
        arriving = [one.receive((one.rank - 1) % size, 1, "x", memoryview(bytearray(1))) for one in transports]
        for one in transports:
            one.send((one.rank + 1) % size, 1, "x", memoryview(b"x"))
        for future in arriving:
            future.result(LIMIT_S)
        talked_s = time.monotonic()
    line.send(None)
    line.recv()
    num_threads, links = threading.active_count() - before, sum(len(one.traffic()) for one in transports)
    time.sleep(SETTLE_S)
    start_cpu_s = time.process_time()
    time.sleep(idle_s)
    line.send(IdleRanks(met_s, talked_s, num_threads, links, time.process_time() - start_cpu_s))
    line.recv()
    with ThreadPoolExecutor(len(ranks)) as pool:
        list(pool.map(lambda one: one.abort(), transports))
