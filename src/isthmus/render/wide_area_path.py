"""`WideAreaPath`: what is between one part of a job and its other parts; `wide_area_path` reads it from a pool."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from isthmus.core.base_model import FrozenModel, NonNegativeFloat
from isthmus.core.plan import Plan
from isthmus.core.pool import Link

NetworkKind = Literal["local", "reserved", "best-effort"]
"""The network of a part: inside one cluster, or wide-area links that all are reserved, or any that is not."""


class WideAreaPath(FrozenModel):
    """The longest round trip and the lowest bandwidth between a part and the other parts of its job."""

    kind: NetworkKind = "local"
    round_trip_s: NonNegativeFloat = 0.0
    bandwidth_gbps: NonNegativeFloat = 0.0

    @property
    def in_flight_bytes(self) -> int:
        """Bytes that fill the path: bandwidth times round-trip time."""
        return round(self.bandwidth_gbps * 1e9 / 8 * self.round_trip_s)


def wide_area_path(plan: Plan, links: Iterable[Link], cluster: str) -> WideAreaPath:
    """Return the path from `cluster` to the other clusters of the plan, over both directions of each of `links`."""
    others = [other for other in plan.clusters if other != cluster]
    if not others:
        return WideAreaPath()
    pairs = [pair for other in others for pair in ((cluster, other), (other, cluster))]
    known = {(link.source, link.target): link for link in links}
    found = [known[pair] for pair in pairs if pair in known]
    reserved = len(found) == len(pairs) and all(link.link_class == "reserved" for link in found)
    delay_ms = {(link.source, link.target): link.delay_ms for link in found}
    round_trips_ms = [delay_ms.get((cluster, other), 0.0) + delay_ms.get((other, cluster), 0.0) for other in others]
    return WideAreaPath(
        kind="reserved" if reserved else "best-effort",
        round_trip_s=max(round_trips_ms) / 1e3,
        bandwidth_gbps=min((link.bandwidth_gbps for link in found), default=0.0),
    )
