"""`Delays`: latencies and intervals of a simulated pool, in seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Delays:
    """Latencies and intervals in seconds; the defaults assume a round trip of 40 ms to the server."""

    # One way between an agent and the server.
    network_s: float = 0.02
    # From a change at a site until its agent reports it.
    report_delay_s: float = 0.05
    # From new orders until the report that fetches them.
    poll_interval_s: float = 0.2
    # From a failed exchange until the next attempt.
    retry_delay_s: float = 1.0
    # From a request for plans until the planner's answer.
    planning_s: float = 0.01
    # From a worker's start until it checks in.
    check_in_s: float = 2.0
    # From SIGTERM until a worker has ended.
    stop_s: float = 1.0
    # From a part's end until its peers fail.
    peer_timeout_s: float = 10.0
    # Between two periodic checkpoints.
    checkpoint_interval_s: float = 1800.0
    # To write and verify a requested checkpoint, and to restore from one.
    checkpoint_s: float = 10.0
    restore_s: float = 20.0
    # Between two ticks of the server.
    tick_interval_s: float = 1.0
    # To copy a job's files to a site; 0: all sites share one storage.
    file_fetch_s: float = 0.0
    # From an order to check a job's files until the answer; 0: sites are not asked, since the time is below the others.
    preflight_s: float = 0.0
    # Between two reports without changes; infinite: such reports are omitted.
    heartbeat_interval_s: float = math.inf

    @property
    def has_heartbeat(self) -> bool:
        """Whether agents report without changes, which renews the lease of their workers."""
        return self.heartbeat_interval_s < math.inf
