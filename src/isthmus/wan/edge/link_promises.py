"""`LinkPromises`: the rates that bookings have on one direction of an emulated link, where no kernel enforces them."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from isthmus.core.errors import InputError
from isthmus.core.pool import Link
from isthmus.wan.control.wan_topology import Booking, FlowMatch, TransferBooking
from isthmus.wan.edge.edge_settings import OTHER_MINOR, ROOT_MINOR, edge_settings
from isthmus.wan.shaper import RateLimit

BYTES_PER_KBPS = 125


class LinkPromises:
    """Limits of the connections across `link` at one time: each booking's own, and one of all others together.

    A connection belongs to the booking whose flows match where its bytes go; the rest shares what is left, also while
    bookings send nothing. Raises `InputError` if more is promised than the link has.
    """

    def __init__(self, link: Link, bookings: Iterable[Booking | TransferBooking], now_s: float) -> None:
        here = [one for one in bookings if (one.request.source, one.request.target) == (link.source, link.target)]
        settings = edge_settings(here, link.source, now_s, link.bandwidth_gbps)
        flows = {one.request.name: one.request.flows for one in here}
        self._limits = [
            (flows[one.name], RateLimit(one.rate_kbps * BYTES_PER_KBPS))
            for one in settings.classes
            if one.minor not in (ROOT_MINOR, OTHER_MINOR)
        ]
        other = next(one for one in settings.classes if one.minor == OTHER_MINOR)
        self._other = RateLimit(other.rate_kbps * BYTES_PER_KBPS) if self._limits else None

    def limit(self, *, host: str, port: int | None, peer: str) -> RateLimit | None:
        """Return the limit of bytes that go to `host` and `port` (None: a dialler's own) from `peer`."""
        for flows, limit in self._limits:
            if any(_matches(flow, host, port, peer) for flow in flows):
                return limit
        return self._other


def _matches(flow: FlowMatch, host: str, port: int | None, peer: str) -> bool:
    """Return whether a TCP connection meets what a match states; a port that the emulator does not know meets none."""
    if flow.protocol == "udp" or flow.from_port is not None or (flow.to_port is not None and flow.to_port != port):
        return False
    pairs = (flow.to_network, host), (flow.from_network, peer)
    return all(network is None or ipaddress.ip_address(address) in network for network, address in pairs)


def require_known_ends(bookings: Iterable[Booking | TransferBooking], clusters: Iterable[str]) -> None:
    """Raise `InputError` for a booking that begins or ends at no cluster of the pool."""
    known = set(clusters)
    for one in bookings:
        for end in (one.request.source, one.request.target):
            if end not in known:
                raise InputError(
                    f"{one.request.name} is booked from or to {end}, which is no cluster of the pool",
                    hint=f"its ends are clusters: {', '.join(sorted(known))}",
                )
