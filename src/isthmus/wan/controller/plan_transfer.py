"""`plan_transfer`: when and how fast a data set, checkpoint or model is sent so that it arrives by its deadline.

The rate follows what the class `bulk` has free over time on one path (malleable reservation: A. Naiksatam, S. Figueira,
Journal of Grid Computing 5, 2007): it sends as fast as fits from its start on, and of several paths takes the one on
which the last byte is sent first. Training is untouched: it has its capacity first, and bulk never more than its share.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from isthmus.wan.control.wan_topology import PathRefusal, TransferRequest
from isthmus.wan.controller.find_path import PathLimits, find_path
from isthmus.wan.controller.path_plan import PathPlan, check_ends, planned
from isthmus.wan.controller.pipe_bookings import PipeBookings
from isthmus.wan.controller.wan_network import NetworkPipe, WanNetwork, whole_kbps

MAX_PATHS = 6
"""Paths that are compared."""
MAX_SEGMENTS = 64
"""Changes of rate of one transfer, which its sender has to follow."""

_Rates = list[tuple[float, float, int]]


def plan_transfer(
    network: WanNetwork, bookings: PipeBookings, request: TransferRequest, *, avoid: Collection[str] = ()
) -> PathPlan | PathRefusal:
    """Return the plan whose last byte is sent first, of those by the deadline, or why there is none; books nothing."""
    if refusal := check_ends(network, request):
        return refusal
    best: tuple[float, list[NetworkPipe], _Rates] | None = None
    most_kbits = 0.0
    without = set(avoid)
    for path in _candidates(network, bookings, request, without):
        rates, sent_kbits = _rates(bookings, path, request)
        most_kbits = max(most_kbits, sent_kbits)
        if sent_kbits >= _kbits(request) and rates and (best is None or rates[-1][1] < best[0]):
            best = rates[-1][1], path, rates
    if best is not None:
        return planned(best[1], "bulk", best[2])
    where = f"from {request.source} to {request.target}"
    share = most_kbits / _kbits(request)
    reason = f"no path {where} has room for {request.num_bytes:,} bytes by {request.deadline_s:g} s; {share:.0%} fit"
    if not share:
        reason = f"no path {where} within the bounds has room for bulk transfers by {request.deadline_s:g} s"
    nearest_gbps = most_kbits / (request.deadline_s - request.start_s) / 1e6
    return PathRefusal(name=request.name, reason=reason, nearest_gbps=nearest_gbps)


def _kbits(request: TransferRequest) -> float:
    return request.num_bytes * 8 / 1000


def _candidates(
    network: WanNetwork, bookings: PipeBookings, request: TransferRequest, without: set[str]
) -> list[list[NetworkPipe]]:
    """Return paths: one with the mean rate free throughout, then others, each without the last one's narrowest pipe."""
    ends = network.nodes[request.source], network.nodes[request.target]
    limits, found = PathLimits.of(request), list[list[NetworkPipe]]()
    mean_kbps = whole_kbps(_kbits(request) / (request.deadline_s - request.start_s) / 1e6)

    def free_kbps(pipe: NetworkPipe) -> int:
        return bookings.free_kbps(pipe.name, request.start_s, request.deadline_s, "bulk")

    path = find_path(
        network, *ends, limits, lambda p: p.name not in without and p.rounded_kbps(mean_kbps) <= free_kbps(p)
    )
    if path is not None:
        found.append(path)
    closed = without | bookings.down
    for _ in range(MAX_PATHS - 1):
        path = find_path(
            network, *ends, limits, lambda p: p.name not in closed and p.usable_kbps(bookings.bulk_kbps[p.name]) > 0
        )
        if path is None:
            break
        if path not in found:
            found.append(path)
        closed.add(min(path, key=lambda p: _mean_free_kbps(bookings, p, request)).name)
    return found


def _mean_free_kbps(bookings: PipeBookings, pipe: NetworkPipe, request: TransferRequest) -> float:
    steps = bookings.free_steps(pipe.name, request.start_s, request.deadline_s, "bulk")
    return sum((end_s - start_s) * pipe.usable_kbps(kbps) for start_s, end_s, kbps in steps)


def _rates(bookings: PipeBookings, path: Sequence[NetworkPipe], request: TransferRequest) -> tuple[_Rates, float]:
    """Return the rates on a path until all bytes are sent, and how many kbit they carry by the deadline."""
    found: _Rates = []
    left_kbits = _kbits(request)
    most_kbps = whole_kbps(request.max_gbps)
    for start_s, end_s, kbps in _common_steps(bookings, path, request):
        rate_kbps = min(kbps, most_kbps)
        if rate_kbps <= 0:
            continue
        end_s = min(end_s, start_s + left_kbits / rate_kbps)
        left_kbits -= (end_s - start_s) * rate_kbps
        if found and found[-1][1] == start_s and found[-1][2] == rate_kbps:
            found[-1] = found[-1][0], end_s, rate_kbps
        elif end_s > start_s:
            found.append((start_s, end_s, rate_kbps))
        if left_kbits <= 1e-6 * _kbits(request):
            return found, _kbits(request)
        if len(found) > MAX_SEGMENTS:
            break
    return [], _kbits(request) - left_kbits


def _common_steps(bookings: PipeBookings, path: Sequence[NetworkPipe], request: TransferRequest) -> _Rates:
    """Return what is free on all pipes at once, by step."""
    common: _Rates = [(request.start_s, request.deadline_s, 2**62)]
    for pipe in path:
        steps = [
            (start_s, end_s, pipe.usable_kbps(kbps))
            for start_s, end_s, kbps in bookings.free_steps(pipe.name, request.start_s, request.deadline_s, "bulk")
        ]
        merged: _Rates = []
        one, other = 0, 0
        while one < len(common) and other < len(steps):
            start_s = max(common[one][0], steps[other][0])
            end_s = min(common[one][1], steps[other][1])
            if end_s > start_s:
                merged.append((start_s, end_s, min(common[one][2], steps[other][2])))
            if common[one][1] <= end_s:
                one += 1
            else:
                other += 1
        common = merged
    return common
