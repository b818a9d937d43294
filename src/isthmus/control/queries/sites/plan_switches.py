"""`plan_switches`: the switches that sum the gradients of a job: those of its plan's clusters that have addresses."""

from __future__ import annotations

from isthmus.control.state.job_records import PoolState
from isthmus.core.job import Job
from isthmus.core.plan import Plan
from isthmus.core.pool import Aggregators


def plan_switches(state: PoolState, plan: Plan | None, job: Job) -> tuple[Aggregators, ...]:
    """Return them in the order of the clusters' names; none unless the `synchronisation` of `job` is `passing`."""
    if plan is None or job.runtime.synchronisation != "passing":
        return ()
    clusters = [state.clusters[name].cluster for name in sorted(plan.clusters) if name in state.clusters]
    return tuple(one for cluster in clusters for one in cluster.aggregators if one.addresses)
