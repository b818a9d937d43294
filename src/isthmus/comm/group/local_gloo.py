"""`local_group`: gloo among the ranks of one cluster; they meet in a TCPStore at the lowest of them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from isthmus.comm.group.group_work import gloo_reason
from isthmus.comm.transport.transport import Transport
from isthmus.core.errors import PeerError

MEETING = timedelta(seconds=30)
"""How long ranks that have all met already may take to find the store of their gloo."""

_PORT_TAG = -1
_BREAK_TAG = 2**31 - 1
"""The tag of a message that never comes."""

_WHERE_BYTES = 280
"""Longest host name (255), a blank, a port."""


def local_group(
    transport: Transport, clusters: Sequence[str], host: str, timeout: timedelta
) -> dist.ProcessGroupGloo | None:
    """Return the gloo group of the ranks in our cluster, in the order of ranks; None for a rank alone there.

    `clusters[r]` is the cluster of rank `r`, `host` our address inside it. The lowest rank listens on a free
    port of its host and tells the others by the transport. Raises `PeerError` where one does not come.
    Whoever waits in the group wakes when the transport is lost.
    """
    mine = clusters[transport.rank]
    near = [rank for rank, cluster in enumerate(clusters) if cluster == mine]
    if len(near) == 1:
        return None
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timeout

    def join() -> dist.ProcessGroupGloo:
        store = _meet(transport, near, host, MEETING)
        return dist.ProcessGroupGloo(store, near.index(transport.rank), len(near), options)

    try:
        group = _unless_lost(transport, join)
    except RuntimeError as error:
        raise PeerError(
            f"rank {transport.rank} could not join gloo in cluster {mine}: {gloo_reason(error)}"
        ) from error
    others = [place for place, rank in enumerate(near) if rank != transport.rank]
    transport.when_lost(partial(break_group, group, others))
    return group


def _unless_lost(transport: Transport, join: Callable[[], dist.ProcessGroupGloo]) -> dist.ProcessGroupGloo:
    """Return what `join` makes; raise a loss of the transport meanwhile: gloo would wait for the dead."""
    made: Future[dist.ProcessGroupGloo] = Future()

    def settle(result: Callable[[], None]) -> None:
        with suppress(InvalidStateError):
            result()

    def run() -> None:
        try:
            group = join()
        except Exception as error:
            reason = error
            settle(lambda: made.set_exception(reason))
        else:
            settle(lambda: made.set_result(group))

    threading.Thread(target=run, name="isthmus-gloo", daemon=True).start()
    transport.when_lost(lambda: settle(lambda: made.set_exception(_loss_of(transport))))
    return made.result()


def _loss_of(transport: Transport) -> PeerError:
    return transport.loss() or PeerError(f"rank {transport.rank} has given the group up")


def break_group(group: dist.ProcessGroupGloo, others: Sequence[int]) -> None:
    """Wake whoever waits inside `group`, with an error: gloo knows nothing of a loss elsewhere.

    A time-out of one message breaks the whole group, and there is no other way to break one. From one of the
    `others` who is gone an error comes at once, and breaks nothing: so each is tried.
    """
    for other in others:
        with suppress(RuntimeError):
            group.recv([torch.empty(1)], other, _BREAK_TAG).wait(timedelta(milliseconds=1))


def _meet(transport: Transport, near: Sequence[int], host: str, timeout: timedelta) -> dist.TCPStore:
    """Return the store of our cluster; the lowest rank serves it."""
    lowest, limit_s = near[0], timeout.total_seconds()
    if transport.rank == lowest:
        listener = socket.create_server((host, 0))
        port = listener.getsockname()[1]
        where = f"{host} {port}".encode()
        store = dist.TCPStore(
            host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        sends = [transport.send(rank, _PORT_TAG, "store", _padded(where)) for rank in near[1:]]
        for one in sends:
            one.result(limit_s)
        return store
    told = bytearray(_WHERE_BYTES)
    transport.receive(lowest, _PORT_TAG, "store", memoryview(told)).result(limit_s)
    name, _, number = told.rstrip(b"\0").decode().rpartition(" ")
    return dist.TCPStore(name, int(number), None, False, timeout, wait_for_workers=False)


def _padded(where: bytes) -> memoryview:
    return memoryview(where.ljust(_WHERE_BYTES, b"\0"))
