"""`Rules`: the times that the coordinator keeps, and how far it looks ahead in the queue."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.control.algorithms.global_order import Objective


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The coordinator's times, in seconds, and its windows, in jobs.

    `reservation_s` bounds how long chips are held at one site while another prepares; `start_s` how long
    workers may take to check in; `lease_s` is what a site may hold unrenewed; after `agent_lost_s` without
    a report a site is not connected. A refused job is tried again after `retry_s`, doubled at each refusal
    up to `retry_most_s`. Victims of a preemption have `protect_s` to save their work, and `evict_s` to leave.

    The first `window` jobs of the queue are weighed against each other and planned; the first `pushed` stand
    in the queues of their sites. `objective` and `patience_s` are what the operator wants of the queue
    (`global_order`); they take effect by the event `PoolSet`, since a log is not folded by others.
    """

    reservation_s: float = 30.0
    start_s: float = 150.0
    lease_s: float = 30.0
    agent_lost_s: float = 10.0
    retry_s: float = 2.0
    retry_most_s: float = 60.0
    objective: Objective = "arrival"
    patience_s: float = 3600.0
    protect_s: float = 600.0
    evict_s: float = 150.0
    window: int = 256
    pushed: int = 64

    def backoff_s(self, refusals: int) -> float:
        """Return how long a job waits after its `refusals`-th refusal in a row (from 1)."""
        return min(self.retry_s * 2.0 ** min(refusals - 1, 30), self.retry_most_s)
