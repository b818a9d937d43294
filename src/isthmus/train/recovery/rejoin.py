"""Joining, rejoining and leaving the process group of a run, whichever backend it uses."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from isthmus.comm.connect import meet
from isthmus.comm.group.isthmus_group import BACKEND, IsthmusGroup, IsthmusOptions, register_backend
from isthmus.comm.tcp.endpoint import Endpoint, listen
from isthmus.comm.tcp.wire_format import Greeting
from isthmus.comm.transport.transport import JoinedTransport
from isthmus.core.errors import PeerError, ProtocolError, RestartError
from isthmus.core.messages.agent_messages import RankMap, WorkerAddress
from isthmus.core.messages.worker_folder import WorkerSpec
from isthmus.core.units import format_seconds
from isthmus.train.liveness.heartbeat import Pulse
from isthmus.train.liveness.worker_events import EventLog
from isthmus.train.messages.traffic import lanes_between
from isthmus.train.messages.vendor_group import GROUP_TIMEOUT, join_plain

__all__ = ["Membership", "listen"]

GRACE_S = 4.0
"""How long after a final loss the main thread may take to end by itself."""

NEWS_S = 2.0
"""How long after an error the news of what is behind it may take to arrive."""


class Membership:
    """The place of this rank in the default process group of its run.

    `listener` is where the rank said that it listens; our own backend keeps a copy of it until its end. A
    vendor's backend is bound to `device`, and knows no second meeting. Under our own the ranks meet anew when
    the place of one that was lost is taken again, each time as a later incarnation, which `pulse` keeps.

    `join` raises `PeerError` where a rank does not come, `ProtocolError` where the rank map is not that of
    the plan.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        ranks: RankMap,
        listener: socket.socket,
        device: torch.device,
        pulse: Pulse,
        events: EventLog,
    ) -> None:
        self._spec, self._workers = spec, _checked(spec, ranks)
        self._listener, self._device = listener, device
        self._pulse, self._events = pulse, events
        self._transport: JoinedTransport | None = None

    def join(self, timeout_s: float | None = None) -> None:
        """Make the default process group; a rank that has been in one before comes as a later incarnation.

        The others may take `timeout_s`, or as long as the spec says.
        """
        if self._spec.backend == BACKEND:
            self._meet(self._pulse.incarnation + 1, timeout_s or self._spec.rendezvous_timeout_s)
        else:
            join_plain(self._spec, self._workers, self._listener, self._device)

    def rejoin(self, error: PeerError, drain: Callable[[], None]) -> None:
        """Meet the others anew after `error`, which told of a loss; between the groups `drain` is called.

        Raises it where the lost rank is gone for good: nobody answers at its address, it gave up, or nothing
        has come from it for `peer_timeout_s`.
        """
        if self._transport is None:
            raise error
        loss = self._transport.loss(NEWS_S)
        if loss is not None and not isinstance(loss, RestartError):
            raise loss from error
        if loss is None:
            self._events.tell("lost", error.message)
        self._abandon()
        drain()
        self._meet(self._pulse.incarnation + 1, self._spec.peer_timeout_s)

    def leave(self, reason: str = "") -> None:
        """Leave the default process group; a `reason` tells the peers that the run has failed.

        Without one, raises `PeerError` where a peer has not taken leave too: it may need us once more.
        """
        group = dist.group.WORLD
        if reason and isinstance(group, IsthmusGroup):
            group.give_up(reason)
        elif not reason:
            dist.destroy_process_group()
        if self._transport is not None:
            self._transport.close(reason)
            late = self._transport.stragglers()
            if late and not reason:
                raise PeerError(f"rank {', '.join(map(str, late))} ended without taking leave")

    def vanish(self) -> None:
        """Leave without a word, as a process that is killed: another one will take this rank's place."""
        if self._transport is not None:
            self._transport.abandon()

    def _meet(self, incarnation: int, timeout_s: float) -> None:
        """Join the group as `incarnation`, or as the latest that any rank has come to, within `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._pulse.joins(incarnation)
            try:
                self._make(incarnation, max(deadline_s - time.monotonic(), 0.1))
                return
            except PeerError as error:
                incarnation = self._next(error, incarnation)
                if time.monotonic() > deadline_s:
                    raise

    def _next(self, error: PeerError, incarnation: int) -> int:
        """Return the incarnation to try after a meeting that failed; raise `error` where none is left."""
        if self._transport is not None:  # all had met, and one was lost again
            error = self._transport.loss(NEWS_S) or RestartError(error.message)
            self._abandon()
        if not isinstance(error, RestartError):
            raise error
        return error.incarnation or incarnation + 1

    def _make(self, incarnation: int, timeout_s: float) -> None:
        spec, workers = self._spec, self._workers
        greeting = Greeting(spec.run, spec.attempt, spec.rank, len(workers), incarnation)
        endpoints = [_endpoint(spec, worker) for worker in workers]
        self._transport = transport = meet(
            spec.job.transport,
            greeting,
            endpoints,
            self._listener,
            timeout_s,
            heartbeat_s=spec.heartbeat_s,
            peer_timeout_s=spec.peer_timeout_s,
            on_loss=self._lost,
            on_link=self._tell_of_link,
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
        except PeerError:
            raise
        except BaseException:
            transport.close("the process group could not be made")
            raise

    def _abandon(self) -> None:
        """Let go of the group and its connections, so that another one can be made."""
        if self._transport is not None:
            self._transport.abandon()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._transport = None

    def _lost(self, error: PeerError) -> None:
        """Tell of a loss; after one that nothing mends, end should the main thread be stuck in a library."""
        self._events.tell("lost", error.message)
        if not isinstance(error, RestartError):
            _end_soon(error)

    def _tell_of_link(self, peer: int, why: str, lasted_s: float | None) -> None:
        if lasted_s is None:
            self._events.tell("cut", f"nothing comes from rank {peer}: {why}", peer=peer)
        else:
            again = f"rank {peer} is heard again after {format_seconds(lasted_s)}"
            self._events.tell("mended", again, peer=peer, seconds=lasted_s)


def _end_soon(error: PeerError) -> None:
    """End the process `GRACE_S` after a loss, should it be there still."""

    def end() -> None:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)

    timer = threading.Timer(GRACE_S, end)
    timer.daemon = True
    timer.start()


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
    lanes = lanes_between(spec.plan, spec.rank, worker.rank, spec.lanes)
    return Endpoint(worker.host, worker.port, route, lanes, spec.congestion_control)
