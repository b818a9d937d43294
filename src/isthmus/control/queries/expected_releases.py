"""Inputs of start forecasts: the waiting jobs, and the expected releases of allocated chips."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from isthmus.control.algorithms.global_order import Release, Request
from isthmus.control.state.job_records import ENDED, JobRecord, State
from isthmus.core.plan import Part, Plan

UNDER_WAY = frozenset({"preparing", "starting", "running", "stopping"})
"""States in which chips are allocated to a job."""


@dataclass(frozen=True)
class Pace:
    """Steps done over all attempts, and the recent step time (None: not measured)."""

    steps_done: int
    step_s: float | None = None


Paces = Mapping[str, Pace]
"""Progress by job id."""


def is_before_its_start(job: JobRecord) -> bool:
    """Return whether a job has not ended and has no chips allocated."""
    return job.state not in ENDED and job.state not in UNDER_WAY


def is_to_choose(job: JobRecord) -> bool:
    """Return whether the job's user must still choose its plan."""
    return job.plan is None and not job.auto


def wanted_plan(job: JobRecord) -> Plan | None:
    """Return the plan that a job waits for: its own, otherwise its first candidate."""
    return job.plan or (job.plans.plans[0] if job.plans and job.plans.plans else None)


def cuts_of(job: JobRecord) -> tuple[Part, ...]:
    """Return the parts of the plan that a job waits for."""
    plan = wanted_plan(job)
    return job.cuts or (plan.parts() if plan else ())


def request_of(job: JobRecord, plan: Plan, paces: Paces) -> Request:
    """Return the input of `global_order` for a job that waits for `plan`, with its remaining run time."""
    pace, steps = paces.get(job.id, Pace(0)), job.submission.job.training.steps
    step_s = plan.predicted.iteration_s if plan.predicted else 0.0
    return Request(
        job=job.id,
        needs={f"{cut.cluster}/{group}": n for cut in cuts_of(job) for group, n in cut.chips.items()},
        submitted_s=job.submitted_s,
        priority=job.priority,
        deadline_s=job.due_s,
        run_s=max(0, steps - pace.steps_done) * step_s,
    )


def releases(state: State, now_s: float, paces: Paces) -> list[Release]:
    """Return the allocated chips of every job, each released at its expected end."""
    found: dict[str, dict[str, int]] = {}
    for record in state.clusters.values():
        for part in record.parts.values():
            if part.promised:
                chips = found.setdefault(part.job, {})
                for group, number in part.chips.items():
                    key = f"{part.cluster}/{group}"
                    chips[key] = chips.get(key, 0) + number - part.borrowed.get(group, 0)
    return [
        Release(at_s=_ends_s(state.jobs[name], now_s, paces), chips=chips) for name, chips in found.items()
    ]


def _ends_s(job: JobRecord, now_s: float, paces: Paces) -> float:
    """Return the expected end of an active job, by its measured step time, otherwise as predicted."""
    if job.state == "stopping" or (is_before_its_start(job) and job.state != "preempting"):
        return now_s
    predicted = job.plan.predicted if job.plan else None
    step_s = predicted.iteration_s if predicted else 0.0
    pace, steps = paces.get(job.id), job.submission.job.training.steps
    if pace is not None and (pace.step_s or step_s):
        return now_s + max(0, steps - pace.steps_done) * (pace.step_s or step_s)
    if not step_s:
        return math.inf
    began_s = job.began_s if job.state == "running" else now_s
    return max(now_s, began_s + steps * step_s)
