"""`tenant_shaping`, `shaping_commands`: the kernel's queueing of a gateway's device, a class for each VNI.

Control traffic comes before all tenants; each tenant has its rate in any case, and borrows up to its ceiling. Packets
find their class by the VNI in their VXLAN header, through a hash table of 256 buckets: a thousand tenants cost a packet
as much as four. Classes keep their numbers: a bandwidth changes in place, and no packet is lost.

htb: the kernel's hierarchical token bucket (M. Devera, 2002); filters: u32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from isthmus.core.errors import InputError
from isthmus.wan.tenancy.tenants_file import OTHER_SHARE, TenantsFile

ROOT, OTHER, CONTROL, BY_TCP, FIRST = 0x1, 0x2, 0x3, 0x4, 0x10
_KBPS_PER_GBPS = 1_000_000
_BURST_S = 2e-3
_MIN_BURST_BYTES = 20_000
"""More than the largest packet of MTU 9000, twice."""
_PRIORITY = {"training": 2, "bulk": 4}
_NUM_BUCKETS = 256
_MAX_NODE = 0xFFF
_TABLE = "2"
"""The hash table of VNIs."""
_FILTER = "protocol ip prio 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapedClass:
    """An htb class: at least `rate_kbps`, at most `ceil_kbps`."""

    minor: int
    name: str
    rate_kbps: int
    ceil_kbps: int
    priority: int


@dataclass(frozen=True, slots=True)
class TenantShaping:
    """What a device is to do: its classes, and the place of each VNI in the hash table, with its class."""

    classes: tuple[ShapedClass, ...]
    places: Mapping[int, tuple[int, int]]
    """By VNI: the node in its bucket, and the class."""
    port: int
    names: Mapping[str, int]
    """The class of each tenant."""


def tenant_shaping(file: TenantsFile, before: TenantShaping | None = None) -> TenantShaping:
    """Return the shaping of a file's device; tenants and VNIs keep the numbers that they have in `before`."""
    device_kbps = _kbps(file.gbps)
    promised = _kbps(file.control.gbps) + sum(_kbps(one.gbps) for one in file.tenants)
    kept_kbps = max(_kbps(file.gbps * OTHER_SHARE) // 2, 1)
    other_kbps = max(device_kbps - promised - kept_kbps, kept_kbps)
    names = _numbers([one.name for one in file.tenants], before.names if before else {})
    classes = [
        ShapedClass(minor=ROOT, name="all packets", rate_kbps=device_kbps, ceil_kbps=device_kbps, priority=0),
        ShapedClass(minor=OTHER, name="other packets", rate_kbps=other_kbps, ceil_kbps=device_kbps, priority=7),
        ShapedClass(
            minor=CONTROL, name="control", rate_kbps=_kbps(file.control.gbps), ceil_kbps=device_kbps, priority=0
        ),
        ShapedClass(minor=BY_TCP, name="frames by TCP", rate_kbps=kept_kbps, ceil_kbps=device_kbps, priority=3),
    ]
    classes += [
        ShapedClass(
            minor=names[one.name], name=one.name, rate_kbps=_kbps(one.gbps),
            ceil_kbps=_kbps(one.max_gbps or one.gbps), priority=_PRIORITY[one.service],
        )
        for one in file.tenants
    ]  # fmt: skip
    minors = {file.control.vni: CONTROL, **{one.vni: names[one.name] for one in file.tenants}}
    return TenantShaping(tuple(classes), _places(minors, before), file.port, names)


def shaping_commands(device: str, before: TenantShaping | None, after: TenantShaping) -> list[str]:
    """Return the lines for `tc -batch` that lead a device from one shaping to the other, in order."""
    old = {one.minor: one for one in before.classes} if before else {}
    new = {one.minor: one for one in after.classes}
    lines = list[str]()
    if before is None:
        lines.append(f"qdisc replace dev {device} root handle 1: htb default {OTHER:x}")
    old_places = before.places if before else {}
    for vni, place in old_places.items():
        if after.places.get(vni) != place:
            lines.append(f"filter del dev {device} parent 1: {_FILTER} handle {_node(vni, place[0])} u32")
    for minor in old.keys() - new.keys():
        lines.append(f"class del dev {device} classid 1:{minor:x}")
    for one in sorted(new.values(), key=lambda one: one.minor):
        if old.get(one.minor) != one:
            lines.append(_class_line(device, "change" if one.minor in old else "add", one))
    if before is None:
        lines += _table_lines(device, after.port)
    for vni, place in after.places.items():
        if old_places.get(vni) != place:
            lines.append(
                f"filter add dev {device} parent 1: {_FILTER} handle {_node(vni, place[0])} u32 ht {_bucket(vni)} "
                f"match u32 {vni << 8:#010x} 0xffffff00 at 32 flowid 1:{place[1]:x}"
            )
    return lines


def _table_lines(device: str, port: int) -> Iterator[str]:
    """Yield the lines that lead VXLAN by its VNI to a bucket, and frames by TCP to their class."""
    start = f"filter add dev {device} parent 1: {_FILTER}"
    yield f"{start} handle {_TABLE}: u32 divisor {_NUM_BUCKETS}"
    to_port = f"match u16 {port} 0xffff at 22"
    yield (
        f"{start} handle 800::1 u32 match ip protocol 17 0xff {to_port} "
        f"hashkey mask 0x0000ff00 at 32 link {_TABLE}:"
    )  # fmt: skip
    for node, match in ((2, to_port), (3, f"match u16 {port} 0xffff at 20")):
        yield f"{start} handle 800::{node} u32 match ip protocol 6 0xff {match} flowid 1:{BY_TCP:x}"


def _class_line(device: str, verb: str, one: ShapedClass) -> str:
    parent = "1:" if one.minor == ROOT else f"1:{ROOT:x}"
    burst = max(math.ceil(one.ceil_kbps * 125 * _BURST_S), _MIN_BURST_BYTES)
    return (
        f"class {verb} dev {device} parent {parent} classid 1:{one.minor:x} htb rate {one.rate_kbps}kbit "
        f"ceil {one.ceil_kbps}kbit burst {burst}b cburst {burst}b prio {one.priority} quantum {_MIN_BURST_BYTES}"
    )


def _kbps(gbps: float) -> int:
    return max(round(gbps * _KBPS_PER_GBPS), 1)


def _bucket(vni: int) -> str:
    return f"{_TABLE}:{vni % _NUM_BUCKETS:x}:"


def _node(vni: int, node: int) -> str:
    return f"{_bucket(vni)}{node:x}"


def _numbers(names: list[str], known: Mapping[str, int]) -> dict[str, int]:
    """Return a class for each name; a new one gets a number that was not in use before."""
    found = {name: known[name] for name in names if name in known}
    taken = {*known.values()}
    free = (minor for minor in range(FIRST, 0xFFFF) if minor not in taken)
    return {**found, **{name: next(free) for name in names if name not in found}}


def _places(minors: Mapping[int, int], before: TenantShaping | None) -> dict[int, tuple[int, int]]:
    """Return the node of each VNI in its bucket; a VNI of the same class keeps its node."""
    old = before.places if before else {}
    kept = {vni: old[vni] for vni, minor in minors.items() if vni in old and old[vni][1] == minor}
    taken = {(vni % _NUM_BUCKETS, node) for vni, (node, _) in {**old, **kept}.items()}
    found = dict(kept)
    for vni, minor in minors.items():
        if vni in found:
            continue
        bucket = vni % _NUM_BUCKETS
        node = next((one for one in range(1, _MAX_NODE + 1) if (bucket, one) not in taken), None)
        if node is None:
            raise InputError(f"{_MAX_NODE} VNIs with the same last byte as {vni}", hint="choose VNIs in a row")
        taken.add((bucket, node))
        found[vni] = node, minor
    return found
