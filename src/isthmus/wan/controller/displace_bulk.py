"""`displace_bulk`: a path for training that has room if bulk bookings give way, and which ones those are.

Transfers are in a class below training: they are planned again by their deadline, or wait without a path.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable

from isthmus.wan.control.wan_topology import PathRequest
from isthmus.wan.controller.find_path import PathLimits, find_path
from isthmus.wan.controller.path_plan import PathPlan, check_ends, planned
from isthmus.wan.controller.pipe_bookings import PipeBookings
from isthmus.wan.controller.wan_network import WanNetwork, whole_kbps


def displace_bulk(
    network: WanNetwork, view: PipeBookings, request: PathRequest, avoid: Collection[str]
) -> tuple[PathPlan, list[Hashable]] | None:
    """Release the bulk bookings that are in the way, in `view`; return the plan and their keys. None without a path."""
    if check_ends(network, request) or request.service != "training":
        return None
    kbps, start_s, end_s = whole_kbps(request.bandwidth_gbps), request.start_s, request.end_s
    path = find_path(
        network,
        network.nodes[request.source],
        network.nodes[request.target],
        PathLimits.of(request),
        lambda pipe: (
            pipe.name not in avoid and pipe.rounded_kbps(kbps) <= view.free_without_bulk_kbps(pipe.name, start_s, end_s)
        ),
    )
    if path is None:
        return None
    displaced: list[Hashable] = []
    for pipe in path:
        for key in reversed(view.bookings_on(pipe.name)):  # those booked last give way first
            if view.free_kbps(pipe.name, start_s, end_s, "training") >= pipe.rounded_kbps(kbps):
                break
            overlaps = any(
                span.pipe == pipe.name and span.start_s < end_s and start_s < span.end_s for span in view.spans_of(key)
            )
            if overlaps and view.is_bulk(key):
                view.release(key)
                displaced.append(key)
    return planned(path, request.service, [(start_s, end_s, kbps)]), displaced
