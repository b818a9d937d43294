"""`apply_edge_settings`: set an edge's htb classes and filters on a device of this machine, through netlink (root)."""

from __future__ import annotations

import socket
from typing import Any

from isthmus.core.errors import NotFoundError, UnavailableError
from isthmus.wan.edge.edge_settings import (
    OTHER_MINOR,
    ROOT_MINOR,
    EdgeClass,
    EdgeSettings,
    edge_changes,
)

_HANDLE = 0x10000
"""1:, the queueing discipline of the device; its classes are 1:MINOR."""
_QUANTUM_BYTES = 20_000
"""That a class sends at a time where several borrow."""
_ETHER_TYPES = {4: 0x0800, 6: 0x86DD}


def apply_edge_settings(device: str, before: EdgeSettings | None, after: EdgeSettings) -> None:
    """Lead `device` from one setting to the other; without `before`, whatever it has is replaced.

    Classes that stay are changed in place and lose no packet. Raises `UnavailableError` without root, pyroute2 or the
    kernel's htb and u32, and `NotFoundError` for an unknown device.
    """
    try:
        from pyroute2 import IPRoute
        from pyroute2.netlink.exceptions import NetlinkError
    except ImportError as error:
        raise UnavailableError("pyroute2 is not installed", hint="pip install 'isthmus[wan]'") from error
    with IPRoute() as route:
        index = next(iter(route.link_lookup(ifname=device)), None)
        if index is None:
            raise NotFoundError(f"this machine has no network device {device!r}", hint="`ip link` lists them")
        try:
            _apply(route, index, before, after)
        except NetlinkError as error:
            raise UnavailableError(
                f"the kernel refuses the settings of {device}: {error}",
                hint="they need root, and the modules sch_htb and cls_u32; without root, `isthmus links --promises`",
            ) from error


def remove_edge_settings(device: str) -> None:
    """Give `device` back its own queueing."""
    from pyroute2 import IPRoute

    with IPRoute() as route:
        for index in route.link_lookup(ifname=device):
            route.tc("del", index=index, root=True)


def _apply(route: Any, index: int, before: EdgeSettings | None, after: EdgeSettings) -> None:
    if before is None:
        route.tc("replace", "htb", index, _HANDLE, default=OTHER_MINOR)
    changes = edge_changes(before, after)
    for gone in changes.removed_filters:
        info = gone.preference << 16 | socket.htons(_ETHER_TYPES[gone.version])
        route.tc("del-filter", index=index, parent=_HANDLE, info=info)
    for removed in changes.removed_classes:
        route.tc("del-class", index=index, handle=_HANDLE + removed.minor)
    for one in changes.changed_classes:
        _set_class(route, "change-class", index, one)
    for one in changes.added_classes:
        _set_class(route, "add-class", index, one)
    for added in changes.added_filters:
        route.tc(
            "add-filter", "u32", index, parent=_HANDLE, prio=added.preference,
            protocol=_ETHER_TYPES[added.version], target=_HANDLE + added.minor,
            keys=[f"{value:#04x}/{mask:#04x}+{offset}" for offset, value, mask in added.keys],
        )  # fmt: skip


def _set_class(route: Any, command: str, index: int, one: EdgeClass) -> None:
    route.tc(
        command, "htb", index, _HANDLE + one.minor,
        parent=_HANDLE + (0 if one.minor == ROOT_MINOR else ROOT_MINOR),
        rate=one.rate_kbps * 125, ceil=one.ceil_kbps * 125, prio=one.priority,
        burst=one.burst_bytes, cburst=one.burst_bytes, quantum=_QUANTUM_BYTES,
    )  # fmt: skip
