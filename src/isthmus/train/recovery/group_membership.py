"""`GroupMembership`: joining, rejoining and leaving the process group of a run, with any backend."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from isthmus.comm.channel.link_keys import LinkKeys
from isthmus.comm.connect_transport import connect_transport
from isthmus.comm.group.create_group import IsthmusOptions, register_backend
from isthmus.comm.group.isthmus_group import BACKEND, IsthmusGroup
from isthmus.comm.tcp.endpoint import Endpoint
from isthmus.comm.tcp.greeting import Greeting
from isthmus.comm.transport.transport import JoinedTransport
from isthmus.core.errors import PeerError, ProtocolError, RestartError
from isthmus.core.messages.agent_messages import RankMap, WorkerAddress
from isthmus.core.messages.worker_folder import WorkerSpec
from isthmus.core.model import load_model
from isthmus.core.units import format_seconds
from isthmus.train.communication.connection_counts import num_connections
from isthmus.train.communication.max_message_bytes import max_message_bytes
from isthmus.train.communication.torch_process_group import GROUP_TIMEOUT, join_torch_group
from isthmus.train.liveness.heartbeat import Heartbeat
from isthmus.train.liveness.refused_callers import RefusedCallers
from isthmus.train.liveness.worker_events import EventLog

EXIT_GRACE_S = 4.0
"""How long after a final loss the main thread may take to exit before the process is ended."""

LOSS_REASON_WAIT_S = 2.0
"""How long to wait after an error for the transport to report its cause."""


class GroupMembership:
    """Membership of this rank in the default process group of its run.

    `listener` is the rank's listening socket; the Isthmus backend keeps a duplicate. Torch's own backends are
    bound to `device` and cannot rejoin. With the Isthmus backend, each group formed after a loss has a higher
    incarnation, which `heartbeat` keeps. Its links use `keys`; without them all ranks are on this machine.

    Raises `ProtocolError` if the rank map does not match the plan.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        ranks: RankMap,
        listener: socket.socket,
        device: torch.device,
        heartbeat: Heartbeat,
        events: EventLog,
        *,
        keys: LinkKeys | None = None,
    ) -> None:
        self._spec, self._workers = spec, _check_workers(spec, ranks)
        self._listener, self._device = listener, device
        self._heartbeat, self._events, self._keys = heartbeat, events, keys
        self._refused = RefusedCallers()
        self._transport: JoinedTransport | None = None

    def join(self, timeout_s: float | None = None) -> None:
        """Join the default process group, with the next incarnation.

        Raises `PeerError` if a rank does not join within `timeout_s` (default: the spec's timeout).
        """
        if self._spec.backend == BACKEND:
            self._rendezvous(self._heartbeat.incarnation + 1, timeout_s or self._spec.rendezvous_timeout_s)
        else:
            join_torch_group(self._spec, self._workers, self._listener, self._device)

    def rejoin(self, error: PeerError, drain: Callable[[], None]) -> None:
        """Leave the group after `error`, which reported a loss, call `drain`, and join a new group.

        Raises `PeerError` if the rank is lost for good: its address refuses connections, it gave up, or it is
        silent for `peer_timeout_s`.
        """
        if self._transport is None:
            raise error
        loss = self._transport.loss(LOSS_REASON_WAIT_S)
        if loss is not None and not isinstance(loss, RestartError):
            raise loss from error
        if loss is None:
            self._events.record("lost", error.message)
        self._drop_group()
        drain()
        self._rendezvous(self._heartbeat.incarnation + 1, self._spec.peer_timeout_s)

    def leave(self, reason: str = "") -> None:
        """Leave the default process group; a `reason` informs the peers that the run has failed.

        Without one, raises `PeerError` if a peer did not close too: it may need this rank for a recovery.
        """
        group = dist.group.WORLD
        if reason and isinstance(group, IsthmusGroup):
            group.close_with_error(reason)
        elif not reason:
            dist.destroy_process_group()
        if self._transport is not None:
            self._transport.close(reason)
            unclosed = self._transport.unclosed_peers()
            if unclosed and not reason:
                raise PeerError(f"rank {', '.join(map(str, unclosed))} ended without closing")

    def abandon(self) -> None:
        """Drop all connections without a close, as if killed: a restarted process will replace this one."""
        if self._transport is not None:
            self._transport.abort()

    def _rendezvous(self, incarnation: int, timeout_s: float) -> None:
        """Join as `incarnation`, or as a later one that another rank has reached, within `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._heartbeat.set_incarnation(incarnation)
            try:
                self._make_group(incarnation, max(deadline_s - time.monotonic(), 0.1))
                return
            except PeerError as error:
                incarnation = self._next_incarnation(error, incarnation)
                if time.monotonic() > deadline_s:
                    raise

    def _next_incarnation(self, error: PeerError, incarnation: int) -> int:
        """Return the incarnation to try after a failed join; raise `error` if a retry cannot help."""
        if self._transport is not None:  # the transport had joined, then lost a rank
            error = self._transport.loss(LOSS_REASON_WAIT_S) or RestartError(error.message)
            self._drop_group()
        if not isinstance(error, RestartError):
            raise error
        return error.incarnation or incarnation + 1

    def _make_group(self, incarnation: int, timeout_s: float) -> None:
        """Connect the transport and create the process group on it; raises `PeerError`."""
        spec, workers = self._spec, self._workers
        greeting = Greeting(spec.run, spec.attempt, spec.rank, len(workers), incarnation)
        endpoints = [_endpoint(spec, worker) for worker in workers]
        self._transport = transport = connect_transport(
            spec.job.transport,
            greeting,
            endpoints,
            self._listener,
            timeout_s,
            heartbeat_s=spec.heartbeat_s,
            peer_timeout_s=spec.peer_timeout_s,
            on_loss=self._on_loss,
            on_link=self._on_link,
            keys=self._keys,
            max_message_bytes=max_message_bytes(spec.plan, load_model(spec.job.model)),
            on_refused=self._on_refused,
        )
        register_backend()
        clusters = tuple(worker.cluster for worker in workers)
        options = IsthmusOptions(transport, clusters, spec.host, names_sources=True, device=self._device.type)
        try:
            dist.init_process_group(
                BACKEND,
                store=dist.HashStore(),
                rank=spec.rank,
                world_size=len(workers),
                timeout=GROUP_TIMEOUT,
                pg_options=options,
            )
        except PeerError:
            raise
        except BaseException:
            transport.close("the process group could not be created")
            raise

    def _drop_group(self) -> None:
        """Destroy the group and its connections, so that a new one can be created."""
        if self._transport is not None:
            self._transport.abort()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._transport = None

    def _on_loss(self, error: PeerError) -> None:
        """Record a loss; after a final one, end the process even if the main thread blocks in a library."""
        self._events.record("lost", error.message)
        if not isinstance(error, RestartError):
            _exit_soon(error)

    def _on_refused(self, address: str) -> None:
        """Record that a caller was turned away, with those before it, once a minute at most."""
        text = self._refused.add(address, time.monotonic())
        if text is not None:
            self._events.record("refused", text)

    def _on_link(self, peer: int, why: str, lasted_s: float | None) -> None:
        """Record that the link to `peer` is cut, or mended after `lasted_s`."""
        if lasted_s is None:
            self._events.record("cut", f"no data from rank {peer}: {why}", peer=peer)
        else:
            detail = f"rank {peer} is reachable again after {format_seconds(lasted_s)}"
            self._events.record("mended", detail, peer=peer, seconds=lasted_s)


def _exit_soon(error: PeerError) -> None:
    """End the process after `EXIT_GRACE_S`, with the exit code of `error`."""

    def end() -> None:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)

    timer = threading.Timer(EXIT_GRACE_S, end)
    timer.daemon = True
    timer.start()


def _check_workers(spec: WorkerSpec, ranks: RankMap) -> list[WorkerAddress]:
    """Return the workers that train, sorted by rank; raise `ProtocolError` if they do not match the plan."""
    trains = [worker for worker in ranks.workers if not spec.plan.is_rollout(worker.rank)]
    workers = sorted(trains, key=lambda worker: worker.rank)
    found = [(worker.rank, worker.cluster) for worker in workers]
    expected = [(rank, spec.plan.stage_of(rank).cluster) for rank in range(len(spec.plan.ranks))]
    if found != expected:
        raise ProtocolError(f"the rank map has {found}, the plan {expected}", hint="restart the workers of this job")
    return workers


def _endpoint(spec: WorkerSpec, worker: WorkerAddress) -> Endpoint:
    """Return the address of `worker`, with route and number of connections if it is in another cluster."""
    if worker.cluster == spec.cluster:
        return Endpoint(worker.host, worker.port)
    route = spec.routes.get(worker.cluster)
    lanes = num_connections(spec.plan, spec.rank, worker.rank, spec.lanes)
    device = spec.rdma_device(worker.cluster)
    return Endpoint(worker.host, worker.port, route, lanes, spec.congestion_control, device)
