"""`plan_again`: the path that a booking of the decision centre gets now, for what is left of its time and bytes."""

from __future__ import annotations

import math

from isthmus.wan.control.wan_topology import PathRefusal, PathRequest
from isthmus.wan.controller.booking_record import BookingRecord
from isthmus.wan.controller.path_plan import PathPlan, plan_path
from isthmus.wan.controller.pipe_bookings import PipeBookings
from isthmus.wan.controller.plan_transfer import plan_transfer
from isthmus.wan.controller.wan_network import WanNetwork


def plan_again(network: WanNetwork, view: PipeBookings, record: BookingRecord, now_s: float) -> PathPlan | PathRefusal:
    """Return the plan of `record` from now on, without the pipes that it avoids, or why there is none."""
    request = record.request
    start_s = max(request.start_s, now_s)
    if start_s >= record.ends_s:
        return PathRefusal(name=request.name, reason=f"its time ended at {record.ends_s:g} s", nearest_gbps=0.0)
    if isinstance(request, PathRequest):
        if start_s != request.start_s:
            request = request.model_copy(update={"start_s": start_s})
        return plan_path(network, view, request, avoid=record.avoid)
    left_bytes = max(math.ceil(request.num_bytes - record.sent_kbits * 125), 1)
    rest = request.model_copy(update={"start_s": start_s, "num_bytes": left_bytes})
    return plan_transfer(network, view, rest, avoid=record.avoid)
