"""`Routes`: message times between clusters."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from isthmus.core.pool import Pool
from isthmus.plan.time.calibration import Calibration
from isthmus.plan.time.plan_links import reached_bytes_per_s


@dataclass(frozen=True)
class Route:
    """One direction between two clusters."""

    delay_s: float
    # Rate that the transport reaches.
    bytes_per_s: float
    # Whether the link has no jitter.
    jitter_free: bool = True


@dataclass(frozen=True)
class PathCosts:
    """Message costs along a path of clusters. An exchange is the mean of both directions."""

    # Sum of the delays of all exchanges.
    delay_s: float = 0.0
    # Sum over all exchanges.
    s_per_byte: float = 0.0
    # Of the busiest link; each boundary sends equally much in both directions.
    slowest_s_per_byte: float = 0.0


class Routes:
    """The links of a pool by their ends, at the rates of `isthmus.plan.time.plan_links.simulated_links`."""

    def __init__(self, pool: Pool, calibration: Calibration) -> None:
        links = {(link.source, link.target): link for link in pool.links}
        self._routes = {
            ends: Route(
                link.delay_s,
                reached_bytes_per_s(calibration, link, links.get(ends[::-1])),
                not link.jitter_ms,
            )
            for ends, link in links.items()
        }
        self._index()

    def _index(self) -> None:
        """Prepare what is looked up by pairs of ends and by kinds of routes."""
        self._mutual_bytes_per_s: dict[str, dict[str, float]] = defaultdict(dict)
        for (a, b), there in self._routes.items():
            if back := self._routes.get((b, a)):
                self._mutual_bytes_per_s[a][b] = min(there.bytes_per_s, back.bytes_per_s)
        # Seconds of a message without bytes, and with one, by its ends.
        self._exchanges: dict[tuple[str, str], tuple[float, float]] = {}
        # Numbers of equal routes, and of each pair of ends.
        self._kinds: dict[Route | None, int] = {}
        self._kind_of: dict[tuple[str, str], int] = {}

    def route(self, source: str, target: str) -> Route | None:
        """Return the route from one cluster to another, None without a link."""
        return self._routes.get((source, target))

    def route_kind(self, ends: tuple[str, str]) -> int:
        """Return a number that is the same for equal routes; `ends`: (from, to)."""
        found = self._kind_of.get(ends)
        if found is None:
            found = self._kind_of[ends] = self._kinds.setdefault(self._routes.get(ends), len(self._kinds))
        return found

    def path_costs(self, clusters: tuple[str, ...]) -> PathCosts:
        """Return the message costs along a path of linked clusters."""
        if clusters not in self._path_cost_cache:
            self._path_cost_cache[clusters] = self._compute_path_costs(clusters)
        return self._path_cost_cache[clusters]

    @cached_property
    def _path_cost_cache(self) -> dict[tuple[str, ...], PathCosts]:
        return {}

    def _compute_path_costs(self, clusters: tuple[str, ...]) -> PathCosts:
        pairs = [(a, b) for a, b in itertools.pairwise(clusters) if a != b]
        loads = Counter(ends for a, b in pairs for ends in ((a, b), (b, a)))
        for ends in pairs:
            if ends not in self._exchanges:
                self._exchanges[ends] = self.exchange_s(*ends, 0.0), self.exchange_s(*ends, 1.0)
        delay_s = sum(self._exchanges[ends][0] for ends in pairs)
        return PathCosts(
            delay_s=delay_s,
            s_per_byte=sum(self._exchanges[ends][1] for ends in pairs) - delay_s,
            slowest_s_per_byte=max(
                (count / route.bytes_per_s for ends, count in loads.items() if (route := self.route(*ends))),
                default=0.0,
            ),
        )

    def ring_s(self, clusters: Sequence[str], num_bytes: float) -> float:
        """Return the seconds of a ring all-reduce over clusters in this order (infinite: not linked)."""
        steps, slowest_s, delay_s = 2 * (len(clusters) - 1), 0.0, 0.0
        for a, b in itertools.pairwise([*clusters, clusters[0]] if steps else []):
            route = self.route(a, b)
            if route is None:
                return math.inf
            slowest_s = max(slowest_s, steps / len(clusters) * num_bytes / route.bytes_per_s)
            delay_s = max(delay_s, route.delay_s)
        return slowest_s + steps * delay_s

    def linked_pairs(self) -> Iterator[tuple[str, str]]:
        """Yield each pair of clusters with links in both directions once."""
        return ((a, b) for a, b in self._routes if a < b and b in self._mutual_bytes_per_s[a])

    def missing_link(self, a: str, b: str) -> tuple[str, str] | None:
        """Return a direction between two clusters that lacks a link, None if both have one."""
        for ends in ((a, b), (b, a)):
            if a != b and ends not in self._routes:
                return ends
        return None

    def bytes_per_s(self, a: str, b: str) -> float:
        """Return the bytes per second of the slower direction between two clusters, 0 without links."""
        return self._mutual_bytes_per_s[a].get(b, 0.0)

    def exchange_s(self, a: str, b: str, num_bytes: float) -> float:
        """Return the seconds of one message between linked clusters, mean of both directions."""
        both = [route for route in (self.route(a, b), self.route(b, a)) if route]
        return sum(route.delay_s + num_bytes / route.bytes_per_s for route in both) / 2
