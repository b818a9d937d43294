"""`find_path`: the path of least delay with free bandwidth, within bounds on delay, jitter and loss.

Label-setting search with dominance (M. Desrochers, F. Soumis, INFOR 26(3), 1988), guided by the least delay that is
left to the target in the empty network (P. Hart, N. Nilsson, B. Raphael, IEEE Transactions on Systems Science and
Cybernetics 4(2), 1968): it looks at few pipes beside the path, so that 1,000 nodes cost little more than ten. The
result is exact: the same delay as by enumeration of all paths.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from isthmus.wan.control.wan_topology import PathBounds
from isthmus.wan.controller.wan_network import Metric, NetworkPipe, WanNetwork

MAX_LABELS = 200_000
"""Partial paths of a search. Bounds on several qualities at once are NP-hard; beyond it the search reports no path."""

_Label = tuple[float, float, float, float]
"""Cost, delay in ms, jitter in ms, -log of the delivered share."""
_SLACK = 1 + 1e-12


@dataclass(frozen=True, slots=True)
class PathLimits:
    """The bounds of a search. `most_lost` is -log of the smallest delivered share."""

    max_delay_ms: float = math.inf
    max_jitter_ms: float = math.inf
    most_lost: float = math.inf

    @classmethod
    def of(cls, bounds: PathBounds) -> PathLimits:
        """Return the limits that a request states; what no path reaches counts as no limit."""
        lost = math.inf if bounds.max_loss >= 1 else -math.log1p(-bounds.max_loss) * _SLACK
        return cls(bounds.max_delay_ms, bounds.max_jitter_ms, lost)


def find_path(
    network: WanNetwork,
    source: int,
    target: int,
    limits: PathLimits,
    fits: Callable[[NetworkPipe], bool],
    cost_factor: Callable[[NetworkPipe], float] | None = None,
) -> list[NetworkPipe] | None:
    """Return the pipes of the cheapest path all of which `fits` admits, of equal ones the path with fewest pipes.

    The cost of a pipe is its delay, times `cost_factor(pipe)`, from 1 on. Paths change their layer only at nodes that
    adapt. None if there is no path.
    """
    if not any(map(fits, network.entering_pipes(target))):
        return None
    bounds_delay_only = limits.max_jitter_ms >= _NO_LIMIT and limits.most_lost == math.inf
    if bounds_delay_only and cost_factor is None and network.all_adapt:
        return _least_delay(network, source, target, limits.max_delay_ms * _SLACK, fits)
    return _Search(network, target, limits, fits, cost_factor).run(source)


def _least_delay(
    network: WanNetwork, source: int, target: int, max_delay_ms: float, fits: Callable[[NetworkPipe], bool]
) -> list[NetworkPipe] | None:
    """Return the path of least delay where only delay is bounded: one label a node suffices."""
    left_ms, pipes = network.distances("delay_ms", target), network.pipes
    closed = bytearray(len(left_ms))
    count = 0
    queue: list[tuple[float, int, int, float, int, _Step | None]] = [(left_ms[source], 0, 0, 0.0, source, None)]
    while queue:
        _, num_pipes, _, delay_ms, node, step = heapq.heappop(queue)
        if closed[node] or (step is not None and not fits(step.pipe)):  # as late as possible: few are ever reached
            continue
        if node == target:
            return _unrolled(step)
        closed[node] = True
        for number, after, pipe_ms in network.arcs[node]:
            if closed[after]:
                continue
            reached_ms = delay_ms + pipe_ms
            at_least_ms = reached_ms + left_ms[after]
            if at_least_ms <= max_delay_ms and at_least_ms < math.inf:
                count += 1
                heapq.heappush(
                    queue, (at_least_ms, num_pipes + 1, count, reached_ms, after, _Step(step, pipes[number]))
                )
    return None


class _Search:
    def __init__(
        self,
        network: WanNetwork,
        target: int,
        limits: PathLimits,
        fits: Callable[[NetworkPipe], bool],
        cost_factor: Callable[[NetworkPipe], float] | None,
    ) -> None:
        self._network, self._target, self._limits = network, target, limits
        self._fits, self._cost_factor = fits, cost_factor
        self._delays = network.distances("delay_ms", target)
        self._jitters = self._distances("jitter_ms", limits.max_jitter_ms)
        self._losts = self._distances("lost", limits.most_lost)
        has_one_metric = self._jitters is None and self._losts is None
        self._is_simple = has_one_metric and (cost_factor is None or limits.max_delay_ms == math.inf)
        self._admitted: dict[str, bool] = {}

    def _distances(self, metric: Metric, limit: float) -> list[float] | None:
        return None if limit >= _NO_LIMIT else self._network.distances(metric, self._target)

    def run(self, source: int) -> list[NetworkPipe] | None:
        count = itertools.count()
        kept: defaultdict[tuple[int, str], list[tuple[_Label, int]]] = defaultdict(list)
        start: _Label = (0.0, 0.0, 0.0, 0.0)
        if not self._is_open(source, start):
            return None
        queue: list[tuple[float, int, int, _Label, int, _Step | None]] = [
            (self._delays[source], 0, next(count), start, source, None)
        ]
        while queue:
            _, num_pipes, number, label, node, step = heapq.heappop(queue)
            if step is not None and not self._admits(step.pipe):  # as late as possible: most labels are never reached
                continue
            if node == self._target:
                return _unrolled(step)
            if number > MAX_LABELS:
                return None
            layer = "" if step is None or self._network.adapts[node] else step.pipe.layer
            if self._is_dominated(kept[node, layer], label, num_pipes):
                continue
            kept[node, layer].append((label, num_pipes))
            for pipe_number in self._network.leaving[node]:
                pipe = self._network.pipes[pipe_number]
                if layer and pipe.layer != layer:
                    continue
                after = self._extended(label, pipe)
                if self._is_open(pipe.target, after):
                    at_least = after[0] + self._delays[pipe.target]
                    heapq.heappush(queue, (at_least, num_pipes + 1, next(count), after, pipe.target, _Step(step, pipe)))
        return None

    def _is_dominated(self, kept: list[tuple[_Label, int]], label: _Label, num_pipes: int) -> bool:
        if self._is_simple:  # labels come by rising cost
            return bool(kept)
        return any(hops <= num_pipes and all(a <= b for a, b in zip(old, label, strict=True)) for old, hops in kept)

    def _extended(self, label: _Label, pipe: NetworkPipe) -> _Label:
        cost = pipe.delay_ms if self._cost_factor is None else pipe.delay_ms * self._cost_factor(pipe)
        return label[0] + cost, label[1] + pipe.delay_ms, label[2] + pipe.jitter_ms, label[3] + pipe.lost

    def _is_open(self, node: int, label: _Label) -> bool:
        """Return whether a path through `node` may stay within the bounds and reach the target."""
        least_ms = self._delays[node]
        if least_ms == math.inf or label[1] + least_ms > self._limits.max_delay_ms * _SLACK:
            return False
        if self._jitters is not None and label[2] + self._jitters[node] > self._limits.max_jitter_ms * _SLACK:
            return False
        return self._losts is None or label[3] + self._losts[node] <= self._limits.most_lost * _SLACK

    def _admits(self, pipe: NetworkPipe) -> bool:
        found = self._admitted.get(pipe.name)
        if found is None:
            found = self._admitted[pipe.name] = self._fits(pipe)
        return found


_NO_LIMIT = 1e9


class _Step:
    """A path as its last pipe and the path before it."""

    __slots__ = ("before", "pipe")

    def __init__(self, before: _Step | None, pipe: NetworkPipe) -> None:
        self.before, self.pipe = before, pipe


def _unrolled(step: _Step | None) -> list[NetworkPipe]:
    pipes: list[NetworkPipe] = []
    while step is not None:
        pipes.append(step.pipe)
        step = step.before
    return pipes[::-1]
