"""What a pair of gateway processes adds to the way of a frame, on loopback: their time, and nothing of a network's.

Beside them is a pair of processes that only forward: what the kernel and the interpreter take to be there at all.
"""

from __future__ import annotations

import ipaddress
import multiprocessing
import secrets
import select
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from benchmarks._roce_bound import flow_key
from isthmus.wan.dial import parse_address
from isthmus.wan.gateway.gateway_config import Address, FarSite, GatewayConfig
from isthmus.wan.gateway.nic_port import bind_udp
from isthmus.wan.gateway.run_gateway import run_gateway
from isthmus.wan.precise_timing import request_short_slice, take_real_time_priority
from isthmus.wan.roce.gateway.gateway_settings import GatewaySettings

NETWORKS = {"near": [ipaddress.ip_network("10.1.0.0/16")], "far": [ipaddress.ip_network("10.2.0.0/16")]}
NICS = {"near": "10.1.0.1", "far": "10.2.0.1"}
WAIT_S = 0.5
"""Longest wait for a frame; one that has not come by then is missed."""

OPEN_S = 20.0
"""Longest wait for the first frame, which the gateways' handshake precedes."""

GAP_S = 1e-3


class Ways(NamedTuple):
    """Seconds of each frame on its way from NIC to NIC, `WAIT_S` of one that was missed."""

    gateways: list[float]
    forwarders: list[float]
    direct: list[float]


def times_on_the_way(
    settings: GatewaySettings, frames: list[bytes], answer: Callable[[bytes], bytes], *, real_time: bool
) -> Ways:
    """Send each frame three ways in turn, so that other load meets all alike; the first one opens the link.

    All processes run as gateways with or without `--real-time` do. Raises `OSError` if that is not permitted.
    """
    wake = take_real_time_priority if real_time else request_short_slice
    with ThreadPoolExecutor(1) as thread:
        thread.submit(wake).result()  # before any process starts
    near, far = bind_udp(("127.0.0.1", 0)), bind_udp(("127.0.0.1", 0))
    key, processes = secrets.token_bytes(32), list[BaseProcess]()
    try:
        places: dict[str, Address] = {}
        dialled: Address | None = None
        for site, other, nic in (("far", "near", far), ("near", "far", near)):
            config = GatewayConfig(
                site=site, near=NETWORKS[site],
                sites={other: FarSite(key=key, networks=NETWORKS[other], address=dialled)}, settings=settings,
                frames=("127.0.0.1", 0), nics={NICS[site]: nic.getsockname()},
            )  # fmt: skip
            dialled, places[site] = _start(processes, partial(_serve, real_time=real_time), config)
        forward = partial(_forward, wake=wake)
        forwarder = _start(processes, forward, _start(processes, forward, far.getsockname()))
        routes = {"gateways": places["near"], "forwarders": forwarder, "direct": far.getsockname()}

        def send_all() -> Ways:
            wake()
            open_link(near, routes["gateways"], far, frames[0])
            ways = Ways([], [], [])
            for frame in frames[1:]:
                for name, times in ways._asdict().items():
                    times.append(send_frame(near, routes[name], far, frame))
                    for found in _drain(far):
                        if name == "gateways":
                            far.sendto(answer(found), places["far"])
                    time.sleep(GAP_S)
            return ways

        with ThreadPoolExecutor(1) as thread:  # whose priority ends with it
            return thread.submit(send_all).result()
    finally:
        for process in processes:
            process.kill()
            process.join()
        near.close()
        far.close()


def _start(processes: list[BaseProcess], run: Callable[..., None], what: object) -> Any:
    """Start a process that runs `run(what, connection)`; return what it says first."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    process = fork.Process(target=run, args=(what, theirs), daemon=True)
    process.start()
    processes.append(process)
    return ours.recv()


def open_link(near: socket.socket, place: Address, far: socket.socket, frame: bytes, most_s: float = OPEN_S) -> None:
    """Send a frame again and again until it comes."""
    deadline_s, wait_s = time.monotonic() + most_s, min(WAIT_S, most_s)
    while send_frame(near, place, far, frame, wait_s) >= wait_s:
        if time.monotonic() >= deadline_s:
            raise RuntimeError(f"no frame has crossed the gateways in {most_s:g} s")


def send_frame(near: socket.socket, place: Address, far: socket.socket, frame: bytes, wait_s: float = WAIT_S) -> float:
    """Return the seconds until a frame has come to `far`, where it stays to be read; `wait_s` if it does not come."""
    _drain(near)
    start_s = now_s = time.monotonic()
    near.sendto(frame, place)
    while select.select([far], [], [], max(0.0, start_s + wait_s - now_s))[0]:
        now_s = time.monotonic()
        if far.recv(2**16, socket.MSG_PEEK) == frame:
            return min(now_s - start_s, wait_s)
        far.recv(2**16)  # a former frame, late
    return wait_s


def _drain(one: socket.socket) -> list[bytes]:
    found: list[bytes] = []
    while select.select([one], [], [], 0)[0]:
        found.append(one.recv(2**16))
    return found


def _forward(target: Address, parent: Connection, *, wake: Callable[[], None]) -> None:
    """Receive, look up, send on; until it is killed."""
    wake()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.bind(("127.0.0.1", 0))
        parent.send(one.getsockname())
        table: dict[tuple[bytes, int, int], Address] = {}
        while True:
            frame = one.recv(2**16)
            one.sendto(frame, table.setdefault(flow_key(frame), target))


def _serve(config: GatewayConfig, parent: Connection, *, real_time: bool) -> None:
    """Run a gateway as `isthmus gateway` does; until it is killed."""

    def on_start(at: dict[str, Any]) -> None:
        parent.send((parse_address(at["listen"]), parse_address(at["frames"])))

    run_gateway(config, None, on_start, real_time=real_time)
