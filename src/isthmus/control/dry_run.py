"""`dry_run`: what would become of a job if it were submitted now. It asks the planner and changes nothing."""

from __future__ import annotations

from collections.abc import Callable

from isthmus.control.events import MakePlans
from isthmus.control.ledger import give_plan
from isthmus.control.queue_view import Paces, standing_of
from isthmus.control.records import FreeChips, JobRecord, State
from isthmus.core.plan import PlanSet
from isthmus.core.standing import DryRun
from isthmus.core.views import Submission

JOB = "dry-run"
"""What a job is called that is not there."""


def requests(state: State, submission: Submission) -> tuple[MakePlans, MakePlans]:
    """Return what the planner is asked: on what is free now; and on the pool as if nothing were in use."""
    clusters = [record.cluster for record in state.clusters.values() if record.connected]
    whole = {one.name: {group.name: group.chips for group in one.node_groups} for one in clusters}

    def ask(free: FreeChips) -> MakePlans:
        return MakePlans(
            job_id=JOB, round=1, submission=submission, clusters=tuple(clusters), free_chips=free
        )

    return ask(state.free()), ask(whole)


def plans_of(asked: tuple[MakePlans, MakePlans], planner: Callable[[MakePlans], PlanSet]) -> PlanSet:
    """Return plans on what is free; where there are none, those to wait for, with why none fits now."""
    now, whole = asked
    found = planner(now)
    if found.plans or not now.clusters:
        return found
    return PlanSet(plans=planner(whole).plans, refused=found.refused)


def dry_run(
    state: State, user: str, submission: Submission, plans: PlanSet, now_s: float, paces: Paces
) -> DryRun:
    """Return where a job with these plans would stand behind those that wait, as its user would see it."""
    job = JobRecord.of(JOB, 0, user, submission, now_s)
    job.state, job.plans = "waiting", plans
    give_plan(state, job, plans.plans[0] if plans.plans else None)
    return DryRun(plans=plans, standing=standing_of(state, job, now_s, paces, user))
