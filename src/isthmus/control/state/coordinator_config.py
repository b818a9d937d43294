"""`CoordinatorConfig`: the timeouts of the coordinator and its windows on the queue."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.control.algorithms.global_order import Objective

_CLOCK_DRIFT = 1.01
"""Bound on the ratio of the speeds of two machines' monotonic clocks; quartz drifts by 0.01 %."""


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig:
    """The coordinator's timeouts, in seconds, and its windows, in jobs."""

    # Longest time that chips are held at one site while another prepares.
    reservation_timeout_s: float = 30.0
    # Longest time until all workers have checked in.
    start_timeout_s: float = 150.0
    # Longest time that a site holds a part without a renewed order.
    lease_s: float = 30.0
    # A site without a report for this long counts as disconnected.
    agent_timeout_s: float = 10.0
    # Longest time that workers of a site run without contact with the server (0: without limit). The server counts
    # them as ended `run_lease_margin_s` and 1 % later.
    run_lease_s: float = 900.0
    run_lease_margin_s: float = 5.0
    # Back-off after a refusal, doubled at each further one up to `max_retry_s`.
    retry_s: float = 2.0
    max_retry_s: float = 60.0
    # Initial objective and patience of the queue (`global_order`); the event `PoolSet` puts them into effect,
    # so that replaying the log does not depend on them.
    objective: Objective = "arrival"
    patience_s: float = 3600.0
    # Time in which the usage of a user counts half (`FairShare`; 0: the queue is by arrival), and the weights of users
    # that differ from 1; in effect by `PoolSet` too.
    half_life_s: float = 0.0
    share_weights: tuple[tuple[str, float], ...] = ()
    # Time that victims have to save and verify a checkpoint.
    checkpoint_timeout_s: float = 600.0
    # Time that victims have to release their chips.
    eviction_timeout_s: float = 150.0
    # Time that all sites of a plan have to answer the checks of a job.
    preflight_timeout_s: float = 30.0
    # Age up to which passed checks admit a start.
    preflight_valid_s: float = 60.0
    # Age up to which a failed check excludes its site from the job's plans.
    conflict_valid_s: float = 600.0
    # Time that two sites have to check their way, from when a job waits for it.
    peer_check_timeout_s: float = 30.0
    # Preflights in a row without a result after which the job counts the check as failed.
    max_unknown_preflights: int = 5
    # Jobs from the head of the queue that are ordered together and planned.
    queue_window: int = 256
    # Jobs from the head of the queue that are in the sites' queues.
    num_advertised: int = 64

    def lease_wait_s(self, run_lease_s: float) -> float:
        """Return how long after the last contact the workers of a site with `run_lease_s` have surely ended."""
        return max(run_lease_s, self.run_lease_s) * _CLOCK_DRIFT + self.run_lease_margin_s

    def backoff_s(self, refusals: int) -> float:
        """Return the back-off after the `refusals`-th refusal in a row, from 1."""
        return min(self.retry_s * 2.0 ** min(refusals - 1, 30), self.max_retry_s)
