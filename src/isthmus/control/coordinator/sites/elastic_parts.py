"""`let_part_go`: a job with `task: rl` goes on without a part that only decodes, while enough others decode."""

from __future__ import annotations

from isthmus.control.state.job_records import JobRecord, PoolState
from isthmus.control.state.site_records import PartRecord


def let_part_go(state: PoolState, job: JobRecord, part: PartRecord, reason: str, now_s: float) -> bool:
    """Release a part that a running job can do without; return whether it can.

    Its samples go on at the other parts. `placement.least_rollouts` parts that decode must remain.
    """
    if job.state != "running" or part in job.training_parts():
        return False
    others = [one for one in job.remaining_parts() if one not in job.training_parts() and one is not part]
    alive = [one for one in others if one.state in ("running", "succeeded")]
    if len(alive) < job.spec.placement.least_rollouts:
        return False
    part.left, part.desired = True, "released"
    job.history.add("left", now_s, job.attempt, reason, cluster=part.cluster)
    state.changed_jobs.add(job.id)
    return True
