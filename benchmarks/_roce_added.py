"""What a pair of gateway processes adds to the way of a frame, on loopback: their time, and nothing of a network's."""

from __future__ import annotations

import asyncio
import ipaddress
import multiprocessing
import secrets
import select
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from isthmus.wan.dial import parse_address
from isthmus.wan.gateway.gateway_config import Address, FarSite, GatewayConfig
from isthmus.wan.gateway.gateway_service import GatewayService
from isthmus.wan.gateway.nic_port import bind_udp
from isthmus.wan.roce.gateway.gateway_settings import GatewaySettings

NETWORKS = {"near": [ipaddress.ip_network("10.1.0.0/16")], "far": [ipaddress.ip_network("10.2.0.0/16")]}
NICS = {"near": "10.1.0.1", "far": "10.2.0.1"}
WAIT_S = 5.0
GAP_S = 1e-3


def times_on_the_way(
    settings: GatewaySettings, frames: list[bytes], answer: Callable[[bytes], bytes]
) -> tuple[list[float], list[float]]:
    """Return the seconds of each frame through two gateways, and those of the same frames in plain datagrams."""
    near, far = bind_udp(("127.0.0.1", 0)), bind_udp(("127.0.0.1", 0))
    key, processes = secrets.token_bytes(32), []
    fork = multiprocessing.get_context("fork")
    try:
        places: dict[str, Address] = {}
        dialled: Address | None = None
        for site, other, nic in (("far", "near", far), ("near", "far", near)):
            config = GatewayConfig(
                site=site, near=NETWORKS[site],
                sites={other: FarSite(key=key, networks=NETWORKS[other], address=dialled)}, settings=settings,
                frames=("127.0.0.1", 0), nics={NICS[site]: nic.getsockname()},
            )  # fmt: skip
            ours, theirs = fork.Pipe()
            process = fork.Process(target=_serve, args=(config, theirs), daemon=True)
            process.start()
            processes.append(process)
            dialled, places[site] = ours.recv()
        through = [_send(near, places["near"], far, frame, answer, places["far"]) for frame in frames]
        direct = [_send(near, far.getsockname(), far, frame, None, None) for frame in frames]
    finally:
        for process in processes:
            process.kill()
            process.join()
        near.close()
        far.close()
    return through, direct


def _send(
    near: socket.socket, place: Address, far: socket.socket, frame: bytes,
    answer: Callable[[bytes], bytes] | None, back: Address | None,
) -> float:  # fmt: skip
    _drain(near)
    start_s = time.monotonic()
    while True:
        near.sendto(frame, place)
        if select.select([far], [], [], WAIT_S if answer is None else 0.5)[0]:
            break
        start_s = time.monotonic()  # the link is not open yet
    spent_s = time.monotonic() - start_s
    for found in _drain(far):
        if answer is not None and back is not None:
            far.sendto(answer(found), back)
    time.sleep(GAP_S)
    return spent_s


def _drain(one: socket.socket) -> list[bytes]:
    found: list[bytes] = []
    while select.select([one], [], [], 0)[0]:
        found.append(one.recv(2**16))
    return found


def _serve(config: GatewayConfig, parent: Connection) -> None:
    asyncio.run(_run(config, parent))


async def _run(config: GatewayConfig, parent: Connection) -> None:
    service = GatewayService(config, asyncio.get_running_loop())
    service.start()
    parent.send((parse_address(service.listens_at), parse_address(service.frames_at)))
    await asyncio.Event().wait()  # until it is killed
