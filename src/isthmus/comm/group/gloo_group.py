"""`join_gloo_group`: the gloo group of the ranks in one cluster, set up by a TCPStore at the first one."""

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

from isthmus.comm.group.group_work import gloo_error_text
from isthmus.comm.transport.transport import Transport
from isthmus.core.errors import PeerError

STORE_TIMEOUT = timedelta(seconds=30)
"""Time for the ranks, which are already connected, to open the store and join gloo."""

_NEVER_SENT_TAG = 2**31 - 1
"""Tag of a message that is never sent."""

_ADDRESS_BYTES = 280
"""Longest address: a host name (255), a space, a port."""


def join_gloo_group(
    transport: Transport, ranks: Sequence[int], host: str, timeout: timedelta, number: int = 0
) -> dist.ProcessGroupGloo | None:
    """Return the gloo group of `ranks`, which are in one cluster, in their order; None for a single rank.

    `host` is this rank's address inside the cluster. The first of the ranks listens on a free port and sends the
    address over the transport; `number` keeps groups apart that are joined in any order. Raises `PeerError` if a rank
    does not join. A loss of the transport wakes operations that wait in the group.
    """
    if len(ranks) == 1:
        return None

    def join() -> dist.ProcessGroupGloo:
        store = _open_store(transport, ranks, host, STORE_TIMEOUT, -1 - number)
        return gloo_group(store, ranks.index(transport.rank), len(ranks), host, timeout)

    try:
        group = _run_unless_lost(transport, join)
    except RuntimeError as error:
        raise PeerError(
            f"rank {transport.rank} could not join gloo with ranks {list(ranks)}: {gloo_error_text(error)}"
        ) from error
    others = [place for place, rank in enumerate(ranks) if rank != transport.rank]
    transport.add_loss_callback(partial(break_gloo_group, group, others))
    return group


def gloo_group(store: dist.Store, rank: int, size: int, host: str, timeout: timedelta) -> dist.ProcessGroupGloo:
    """Return the gloo group of `size` ranks that meet at `store`; this rank listens at its address `host`."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


def _run_unless_lost(transport: Transport, join: Callable[[], dist.ProcessGroupGloo]) -> dist.ProcessGroupGloo:
    """Return `join()`; raise if the transport is lost meanwhile, since gloo would wait for the lost peer."""
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
    transport.add_loss_callback(lambda: settle(lambda: made.set_exception(_loss_error(transport))))
    return made.result()


def _loss_error(transport: Transport) -> PeerError:
    return transport.loss() or PeerError(f"rank {transport.rank} closed its transport")


def break_gloo_group(group: dist.ProcessGroupGloo, others: Sequence[int]) -> None:
    """Make operations that wait in `group` fail: gloo does not see losses outside the group.

    The only way to break a gloo group is a receive that times out. A receive from a lost rank fails without
    breaking the group, so each of the `others` is tried.
    """
    for other in others:
        with suppress(RuntimeError):
            group.recv([torch.empty(1)], other, _NEVER_SENT_TAG).wait(timedelta(milliseconds=1))


def _open_store(transport: Transport, ranks: Sequence[int], host: str, timeout: timedelta, tag: int) -> dist.TCPStore:
    """Return the TCPStore of this cluster, served by the first of `ranks`."""
    first, limit_s = ranks[0], timeout.total_seconds()
    if transport.rank == first:
        listener = socket.create_server((host, 0))
        port = listener.getsockname()[1]
        address = f"{host} {port}".encode()
        store = dist.TCPStore(
            host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        sends = [transport.send(rank, tag, "store", _pad_address(address)) for rank in ranks[1:]]
        for one in sends:
            one.result(limit_s)
        return store
    received = bytearray(_ADDRESS_BYTES)
    transport.receive(first, tag, "store", memoryview(received)).result(limit_s)
    name, _, number = received.rstrip(b"\0").decode().rpartition(" ")
    return dist.TCPStore(name, int(number), None, False, timeout, wait_for_workers=False)


def _pad_address(address: bytes) -> memoryview:
    return memoryview(address.ljust(_ADDRESS_BYTES, b"\0"))
