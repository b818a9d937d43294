"""What the queue wants and what comes back to it: requests of jobs that wait, releases of those that run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from isthmus.control.algorithms.global_order import Release, Request
from isthmus.control.state.job_records import ENDED, JobRecord, State
from isthmus.core.plan import Part, Plan

UNDER_WAY = frozenset({"preparing", "starting", "running", "stopping"})
"""States in which a job has been promised its chips, or still has them."""


@dataclass(frozen=True)
class Pace:
    """Steps that are done (over all attempts), and the seconds of one lately (None: not measured)."""

    steps_done: int
    step_s: float | None = None


Paces = Mapping[str, Pace]
"""How far jobs are, by id."""


def is_before_its_start(job: JobRecord) -> bool:
    """Tell whether a job has neither ended nor been promised its chips."""
    return job.state not in ENDED and job.state not in UNDER_WAY


def is_to_choose(job: JobRecord) -> bool:
    """Tell whether a job's user has yet to choose its plan."""
    return job.plan is None and not job.auto


def wanted_plan(job: JobRecord) -> Plan | None:
    """Return the plan that a job waits for: its own, else the first of its candidates."""
    return job.plan or (job.plans.plans[0] if job.plans and job.plans.plans else None)


def cuts_of(job: JobRecord) -> tuple[Part, ...]:
    """Return the parts of the plan that a job waits for."""
    plan = wanted_plan(job)
    return job.cuts or (plan.parts() if plan else ())


def request_of(job: JobRecord, plan: Plan, paces: Paces) -> Request:
    """Return what a job wants that waits for `plan`, and how long the steps still to do should take."""
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
    """Return the chips that jobs give back which have been promised them, each when it should end."""
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
    """Return when a job under way should end: by its pace where it was measured, else by its prediction."""
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
