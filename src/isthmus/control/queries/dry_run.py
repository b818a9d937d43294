"""Dry run: the plans, place and victims that a job would have if it were submitted now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from isthmus.control.queries.expected_releases import Paces
from isthmus.control.queries.explain_wait import Question, about_job
from isthmus.control.queries.user_views import job_view
from isthmus.control.state import ledger
from isthmus.control.state.events import MakePlans
from isthmus.control.state.job_records import JobRecord, State
from isthmus.core.messages.api_views import Submission, VictimView
from isthmus.core.plan import PlanSet

JOB = "dry-run"
"""Id of the job of a dry run."""


def requests(state: State, submission: Submission) -> tuple[MakePlans, MakePlans]:
    """Return the planner requests: on the free resources, and on the idle pool."""
    storage, gbps = ledger.left_of_pool(state)
    whole, free = ledger.whole_pool(state), state.free()
    for key, kept in ledger.chips_of(state.indexes.kept).items():
        cluster, _, group = key.partition("/")
        if group in free.get(cluster, {}):
            free[cluster][group] = max(0, free[cluster][group] - kept)
    clusters = tuple(state.clusters[name].cluster for name in free)
    now = MakePlans(
        job_id=JOB,
        round=1,
        submission=submission,
        clusters=clusters,
        free_chips=free,
        free_storage_bytes=storage,
        free_gbps=gbps,
    )
    everything = {"free_chips": whole, "free_storage_bytes": {}, "free_gbps": {}}
    return now, now.model_copy(update=everything)


def plans_of(asked: tuple[MakePlans, MakePlans], planner: Callable[[MakePlans], PlanSet]) -> PlanSet:
    """Return plans on the free resources; if none fits, plans on the idle pool with the refusals."""
    on_free, on_idle = asked
    found = planner(on_free)
    if found.plans or not on_free.clusters:
        return found
    return PlanSet(plans=planner(on_idle).plans, refused=found.refused)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The queue query of a dry-run job, and the victims whose chips would let it start now."""

    question: Question
    victims: tuple[VictimView, ...]


def about_dry_run(
    state: State, user: str, submission: Submission, plans: PlanSet, now_s: float, paces: Paces
) -> Asked:
    """Return the query for a job with these plans that is submitted now, as its user sees it."""
    job = JobRecord.of(JOB, state.submitted + 1, user, submission, now_s)
    job.state, job.plans = "waiting", plans
    ledger.give_plan(state, job, plans.plans[0] if plans.plans else None)
    victims = job_view(state, job, details=True).offer
    return Asked(question=about_job(state, job, now_s, paces, user), victims=victims)
