"""`route_device`: bring up a gateway's TUN device and route the networks of other sites to it (root)."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from isthmus.core.errors import UnavailableError


def route_device(device: str, networks: Sequence[str], mtu_bytes: int) -> None:
    """Set `device` up with an MTU, and route `networks` to it; both go with the device.

    Raises `UnavailableError` without root or pyroute2.
    """
    with ThreadPoolExecutor(1) as thread:  # pyroute2 runs an event loop of its own, the caller has one in this thread
        thread.submit(_route, device, networks, mtu_bytes).result()


def _route(device: str, networks: Sequence[str], mtu_bytes: int) -> None:
    try:
        from pyroute2 import IPRoute
        from pyroute2.netlink.exceptions import NetlinkError
    except ImportError as error:
        raise UnavailableError("pyroute2 is not installed", hint="pip install 'isthmus[wan]'") from error
    try:
        with IPRoute() as route:
            index = route.link_lookup(ifname=device)[0]
            route.link("set", index=index, mtu=mtu_bytes, state="up")
            for network in networks:
                route.route("replace", dst=network, oif=index)
    except (NetlinkError, OSError, IndexError) as error:
        raise UnavailableError(
            f"{device} cannot be set up, or the networks of other sites not routed to it: {error}",
            hint="gateways with a `device` need root (CAP_NET_ADMIN); without `device` they carry the workers' own "
            "queue pairs and need none",
        ) from error
