"""Dry run: the plans, place and victims that a job would have if it were submitted now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from isthmus.control.queries.accounts.job_project import job_project
from isthmus.control.queries.catalogue.bring_forecast import site_fetches, unable_to_fetch
from isthmus.control.queries.explain_wait import WaitQuery, query_job
from isthmus.control.queries.forecast_inputs import ProgressByJob
from isthmus.control.queries.user_views import job_view
from isthmus.control.state import allocations
from isthmus.control.state.catalogue_records import job_versions
from isthmus.control.state.events import MakePlans
from isthmus.control.state.job_records import JobRecord, PoolState
from isthmus.core.plan import PlanSet
from isthmus.core.views.api_views import Submission, VictimView

DRY_RUN_JOB_ID = "dry-run"
"""Id of the job of a dry run."""


def dry_run_requests(state: PoolState, user: str, submission: Submission) -> tuple[MakePlans, MakePlans]:
    """Return the planner requests: on the free resources, and on the idle pool."""
    storage, gbps = allocations.free_storage_and_links(state)
    whole, free = allocations.total_chips(state), allocations.unreserved_chips(state)
    versions = job_versions(submission.job)
    for name in unable_to_fetch(state) if versions else ():
        whole.pop(name, None)
        free.pop(name, None)
    clusters = tuple(state.clusters[name].cluster for name in free)
    now = MakePlans(
        job_id=DRY_RUN_JOB_ID,
        round=1,
        submission=submission,
        user=user,
        clusters=clusters,
        free_chips=free,
        free_storage_bytes=storage,
        free_gbps=gbps,
        fetches=site_fetches(state, versions, whole),
    )
    everything = {"free_chips": whole, "free_storage_bytes": {}, "free_gbps": {}}
    return now, now.model_copy(update=everything)


def checking_sites(state: PoolState) -> frozenset[str]:
    """Return the connected clusters whose agents execute the checks of jobs."""
    return frozenset(name for name, record in state.clusters.items() if record.connected and record.checks)


def find_plans(planner_requests: tuple[MakePlans, MakePlans], planner: Callable[[MakePlans], PlanSet]) -> PlanSet:
    """Return plans on the free resources; if none fits, plans on the idle pool with the refusals."""
    on_free, on_idle = planner_requests
    found = planner(on_free)
    if found.plans or not on_free.clusters:
        return found
    return PlanSet(plans=planner(on_idle).plans, refused=found.refused)


@dataclass(frozen=True, kw_only=True)
class DryRunQuery:
    """The queue query of a dry-run job, and the victims whose chips would let it start now."""

    query: WaitQuery
    victims: tuple[VictimView, ...]


def query_dry_run(
    state: PoolState, user: str, submission: Submission, plans: PlanSet, now_s: float, progress: ProgressByJob
) -> DryRunQuery:
    """Return the query for a job with these plans that is submitted now, as its user sees it."""
    project = job_project(state.accounts.tree, user, submission.job.project)
    job = JobRecord.create(DRY_RUN_JOB_ID, state.num_submitted + 1, user, submission, now_s, project)
    job.state, job.plans = "waiting", plans
    allocations.assign_plan(state, job, plans.plans[0] if plans.plans else None)
    victims = job_view(state, job, details=True).offer
    return DryRunQuery(query=query_job(state, job, now_s, progress, user), victims=victims)
