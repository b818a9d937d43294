"""`PathPlan`: a path and what it takes of each pipe when; `plan_path` finds one for a request of bandwidth.

Source: the report on cross-domain pooling, 3.5: bandwidth, delay, jitter and loss are promised together, across layers
and domains, for the whole time of a request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from isthmus.wan.control.wan_topology import PathBounds, PathRefusal, PathRequest, ServiceClass
from isthmus.wan.controller.find_path import PathLimits, find_path
from isthmus.wan.controller.pipe_bookings import PipeBookings, PipeSpan
from isthmus.wan.controller.wan_network import NetworkPipe, WanNetwork, whole_kbps


@dataclass(frozen=True, slots=True, kw_only=True)
class PathPlan:
    """Pipes in order, spans on them, and the rate of the flow in each (start, end, kbit/s)."""

    service: ServiceClass
    pipes: tuple[str, ...]
    spans: tuple[PipeSpan, ...]
    rates_kbps: tuple[tuple[float, float, int], ...]
    delay_ms: float
    jitter_ms: float
    loss: float


def plan_path(
    network: WanNetwork,
    bookings: PipeBookings,
    request: PathRequest,
    *,
    avoid: Collection[str] = (),
    cost_factor: Callable[[NetworkPipe], float] | None = None,
    explains: bool = False,
) -> PathPlan | PathRefusal:
    """Return the path of least delay for `request` beside what is booked, or why there is none; books nothing.

    `avoid` names pipes that it must not use. The delay of a pipe counts `cost_factor(pipe)` times, from 1 on, so
    that paths can be led around loaded pipes; bounds hold for the true delay. With `explains` a refusal names the most
    bandwidth that a path has, which takes as long as dozens of searches; without it `nearest_gbps` is 0.
    """
    if refusal := check_ends(network, request):
        return refusal
    kbps = whole_kbps(request.bandwidth_gbps)
    start_s, end_s, service = request.start_s, request.end_s, request.service

    def free_kbps(pipe: NetworkPipe) -> int:
        return 0 if pipe.name in avoid else bookings.free_kbps(pipe.name, start_s, end_s, service)

    def search(wanted_kbps: int) -> list[NetworkPipe] | None:
        return find_path(
            network,
            network.nodes[request.source],
            network.nodes[request.target],
            PathLimits.of(request),
            lambda pipe: pipe.rounded_kbps(wanted_kbps) <= free_kbps(pipe),
            cost_factor,
        )

    path = search(kbps)
    if path is None:
        if explains:
            return _refusal(network, request, kbps, free_kbps, search)
        asked = f"{request.bandwidth_gbps:g} Gbit/s free in this time, within the bounds"
        reason = f"no path from {request.source} to {request.target} has {asked}"
        return PathRefusal(name=request.name, reason=reason, nearest_gbps=0.0)
    return planned(path, service, [(start_s, end_s, kbps)])


def check_ends(network: WanNetwork, request: PathBounds) -> PathRefusal | None:
    """Return why a request cannot begin or end where it says, or None."""
    for node in (request.source, request.target):
        if node not in network.nodes:
            return PathRefusal(name=request.name, reason=f"no pipe begins or ends at {node}", nearest_gbps=0.0)
        if network.edges and node not in network.edges:
            return PathRefusal(name=request.name, reason=f"{node} is no edge node", nearest_gbps=0.0)
    if request.source == request.target:
        return PathRefusal(name=request.name, reason=f"it begins and ends at {request.source}", nearest_gbps=0.0)
    return None


def planned(
    path: Sequence[NetworkPipe], service: ServiceClass, rates_kbps: Sequence[tuple[float, float, int]]
) -> PathPlan:
    """Return the plan of rates on a path, rounded up to the steps of each pipe."""
    return PathPlan(
        service=service,
        pipes=tuple(pipe.name for pipe in path),
        spans=tuple(
            PipeSpan(pipe.name, start_s, end_s, pipe.rounded_kbps(kbps))
            for pipe in path
            for start_s, end_s, kbps in rates_kbps
        ),
        rates_kbps=tuple(rates_kbps),
        delay_ms=sum(pipe.delay_ms for pipe in path),
        jitter_ms=sum(pipe.jitter_ms for pipe in path),
        loss=1 - math.exp(-sum(pipe.lost for pipe in path)),
    )


def _refusal(
    network: WanNetwork,
    request: PathRequest,
    kbps: int,
    free_kbps: Callable[[NetworkPipe], int],
    search: Callable[[int], list[NetworkPipe] | None],
) -> PathRefusal:
    """Return the reason, with the most bandwidth that a path has within the other bounds."""
    where = f"from {request.source} to {request.target}"
    if find_path(network, *_ends(network, request), PathLimits.of(request), lambda _: True) is None:
        reason = f"no path {where} is within the bounds on delay, jitter and loss"
        return PathRefusal(name=request.name, reason=reason, nearest_gbps=0.0)
    rates = sorted({usable for pipe in network.pipes if 0 < (usable := pipe.usable_kbps(free_kbps(pipe))) < kbps})
    low, high = 0, len(rates)
    while low < high:  # the highest rate that has a path
        middle = (low + high) // 2
        if search(rates[middle]) is None:
            high = middle
        else:
            low = middle + 1
    nearest_gbps = rates[low - 1] / 1e6 if low else 0.0
    reason = f"no path {where} within the bounds has bandwidth free in this time"
    if nearest_gbps:
        asked = f"{request.bandwidth_gbps:g} Gbit/s free in this time"
        reason = f"no path {where} has {asked}; {nearest_gbps:g} is the most"
    return PathRefusal(name=request.name, reason=reason, nearest_gbps=nearest_gbps)


def _ends(network: WanNetwork, request: PathBounds) -> tuple[int, int]:
    return network.nodes[request.source], network.nodes[request.target]
