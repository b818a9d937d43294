"""`follow_edge`: keep a device at what is booked, as the file of bookings and the time change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from isthmus.core.errors import IsthmusError
from isthmus.wan.control.wan_topology import Booking, TransferBooking
from isthmus.wan.edge.edge_settings import EdgeSettings, edge_settings

POLL_S = 0.5

_log = logging.getLogger(__name__)


def follow_edge(
    read: Callable[[], Sequence[Booking | TransferBooking]],
    apply: Callable[[EdgeSettings | None, EdgeSettings], None],
    wait: Callable[[float], bool],
    now_s: Callable[[], float],
    node: str,
    device_gbps: float,
    before: EdgeSettings | None = None,
) -> EdgeSettings | None:
    """Apply what has changed until `wait` returns True; return what is set at the end.

    What cannot be read, or is more than the device sends, is logged once, and leaves in force what is set.
    """
    said = ""
    while True:
        try:
            settings = edge_settings(read(), node, now_s(), device_gbps, before)
            if settings != before:
                apply(before, settings)
                before = settings
            said = ""
        except IsthmusError as error:
            if str(error) != said:
                _log.warning("the edge stays as it is: %s", error)
            said = str(error)
        if wait(POLL_S):
            return before
