"""`Ways`: what a message takes between clusters, and which clusters are joined."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.core.link_physics import effective_bytes_per_s
from isthmus.core.pool import Pool
from isthmus.plan.time.calibration import Calibration


@dataclass(frozen=True)
class Way:
    """One direction between two clusters: its delay, the rate its transport reaches, whether it is steady."""

    delay_s: float
    bytes_per_s: float
    steady: bool = True


class Ways:
    """The links of a pool by their ends, at the rates that `isthmus.plan.time.loads.wires_of` gives."""

    def __init__(self, pool: Pool, calibration: Calibration) -> None:
        links = {(link.source, link.target): link for link in pool.links}
        self._ways = {
            ends: Way(
                link.delay_s,
                effective_bytes_per_s(link, links.get(ends[::-1]))
                * min(calibration.value("wan_share", f"{link.source}>{link.target}"), 1.0),
                not link.jitter_ms,
            )
            for ends, link in links.items()
        }

    def way(self, source: str, target: str) -> Way | None:
        """Return the way from one cluster to another, None where no link joins them."""
        return self._ways.get((source, target))

    def missing(self, a: str, b: str) -> tuple[str, str] | None:
        """Return the direction that lacks a link between two clusters, None where both have one."""
        for ends in ((a, b), (b, a)):
            if a != b and ends not in self._ways:
                return ends
        return None

    def rate(self, a: str, b: str) -> float:
        """Return the bytes a second of the slower direction between two clusters, 0 where not joined."""
        there, back = self.way(a, b), self.way(b, a)
        return min(there.bytes_per_s, back.bytes_per_s) if there and back else 0.0

    def exchange_s(self, a: str, b: str, num_bytes: float) -> float:
        """Return the mean seconds of one message, there and back, between joined clusters."""
        both = [way for way in (self.way(a, b), self.way(b, a)) if way]
        return sum(way.delay_s + num_bytes / way.bytes_per_s for way in both) / 2
