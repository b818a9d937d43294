"""Inputs of start forecasts: the waiting jobs, and the expected releases of allocated chips."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from isthmus.control.algorithms.global_order import Release, WaitingJob
from isthmus.control.state import allocations
from isthmus.control.state.job_records import TERMINAL_STATES, JobRecord, PoolState
from isthmus.control.state.site_records import ClusterRecord
from isthmus.core.plan import Plan, PlanPart
from isthmus.core.pool_resource import PoolResource

ACTIVE_STATES = frozenset({"preparing", "starting", "running", "stopping"})
"""States in which chips are allocated to a job."""


MAX_LOCAL_RELEASES = 64
"""Most jobs of a site's own users whose end a forecast counts: as many as it simulates of the queue."""


@dataclass(frozen=True)
class JobProgress:
    """Steps done over all attempts, and the recent step time (None: not measured)."""

    steps_done: int
    step_s: float | None = None


ProgressByJob = Mapping[str, JobProgress]
"""Progress by job id."""


def is_pending(job: JobRecord) -> bool:
    """Return whether a job has not ended and has no chips allocated."""
    return job.state not in TERMINAL_STATES and job.state not in ACTIVE_STATES


def awaits_choice(job: JobRecord) -> bool:
    """Return whether the job's user must still choose its plan."""
    return job.plan is None and not job.auto_plan


def wanted_plan(job: JobRecord) -> Plan | None:
    """Return the plan that a job waits for: its own, otherwise its first candidate."""
    return job.plan or (job.plans.plans[0] if job.plans and job.plans.plans else None)


def wanted_parts(job: JobRecord) -> tuple[PlanPart, ...]:
    """Return the parts of the plan that a job waits for."""
    plan = wanted_plan(job)
    return job.plan_parts or (plan.parts() if plan else ())


def wanted_needs(job: JobRecord) -> allocations.Amounts:
    """Return the needs of the plan that a job waits for: chips only, as long as it is a candidate."""
    return allocations.chip_needs_of(wanted_parts(job)) if job.needs is None else job.needs


def waiting_job_of(job: JobRecord, plan: Plan, progress: ProgressByJob, turn: int = 0) -> WaitingJob:
    """Return the input of `global_order` for a job that waits for `plan`, with its remaining run time and its turn."""
    pace, steps = progress.get(job.id, JobProgress(0)), job.submission.job.training.steps
    step_s = plan.predicted.iteration_s if plan.predicted else 0.0
    return WaitingJob(
        job=job.id,
        needs=allocations.chip_needs_of(wanted_parts(job)),
        submitted_s=job.submitted_s,
        priority=job.own_priority or job.priority,
        project_rank=job.project_rank,
        deadline_s=job.user_deadline_s,
        run_s=max(0, steps - pace.steps_done) * step_s,
        turn=turn,
    )


def expected_releases(state: PoolState, now_s: float, progress: ProgressByJob) -> list[Release]:
    """Return the allocated chips of every job, each released at its expected end, and those of sites' own jobs."""
    found: dict[str, allocations.Amounts] = {}
    for record in state.clusters.values():
        for part in record.parts.values():
            if part.allocated:
                chips = found.setdefault(part.job, {})
                for group, number in part.chips.items():
                    key = PoolResource.chips(part.cluster, group)
                    chips[key] = chips.get(key, 0) + number - part.borrowed.get(group, 0)
    pool = [
        Release(at_s=_expected_end_s(state.jobs[name], now_s, progress), chips=chips) for name, chips in found.items()
    ]
    return [*pool, *(one for record in state.clusters.values() for one in local_releases(record, now_s))]


def local_releases(record: ClusterRecord, now_s: float) -> Iterator[Release]:
    """Yield what the jobs of a site's own users release, of which the site says when they end: the first ones.

    What its queued jobs want goes to them first, unless there are free chips already: then the site has counted it.
    A site cannot promise more chips than it has.
    """
    left: dict[str, int] = {}
    queued = dict.fromkeys((group.name for group in record.cluster.node_groups), 0)
    for group in record.cluster.node_groups:
        left[group.name] = group.num_chips - record.free_by_group().get(group.name, 0)
    ending = []
    for job in record.local_jobs.values():
        if job.running and job.ends_at_s is not None:
            ending.append((max(now_s, job.ends_at_s), job.name, job))
        elif not job.running:
            for name, num in job.chips.items():
                queued[name] = queued.get(name, 0) + num
    for at_s, _, job in heapq.nsmallest(MAX_LOCAL_RELEASES, ending):
        chips: allocations.Amounts = {}
        for name, num in job.chips.items():
            taken = 0 if record.free_chips.get(name) else min(num, queued.get(name, 0))
            queued[name] = queued.get(name, 0) - taken
            given = max(0, min(num - taken, left.get(name, 0)))
            if given:
                left[name] -= given
                chips[PoolResource.chips(record.cluster.name, name)] = given
        if chips:
            yield Release(at_s=at_s, chips=chips)


def _expected_end_s(job: JobRecord, now_s: float, progress: ProgressByJob) -> float:
    """Return the expected end of an active job, by its measured step time, otherwise as predicted."""
    if job.state == "stopping" or (is_pending(job) and job.state != "preempting"):
        return now_s
    predicted = job.plan.predicted if job.plan else None
    step_s = predicted.iteration_s if predicted else 0.0
    pace, steps = progress.get(job.id), job.submission.job.training.steps
    if pace is not None and (pace.step_s or step_s):
        return now_s + max(0, steps - pace.steps_done) * (pace.step_s or step_s)
    if not step_s:
        return math.inf
    began_s = job.started_s if job.state == "running" else now_s
    return max(now_s, began_s + steps * step_s)
