"""`edge_settings`: the kernel's queueing of an edge so that it sends what is promised, and nothing beyond.

Each booking that begins at the edge gets an htb class of its booked rate, which it can neither exceed nor lose; all
other packets share what is left, and borrow what is promised and not used. A pure function: `EdgeSettings` says what
is to be set, and `edge_changes` what has to change, so that flows whose rate stays lose no packet.

htb: the kernel's hierarchical token bucket (M. Devera, 2002); filters: u32, which matches bytes of the IP header.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from isthmus.core.errors import InputError
from isthmus.wan.control.wan_topology import Booking, FlowMatch, TransferBooking
from isthmus.wan.controller.wan_network import KBPS_PER_GBPS, whole_kbps

ROOT_MINOR, OTHER_MINOR, FIRST_MINOR, MAX_MINOR = 0x1, 0x2, 0x10, 0xFFFE
OTHER_SHARE = 0.01
"""What packets without a booking are left at least, for the control of the network itself."""
MAX_FILTERS = 30_000
_BURST_S = 2e-3
_MIN_BURST_BYTES = 20_000
"""More than the largest packet of MTU 9000, twice."""

_Version = Literal[4, 6]
_OFFSETS: Mapping[_Version, tuple[int, int, int, int]] = {4: (9, 12, 16, 20), 6: (6, 8, 24, 40)}
"""Bytes from the IP header's begin: protocol, source, target, ports; of packets without options or extensions."""
_MAX_BITS = 2 * 128 + 8 + 2 * 16
_PROTOCOLS = {"tcp": 6, "udp": 17}


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeClass:
    """An htb class: packets of `name`, at `rate_kbps`, at most at `ceil_kbps`."""

    minor: int
    name: str
    rate_kbps: int
    ceil_kbps: int
    priority: int
    burst_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeFilter:
    """Packets that go to a class: u32 keys (offset, value, mask) of one byte each, for one version of IP."""

    preference: int
    version: _Version
    minor: int
    keys: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeSettings:
    """What an edge's device is to do. The first class is that of all packets, the second that of other packets."""

    device_kbps: int
    classes: tuple[EdgeClass, ...]
    filters: tuple[EdgeFilter, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeChanges:
    """From settings to settings, in this order; all classes and filters are those of the new or (removed) old ones."""

    removed_filters: tuple[EdgeFilter, ...]
    removed_classes: tuple[EdgeClass, ...]
    changed_classes: tuple[EdgeClass, ...]
    added_classes: tuple[EdgeClass, ...]
    added_filters: tuple[EdgeFilter, ...]


def edge_settings(
    bookings: Iterable[Booking | TransferBooking],
    node: str,
    now_s: float,
    device_gbps: float,
    before: EdgeSettings | None = None,
) -> EdgeSettings:
    """Return the settings of the edge `node` at a time. Bookings keep the class numbers that they have in `before`.

    Raises `InputError` if more is promised than the device sends, or a booking under way states no flows.
    """
    device_kbps = whole_kbps(device_gbps)
    rates = {one.request.name: (one, rate) for one in bookings if (rate := _rate_kbps(one, node, now_s))}
    total_kbps = sum(rate for _, rate in rates.values())
    left_kbps = device_kbps - total_kbps
    if left_kbps < device_kbps * OTHER_SHARE:
        promised = f"{total_kbps / KBPS_PER_GBPS:g} Gbit/s at {now_s:g} s"
        raise InputError(
            f"{node} has promised {promised}, and its device sends {device_gbps:g}",
            hint=f"book less, or name a faster device; {OTHER_SHARE:.0%} is kept for other packets",
        )
    minors = _minors(rates, before)
    classes = [
        _edge_class(ROOT_MINOR, "all packets", device_kbps, device_kbps, 0),
        _edge_class(OTHER_MINOR, "other packets", left_kbps, device_kbps, 7),
    ]
    filters: list[tuple[int, _Version, tuple[tuple[int, int, int], ...]]] = []
    for name, (one, rate_kbps) in rates.items():
        if not one.request.flows:
            raise InputError(
                f"{name} states no flows, so its edge cannot tell its packets", hint="state `flows` in its request"
            )
        priority = 0 if isinstance(one, Booking) and one.request.service == "training" else 3
        classes.append(_edge_class(minors[name], name, rate_kbps, rate_kbps, priority))
        filters += [(minors[name], version, keys) for flow in one.request.flows for version, keys in _keys(flow)]
    if len(filters) > MAX_FILTERS:
        raise InputError(f"{node} has {len(filters):,} filters at {now_s:g} s", hint=f"at most {MAX_FILTERS:,}")
    return EdgeSettings(
        device_kbps=device_kbps,
        classes=tuple(sorted(classes, key=lambda one: one.minor)),
        filters=_numbered(filters, before),
    )


def edge_changes(before: EdgeSettings | None, after: EdgeSettings) -> EdgeChanges:
    """Return what leads from one to the other; from None, everything is added."""
    old_classes = {one.minor: one for one in before.classes} if before else {}
    new_classes = {one.minor: one for one in after.classes}
    old_filters, new_filters = set(before.filters if before else ()), set(after.filters)
    return EdgeChanges(
        removed_filters=tuple(sorted(old_filters - new_filters, key=lambda one: one.preference)),
        removed_classes=tuple(one for minor, one in old_classes.items() if minor not in new_classes),
        changed_classes=tuple(one for minor, one in new_classes.items() if old_classes.get(minor, one) != one),
        added_classes=tuple(one for minor, one in new_classes.items() if minor not in old_classes),
        added_filters=tuple(sorted(new_filters - old_filters, key=lambda one: one.preference)),
    )


def _rate_kbps(booking: Booking | TransferBooking, node: str, now_s: float) -> int:
    """Return what a booking sends at a time from `node`."""
    if booking.request.source != node:
        return 0
    if isinstance(booking, Booking):
        under_way = booking.request.start_s <= now_s < booking.request.end_s
        return whole_kbps(booking.request.bandwidth_gbps) if under_way else 0
    return next((whole_kbps(one.gbps) for one in booking.segments if one.start_s <= now_s < one.end_s), 0)


def _edge_class(minor: int, name: str, rate_kbps: int, ceil_kbps: int, priority: int) -> EdgeClass:
    burst_bytes = max(math.ceil(ceil_kbps * 125 * _BURST_S), _MIN_BURST_BYTES)
    return EdgeClass(
        minor=minor, name=name, rate_kbps=rate_kbps, ceil_kbps=ceil_kbps, priority=priority, burst_bytes=burst_bytes
    )


def _minors(names: Iterable[str], before: EdgeSettings | None) -> dict[str, int]:
    """Return a class number for each name; a name keeps the one that it has."""
    wanted = list(names)
    known = {one.name: one.minor for one in before.classes if one.minor >= FIRST_MINOR} if before else {}
    found = {name: known[name] for name in wanted if name in known}
    taken = {*found.values(), *known.values()}
    free = (minor for minor in range(FIRST_MINOR, MAX_MINOR) if minor not in taken)
    for name in wanted:
        if name not in found:
            minor = next(free, None)
            if minor is None:
                raise InputError(f"{len(wanted):,} bookings at one edge", hint="htb has 65,000 classes; use two edges")
            found[name] = minor
    return found


def _keys(flow: FlowMatch) -> Iterable[tuple[_Version, tuple[tuple[int, int, int], ...]]]:
    """Yield the u32 keys of a match, for each version of IP that it holds for."""
    versions: tuple[_Version, ...] = (4, 6)
    for version in versions:
        if flow.version not in (None, version):
            continue
        protocol_at, source_at, target_at, ports_at = _OFFSETS[version]
        keys: list[tuple[int, int, int]] = []
        for network, offset in ((flow.from_network, source_at), (flow.to_network, target_at)):
            if network is not None:
                keys += _bytes(network.network_address.packed, network.netmask.packed, offset)
        if flow.protocol is not None:
            keys.append((protocol_at, _PROTOCOLS[flow.protocol], 0xFF))
        if flow.from_port is not None:
            keys += _bytes(flow.from_port.to_bytes(2, "big"), b"\xff\xff", ports_at)
        if flow.to_port is not None:
            keys += _bytes(flow.to_port.to_bytes(2, "big"), b"\xff\xff", ports_at + 2)
        yield version, tuple(keys)


def _bytes(value: bytes, mask: bytes, offset: int) -> list[tuple[int, int, int]]:
    """Return the keys of the bytes that the mask covers."""
    return [(offset + i, value[i], mask[i]) for i in range(len(value)) if mask[i]]


def _numbered(
    filters: list[tuple[int, _Version, tuple[tuple[int, int, int], ...]]], before: EdgeSettings | None
) -> tuple[EdgeFilter, ...]:
    """Return filters with a preference each; those that match more of a packet come first.

    Preferences are blocks by the number of bits matched; a filter that stays keeps its own.
    """
    known = {(one.minor, one.version, one.keys): one.preference for one in before.filters} if before else {}
    taken = set(known.values())
    found: list[EdgeFilter] = []
    for minor, version, keys in dict.fromkeys(filters):
        bits = sum(mask.bit_count() for _, _, mask in keys)
        preference = known.get((minor, version, keys))
        if preference is None:
            first = 1 + (_MAX_BITS - bits) * (0xFFFE // (_MAX_BITS + 1))
            preference = next((one for one in range(first, 0xFFFF) if one not in taken), None)
            if preference is None:
                raise InputError("too many filters of one kind at an edge", hint="match larger networks")
            taken.add(preference)
        found.append(EdgeFilter(preference=preference, version=version, minor=minor, keys=keys))
    return tuple(sorted(found, key=lambda one: one.preference))
