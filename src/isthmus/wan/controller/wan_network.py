"""`WanNetwork`: a topology prepared for searches: pipes by number, in whole kbit/s, and least distances to a node."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

from isthmus.core.errors import NotFoundError
from isthmus.wan.control.wan_topology import Layer, WanPipe, WanTopology

KBPS_PER_GBPS = 1_000_000
MAX_CACHED_TARGETS = 4_096
"""Nodes whose least distances are kept: a list of one number for each node."""
Metric = Literal["delay_ms", "jitter_ms", "lost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkPipe:
    """A pipe with its ends by number. `lost` is -log of the share that arrives, which adds up along a path."""

    name: str
    domain: str
    layer: Layer
    source: int
    target: int
    capacity_kbps: int
    step_kbps: int
    delay_ms: float
    jitter_ms: float
    lost: float

    def rounded_kbps(self, kbps: int) -> int:
        """Return the rate in whole steps that carries `kbps`."""
        return -(-kbps // self.step_kbps) * self.step_kbps

    def usable_kbps(self, free_kbps: int) -> int:
        """Return the whole steps within `free_kbps`."""
        return max(free_kbps, 0) // self.step_kbps * self.step_kbps


class WanNetwork:
    """The pipes of all domains. Immutable but for the cache of distances, which ignore what is booked or down."""

    def __init__(self, topology: WanTopology) -> None:
        names = dict.fromkeys(end for pipe in topology.pipes for end in (pipe.source, pipe.target))
        names |= dict.fromkeys(node.name for node in topology.nodes)
        self.nodes = {name: number for number, name in enumerate(names)}
        self.edges = {node.name for node in topology.nodes if node.role == "edge"}
        adapts = {node.name: node.adapts for node in topology.nodes}
        self.adapts = [adapts.get(name, True) for name in names]
        self.all_adapt = all(self.adapts)
        self.bulk_share = topology.bulk_share
        self.pipes = tuple(_network_pipe(pipe, self.nodes) for pipe in topology.pipes)
        self.numbers = {pipe.name: number for number, pipe in enumerate(self.pipes)}
        self.leaving: list[list[int]] = [[] for _ in names]
        self.arcs: list[list[tuple[int, int, float]]] = [[] for _ in names]
        self._entering: list[list[int]] = [[] for _ in names]
        for number, pipe in enumerate(self.pipes):
            self.leaving[pipe.source].append(number)
            self.arcs[pipe.source].append((number, pipe.target, pipe.delay_ms))
            self._entering[pipe.target].append(number)
        self._distances: OrderedDict[tuple[Metric, int], list[float]] = OrderedDict()

    def pipe(self, name: str) -> NetworkPipe:
        """Return the pipe `name`; raise `NotFoundError` if there is none."""
        if name not in self.numbers:
            raise NotFoundError(f"no pipe {name!r} in the topology", hint="names are those of `topology.pipes`")
        return self.pipes[self.numbers[name]]

    def entering_pipes(self, node: int) -> list[NetworkPipe]:
        """Return the pipes that end at a node."""
        return [self.pipes[number] for number in self._entering[node]]

    def distances(self, metric: Metric, target: int) -> list[float]:
        """Return the least sum of `metric` from each node to `target`, infinite where no path leads there."""
        key = metric, target
        found = self._distances.get(key)
        if found is None:
            found = self._distances[key] = self._search(metric, target)
            if len(self._distances) > MAX_CACHED_TARGETS:
                self._distances.popitem(last=False)
        return found

    def _search(self, metric: Metric, target: int) -> list[float]:
        """Search backwards from `target`: E. W. Dijkstra, Numerische Mathematik 1, 1959."""
        least = [math.inf] * len(self.nodes)
        least[target] = 0.0
        queue = [(0.0, target)]
        while queue:
            distance, node = heapq.heappop(queue)
            if distance > least[node]:
                continue
            for number in self._entering[node]:
                pipe = self.pipes[number]
                further = distance + float(getattr(pipe, metric))
                if further < least[pipe.source]:
                    least[pipe.source] = further
                    heapq.heappush(queue, (further, pipe.source))
        return least


def whole_kbps(gbps: float) -> int:
    """Return the kbit/s that carry `gbps`, rounded up."""
    return max(math.ceil(gbps * KBPS_PER_GBPS - 1e-6), 1)


def _network_pipe(pipe: WanPipe, nodes: dict[str, int]) -> NetworkPipe:
    capacity_kbps = math.floor(pipe.capacity_gbps * KBPS_PER_GBPS + 1e-6)
    step_kbps = whole_kbps(pipe.step_gbps) if pipe.step_gbps else 1
    return NetworkPipe(
        name=pipe.name,
        domain=pipe.domain,
        layer=pipe.layer,
        source=nodes[pipe.source],
        target=nodes[pipe.target],
        capacity_kbps=capacity_kbps,
        step_kbps=max(capacity_kbps, 1) if pipe.layer == "wavelength" else step_kbps,
        delay_ms=pipe.delay_ms,
        jitter_ms=pipe.jitter_ms,
        lost=math.inf if pipe.loss >= 1 else -math.log1p(-pipe.loss),
    )
