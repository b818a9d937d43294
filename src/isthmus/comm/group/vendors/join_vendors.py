"""`join_vendors`: the vendors' groups of the ranks in one cluster, set up by a TCPStore at the first one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from isthmus.comm.group.group_work import gloo_error_text
from isthmus.comm.group.vendors.known_vendors import available_vendors
from isthmus.comm.group.vendors.vendor import Vendor
from isthmus.comm.group.vendors.vendor_group import VendorGroup
from isthmus.comm.meeting.rank_tree import heap_place
from isthmus.comm.transport.transport import Transport
from isthmus.core.errors import PeerError

STORE_TIMEOUT = timedelta(seconds=30)
"""Time for the ranks, which are already connected, to open the store and join the groups."""

_ADDRESS_BYTES = 280
"""Longest address: a host name (255), a space, a port."""

_Groups = dict[str, VendorGroup]

VendorGroups = Mapping[str, VendorGroup]
"""The groups of the ranks in one cluster, by type of device; empty for a single rank."""


def join_vendors(
    transport: Transport,
    ranks: Sequence[int],
    host: str,
    timeout: timedelta,
    number: int = 0,
    vendors: Mapping[str, Vendor] | None = None,
    *,
    channels: bool = False,
) -> VendorGroups:
    """Return the groups of `ranks`, which are in one cluster, in their order: of each vendor that all of them have.

    `host` is this rank's address inside the cluster; `vendors` are those of this rank (default: what torch reports).
    The first of the ranks listens on a free port, and the address goes over the transport, down a tree of the ranks;
    `number` keeps groups apart that are joined in any order. With `channels`, libraries of accelerators carry messages
    too. Raises `PeerError` if a rank does not join. A loss of the
    transport wakes operations that wait in the groups.
    """
    if len(ranks) == 1:
        return {}
    own = available_vendors() if vendors is None else vendors
    place, size = ranks.index(transport.rank), len(ranks)

    def join() -> dict[str, VendorGroup]:
        store = _open_store(transport, ranks, host, STORE_TIMEOUT, -1 - number)
        groups = {}
        for device_type, name in _common(store, place, size, own):
            vendor = own[device_type]
            names = (name, f"{name} up", f"{name} down")[: 3 if channels and device_type != "cpu" else 1]
            backend, *more = [vendor.create(dist.PrefixStore(one, store), place, size, host, timeout) for one in names]
            pair = (more[0], more[1]) if more else None
            groups[device_type] = VendorGroup(vendor, backend, place, size, pair)
        return groups

    try:
        groups = _run_unless_lost(transport, join)
    except RuntimeError as error:
        raise PeerError(
            f"rank {transport.rank} could not join its cluster's group of ranks {list(ranks)}: {gloo_error_text(error)}"
        ) from error
    for group in groups.values():
        transport.add_loss_callback(group.abort)
    return groups


def _common(store: dist.Store, place: int, size: int, own: Mapping[str, Vendor]) -> list[tuple[str, str]]:
    """Return (type of device, vendor) of those that all ranks have, in one order."""
    store.set(f"vendors/{place}", ",".join(f"{kind} {one.name}" for kind, one in own.items()))
    all_ranks = [store.get(f"vendors/{one}").decode().split(",") for one in range(size)]
    common = set(all_ranks[0]).intersection(*all_ranks[1:])
    pairs = (entry.partition(" ") for entry in sorted(common) if entry)
    return [(kind, name) for kind, _, name in pairs]


def _run_unless_lost(transport: Transport, join: Callable[[], _Groups]) -> _Groups:
    """Return `join()`; raise if the transport is lost meanwhile, since a library would wait for the lost peer."""
    made: Future[_Groups] = Future()

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

    threading.Thread(target=run, name="isthmus-vendors", daemon=True).start()
    transport.add_loss_callback(lambda: settle(lambda: made.set_exception(_loss_error(transport))))
    return made.result()


def _loss_error(transport: Transport) -> PeerError:
    return transport.loss() or PeerError(f"rank {transport.rank} closed its transport")


def _open_store(transport: Transport, ranks: Sequence[int], host: str, timeout: timedelta, tag: int) -> dist.TCPStore:
    """Return the TCPStore of this cluster, served by the first of `ranks`; its address goes down a tree of them."""
    limit_s, address = timeout.total_seconds(), memoryview(bytearray(_ADDRESS_BYTES))
    parent, children = heap_place(ranks, ranks.index(transport.rank))
    if parent is None:
        listener = socket.create_server((host, 0))
        port = int(listener.getsockname()[1])
        store = dist.TCPStore(
            host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        address = _pad_address(f"{host} {port}".encode())
    else:
        transport.receive(parent, tag, "store", address).result(limit_s)
    for one in [transport.send(rank, tag, "store", address) for rank in children]:
        one.result(limit_s)
    if parent is not None:
        name, _, number = bytes(address).rstrip(b"\0").decode().rpartition(" ")
        store = dist.TCPStore(name, int(number), None, False, timeout, wait_for_workers=False)
    return store


def _pad_address(address: bytes) -> memoryview:
    return memoryview(address.ljust(_ADDRESS_BYTES, b"\0"))
