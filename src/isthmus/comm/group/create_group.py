"""`register_backend`: makes torch.distributed create `IsthmusGroup`s, for all ranks or any subset of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from isthmus.comm.group.all_reduce_method import AllReduceMethod
from isthmus.comm.group.composed.composition import agree
from isthmus.comm.group.isthmus_group import BACKEND, IsthmusGroup
from isthmus.comm.group.transport_messages import GROUP_TAGS
from isthmus.comm.group.vendors.join_vendors import join_vendors
from isthmus.comm.group.vendors.known_vendors import VENDORS, available_vendors
from isthmus.comm.group.vendors.vendor import Vendor
from isthmus.comm.transport.transport import Transport
from isthmus.core.errors import PlanError
from isthmus.strategies import RANK_STRATEGIES

_GROUP_BITS = 35
"""Bits of a tag that tell groups apart."""


@dataclass(frozen=True)
class IsthmusOptions:
    """`pg_options` of `init_process_group("isthmus", pg_options=...)`."""

    transport: Transport
    clusters: tuple[str, ...]
    """Cluster of each rank."""
    host: str = "127.0.0.1"
    """This rank's address inside its cluster."""
    method: Callable[[IsthmusGroup], AllReduceMethod] | None = None
    """Another way to all-reduce over several clusters, such as `partial(FormattedSums, name="bf16")`; equal at all."""
    synchronisation: str | None = None
    """Strategy of all-reduces of groups that span clusters, one of `isthmus.strategies.RANK_STRATEGIES`."""
    names_sources: bool = False
    """Whether no rank calls `dist.recv` without `src`. Then gloo, which costs less and has no keys, carries messages
    inside each cluster of a group that spans several. Equal at all ranks."""
    device: str = "cpu"
    """Type of device that this rank computes on."""
    senders: tuple[int, ...] = ()
    """Ranks that send collectives to other clusters; default: all, so that every network card does. One of each host is
    faster where its ranks share a thin link, of 1 Gbit/s or less, on which their connections would displace each other.
    Equal at all ranks."""

    def __post_init__(self) -> None:
        if self.synchronisation is not None and self.synchronisation not in RANK_STRATEGIES:
            raise PlanError(
                f"no strategy of ranks is named '{self.synchronisation}'",
                hint=f"choose of {', '.join(RANK_STRATEGIES)}",
            )


class _WorldGroup(IsthmusGroup):
    """The group of all ranks: keeps the options, the vendors of each rank, and the numbers of groups made from it."""

    options: IsthmusOptions
    vendors: list[dict[str, Vendor]]
    names: dict[int, str]


def register_backend() -> None:
    """Register `"isthmus"` with torch.distributed; idempotent."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, create_group, extended_api=True, devices=["cpu", "cuda"])


def create_group(options: Any, group_options: IsthmusOptions | None) -> IsthmusGroup:
    """Create the group for `init_process_group`, or a part of it for `new_group`.

    Raises `PlanError` if the group of all ranks has no `IsthmusOptions`, or if it is of another backend.
    """
    if options.global_ranks_in_group:
        return _part_of(dist.group.WORLD, options, group_options)
    if not isinstance(group_options, IsthmusOptions):
        raise PlanError("the isthmus process group needs pg_options=IsthmusOptions(...)")
    transport, clusters = group_options.transport, group_options.clusters
    near = _ranks_near(transport.rank, range(transport.size), clusters)
    world = _WorldGroup(
        transport,
        clusters,
        synchronisation=group_options.synchronisation,
        names_sources=group_options.names_sources,
        senders=group_options.senders,
        name=options.group_id,
        timeout=options.timeout,
    )
    world.options, world.names = group_options, {}
    world.vendors, devices = _vendors_of_all(world, group_options.device, options.timeout)
    libraries = join_vendors(transport, near, group_options.host, options.timeout, channels=True)
    world.use_libraries(libraries, agree(world.vendors, clusters), devices)
    world.use_method(_method_of(world, group_options))
    return world


def _vendors_of_all(world: IsthmusGroup, device: str, timeout: timedelta) -> tuple[list[dict[str, Vendor]], list[str]]:
    """Return the vendors of each rank, by type of device, and the type it computes on; all ranks call this first."""
    own = available_vendors()
    bits = sum(1 << place for place, one in enumerate(VENDORS) if one in own.values())
    computes = sum(1 << place for place, one in enumerate(VENDORS) if own.get(device) is one)
    found = torch.zeros(world.size() * 2, dtype=torch.int64)
    world.all_gather_single(found, torch.tensor([bits, computes])).wait(timeout)
    pairs = found.view(-1, 2).tolist()
    vendors = [{one.device_type: one for place, one in enumerate(VENDORS) if of >> place & 1} for of, _ in pairs]
    types = [{1 << place: one.device_type for place, one in enumerate(VENDORS)}.get(of, "") for _, of in pairs]
    return vendors, types


def _part_of(world: Any, options: Any, group_options: Any) -> IsthmusGroup:
    """Return the group of some ranks of `world`; they alone call this, with one name.

    Of the `group_options`, if any, `synchronisation` replaces that of `world`.
    """
    if not isinstance(world, _WorldGroup):
        raise PlanError(
            "an isthmus group is made from the isthmus group of all ranks",
            hint='call init_process_group("isthmus", pg_options=IsthmusOptions(...)) first',
        )
    name, ranks = str(options.group_id), tuple(options.global_ranks_in_group)
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % (2**_GROUP_BITS - 1) + 1
    if world.names.setdefault(number, name) != name:
        raise PlanError(f"the groups {name} and {world.names[number]} have one number", hint="rename one of them")
    transport, clusters = world.transport, world.clusters
    near = _ranks_near(transport.rank, ranks, clusters)
    chosen = group_options if isinstance(group_options, IsthmusOptions) else world.options
    group = IsthmusGroup(
        transport,
        clusters,
        join_vendors(transport, near, world.options.host, options.timeout, number),
        agree([world.vendors[one] for one in ranks], [clusters[one] for one in ranks]),
        synchronisation=chosen.synchronisation,
        names_sources=world.options.names_sources,
        senders=world.options.senders,
        ranks=ranks,
        tag_base=number * GROUP_TAGS,
        name=name,
        timeout=options.timeout,
    )
    group.use_method(_method_of(group, world.options))
    return group


def _method_of(group: IsthmusGroup, options: IsthmusOptions) -> AllReduceMethod | None:
    """Return the method that the options ask for, for a group that spans clusters."""
    spans = len({group.clusters[one] for one in group.ranks}) > 1
    return options.method(group) if options.method is not None and spans else None


def _ranks_near(rank: int, ranks: Sequence[int], clusters: Sequence[str]) -> list[int]:
    """Return those of `ranks` that are in the cluster of `rank`."""
    return [one for one in ranks if clusters[one] == clusters[rank]]
