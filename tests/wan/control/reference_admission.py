"""`admit`: a path with the bandwidth, delay, jitter and loss that a request asks for, in its whole time, or a reason.

Source: the report on cross-domain pooling, 3.5. The path is the one of least delay that fits (label-setting search
with dominance: M. Desrochers, F. Soumis, INFOR 26(3), 1988); among paths of equal delay the one with the fewest
pipes. Nothing is ever promised twice: the rate of a pipe is the largest sum of bookings that overlap.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from isthmus.wan.control.wan_topology import Booking, PathRefusal, PathRequest, WanPipe, WanTopology

_Label = tuple[float, float, float]
"""Delay in ms, jitter in ms, -log of the delivered share."""


def admit(topology: WanTopology, booked: Sequence[Booking], request: PathRequest) -> Booking | PathRefusal:
    """Return the booking of `request` beside all `booked` ones, or why there is none."""
    if any(one.request.name == request.name for one in booked):
        return PathRefusal(name=request.name, reason=f"{request.name} is booked already", nearest_gbps=0.0)
    nodes = {pipe.source for pipe in topology.pipes} | {pipe.target for pipe in topology.pipes}
    for node in (request.source, request.target):
        if node not in nodes:
            return PathRefusal(name=request.name, reason=f"no pipe begins or ends at {node}", nearest_gbps=0.0)
    if request.source == request.target:
        return PathRefusal(name=request.name, reason=f"it begins and ends at {request.source}", nearest_gbps=0.0)
    free_gbps = _free_gbps(topology, booked, request)
    path = _least_delay_path(topology, request, free_gbps, request.bandwidth_gbps)
    if path is None:
        return _refusal(topology, request, free_gbps)
    delivered = math.prod(1 - pipe.loss for pipe in path)
    return Booking(
        request=request,
        pipes=tuple(pipe.name for pipe in path),
        rates_gbps=tuple(_rounded_gbps(pipe, request.bandwidth_gbps) for pipe in path),
        delay_ms=sum(pipe.delay_ms for pipe in path),
        jitter_ms=sum(pipe.jitter_ms for pipe in path),
        loss=1 - delivered,
    )


def _free_gbps(topology: WanTopology, booked: Sequence[Booking], request: PathRequest) -> Mapping[str, float]:
    """Return for each pipe what is free at every moment of the request's time, for its class."""
    overlapping = [one for one in booked if one.request.start_s < request.end_s and request.start_s < one.request.end_s]
    of_all: dict[str, list[tuple[float, float]]] = defaultdict(list)
    of_bulk: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for one in overlapping:
        for name, rate_gbps in zip(one.pipes, one.rates_gbps, strict=True):
            for changes in (of_all, of_bulk) if one.request.service == "bulk" else (of_all,):
                changes[name] += [(one.request.start_s, rate_gbps), (one.request.end_s, -rate_gbps)]
    free: dict[str, float] = {}
    for pipe in topology.pipes:
        free[pipe.name] = pipe.capacity_gbps - _peak_gbps(of_all[pipe.name])
        if request.service == "bulk":
            bulk_gbps = pipe.capacity_gbps * topology.bulk_share - _peak_gbps(of_bulk[pipe.name])
            free[pipe.name] = min(free[pipe.name], bulk_gbps)
    return free


def _peak_gbps(changes: Sequence[tuple[float, float]]) -> float:
    """Return the largest sum at a time; what ends at a moment makes room for what begins then."""
    current = peak = 0.0
    for _, change in sorted(changes):
        current += change
        peak = max(peak, current)
    return peak


def _rounded_gbps(pipe: WanPipe, rate_gbps: float) -> float:
    step_gbps = pipe.capacity_gbps if pipe.layer == "wavelength" else pipe.step_gbps
    return rate_gbps if step_gbps == 0 else math.ceil(rate_gbps / step_gbps - 1e-9) * step_gbps


def _least_delay_path(
    topology: WanTopology, request: PathRequest, free_gbps: Mapping[str, float], rate_gbps: float
) -> list[WanPipe] | None:
    leaving: dict[str, list[WanPipe]] = defaultdict(list)
    for pipe in topology.pipes:
        if _rounded_gbps(pipe, rate_gbps) <= free_gbps[pipe.name] * (1 + 1e-12):
            leaving[pipe.source].append(pipe)
    most_lost = math.inf if request.max_loss >= 1 else -math.log1p(-request.max_loss)
    kept: dict[str, list[tuple[_Label, int]]] = defaultdict(list)
    count = itertools.count()
    queue: list[tuple[float, int, int, _Label, str, tuple[WanPipe, ...]]] = [
        (0.0, 0, next(count), (0.0, 0.0, 0.0), request.source, ())
    ]
    while queue:
        _, num_pipes, _, label, node, path = heapq.heappop(queue)
        if node == request.target:
            return list(path)
        if any(all(a <= b for a, b in zip(old, label, strict=True)) and hops <= num_pipes for old, hops in kept[node]):
            continue
        kept[node].append((label, num_pipes))
        for pipe in leaving[node]:
            lost = math.inf if pipe.loss >= 1 else -math.log1p(-pipe.loss)
            after = label[0] + pipe.delay_ms, label[1] + pipe.jitter_ms, label[2] + lost
            if (
                after[0] <= request.max_delay_ms
                and after[1] <= request.max_jitter_ms
                and after[2] <= most_lost * (1 + 1e-12)
            ):
                heapq.heappush(queue, (after[0], num_pipes + 1, next(count), after, pipe.target, (*path, pipe)))
    return None


def _refusal(topology: WanTopology, request: PathRequest, free_gbps: Mapping[str, float]) -> PathRefusal:
    """Return the reason, with the most bandwidth that a path has within the other bounds."""
    rates = sorted({round(free, 9) for free in free_gbps.values() if 0 < free < request.bandwidth_gbps}, reverse=True)
    low, high = 0, len(rates)
    while low < high:  # the highest rate that has a path
        middle = (low + high) // 2
        if _least_delay_path(topology, request, free_gbps, rates[middle]) is None:
            low = middle + 1
        else:
            high = middle
    nearest_gbps = rates[low] if low < len(rates) else 0.0
    where = f"from {request.source} to {request.target}"
    if nearest_gbps:
        reason = (
            f"no path {where} has {request.bandwidth_gbps:g} Gbit/s free in this time; {nearest_gbps:g} is the most"
        )
    elif any(free <= 0 for free in free_gbps.values()):
        reason = f"no path {where} within the bounds has bandwidth free in this time"
    else:
        reason = f"no path {where} is within the bounds on delay, jitter and loss"
    return PathRefusal(name=request.name, reason=reason, nearest_gbps=nearest_gbps)
