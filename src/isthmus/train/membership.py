"""Joining and leaving the process group of a run, whichever backend it uses."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from isthmus.comm.frame import Greeting
from isthmus.comm.group import BACKEND, IsthmusGroup, IsthmusOptions, register_backend
from isthmus.comm.mesh import Endpoint, connect, listen
from isthmus.comm.tcp import TcpTransport
from isthmus.comm.work import gloo_reason
from isthmus.core.errors import PeerError, ProtocolError
from isthmus.core.messages import RankMap, WorkerAddress
from isthmus.core.worker import WorkerSpec
from isthmus.train.device import HOST_BACKENDS

__all__ = ["Membership", "join_group", "leave_group", "listen"]

GROUP_TIMEOUT = timedelta(hours=1)
"""Longest wait inside gloo: as long as a stage may compute; lost peers are noticed much sooner."""


@dataclass(frozen=True)
class Membership:
    """The default process group of this process, and its transport where it is ours."""

    transport: TcpTransport | None


def join_group(
    spec: WorkerSpec,
    ranks: RankMap,
    listener: socket.socket,
    on_loss: Callable[[PeerError], None],
    device: torch.device,
) -> Membership:
    """Make the default process group of the run's ranks; `listener` is where this rank said that it listens.

    Our own backend keeps a copy of the listener until its end. A vendor's backend is bound to `device`.

    `on_loss` is called from another thread once a peer is lost. Raises `PeerError` where one does not come,
    `ProtocolError` where the rank map is not that of the plan.
    """
    workers = _checked(spec, ranks)
    if spec.backend != BACKEND:
        _join_plain(spec, workers, listener, device)
        return Membership(None)
    greeting = Greeting(spec.run, spec.attempt, spec.rank, len(workers))
    endpoints = [_endpoint(spec, worker) for worker in workers]
    transport = TcpTransport(
        greeting,
        endpoints,
        connect(greeting, endpoints, listener, spec.rendezvous_timeout_s),
        listener.dup(),
        heartbeat_s=spec.heartbeat_s,
        peer_timeout_s=spec.peer_timeout_s,
        on_loss=on_loss,
    )
    register_backend()
    options = IsthmusOptions(transport, tuple(worker.cluster for worker in workers), spec.host)
    try:
        dist.init_process_group(
            BACKEND,
            store=dist.HashStore(),
            rank=spec.rank,
            world_size=len(workers),
            timeout=GROUP_TIMEOUT,
            pg_options=options,
        )
    except BaseException:
        transport.close("the process group could not be made")
        raise
    return Membership(transport)


def leave_group(membership: Membership, reason: str = "") -> None:
    """Leave the default process group; a `reason` tells the peers that the run has failed."""
    group = dist.group.WORLD
    if reason and isinstance(group, IsthmusGroup):
        group.give_up(reason)
    elif not reason:
        dist.destroy_process_group()
    if membership.transport is not None:
        membership.transport.close(reason)


def _checked(spec: WorkerSpec, ranks: RankMap) -> list[WorkerAddress]:
    """Return the workers by rank; raise `ProtocolError` unless they are those of the plan."""
    workers = sorted(ranks.workers, key=lambda worker: worker.rank)
    found = [(worker.rank, worker.cluster) for worker in workers]
    wanted = [(rank, spec.plan.stage_of(rank).cluster) for rank in range(len(spec.plan.ranks))]
    if found != wanted:
        raise ProtocolError(f"the rank map has {found}, the plan {wanted}", hint="start the part again")
    return workers


def _endpoint(spec: WorkerSpec, worker: WorkerAddress) -> Endpoint:
    if worker.cluster == spec.cluster:
        return Endpoint(worker.host, worker.port)
    route = spec.routes.get(worker.cluster)
    return Endpoint(worker.host, worker.port, route, spec.lanes, spec.congestion_control)


def _join_plain(
    spec: WorkerSpec, workers: list[WorkerAddress], listener: socket.socket, device: torch.device
) -> None:
    """Join a group of torch's own; rank 0 serves the store at the port it has checked in with."""
    first, timeout = workers[0], timedelta(seconds=spec.rendezvous_timeout_s)
    serving = spec.rank == 0
    try:
        store = dist.TCPStore(
            first.host,
            first.port,
            None,
            serving,
            timeout,
            wait_for_workers=False,
            master_listen_fd=socket.dup(listener.fileno()) if serving else None,
        )
        dist.init_process_group(
            spec.backend,
            store=store,
            rank=spec.rank,
            world_size=len(workers),
            timeout=GROUP_TIMEOUT,
            device_id=None if spec.backend in HOST_BACKENDS else device,
        )
    except RuntimeError as error:
        why = gloo_reason(error)
        raise PeerError(f"rank {spec.rank} could not join the {spec.backend} group: {why}") from error
