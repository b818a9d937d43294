"""`pick_proxy`: which of several tunnels to a site takes a new connection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ProxyLoad:
    """What is known of one proxy of a site."""

    num_legs: int
    num_streams: int
    num_held_bytes: int
    """Bytes that wait to leave, or for their acknowledgement."""


def pick_proxy(loads: Sequence[ProxyLoad]) -> int:
    """Return the place of the proxy with the fewest connections a leg, then the fewest bytes held, then the first.

    Proxies without a leg come last: their link may be cut. A connection stays where it began.
    """
    if not loads:
        raise ValueError("a site has at least one proxy")

    def rank(place: int) -> tuple[bool, float, int, int]:
        load = loads[place]
        return load.num_legs == 0, load.num_streams / max(load.num_legs, 1), load.num_held_bytes, place

    return min(range(len(loads)), key=rank)
