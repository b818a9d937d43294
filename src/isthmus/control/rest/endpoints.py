"""The endpoints of the REST interface. Bodies are models of `isthmus.core` and of `rest/rest_bodies.py`."""

from __future__ import annotations

from functools import partial
from typing import Annotated, get_args

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.responses import Response, StreamingResponse
from starlette.concurrency import run_in_threadpool

import isthmus
from isthmus.control.placement import NO_FIXED_DEGREES
from isthmus.control.rest.event_stream import MEDIA_TYPE, EventStream, EventSubscription, OpenStreams
from isthmus.control.rest.json_route import JsonRoute
from isthmus.control.rest.middleware import METRICS_PATH
from isthmus.control.rest.request_batcher import RequestBatcher
from isthmus.control.rest.request_context import MAX_STORED_INTEGER, After, CurrentCaller, Limit, Service
from isthmus.control.rest.rest_bodies import (
    SUBMISSION_RESULTS,
    BulkSubmission,
    PlanChoice,
    PreemptionRequest,
    SubmissionResult,
    error_responses,
    submission_result,
)
from isthmus.control.service import auth
from isthmus.control.service.auth import Caller
from isthmus.control.service.control_service import ControlService
from isthmus.control.service.metrics.render_metrics import CONTENT_TYPE, render_metrics
from isthmus.core.base_model import Name, NonNegativeFloat, NonNegativeInt
from isthmus.core.errors import (
    AuthError,
    ConflictError,
    NotFoundError,
    PlanError,
    ProtocolError,
    QuotaError,
    TooLargeError,
    UnavailableError,
)
from isthmus.core.messages.agent_messages import PROTOCOL_VERSION, AgentOrders, AgentReport
from isthmus.core.messages.preflight import ANSWER_TIMEOUT_S, SitePreflight
from isthmus.core.plan import PlanSet
from isthmus.core.views.api_views import (
    NEXT_JOB_HEADER,
    Health,
    HistoryPage,
    JobFilter,
    JobState,
    JobView,
    LogPage,
    MetricsPage,
    PoolView,
    Submission,
)
from isthmus.core.views.queue_status import DryRun, QueuePage, QueueStatus
from isthmus.core.views.rank_views import RankView
from isthmus.core.views.usage_views import UsageView


async def get_open_streams(request: Request) -> OpenStreams:
    """Return the application's open event streams."""
    streams: OpenStreams = request.app.state.streams
    return streams


async def get_request_batcher(request: Request) -> RequestBatcher:
    """Return the application's request batcher."""
    batcher: RequestBatcher = request.app.state.batcher
    return batcher


Batcher = Annotated[RequestBatcher, Depends(get_request_batcher)]
Streams = Annotated[OpenStreams, Depends(get_open_streams)]
Rank = Annotated[NonNegativeInt | None, Query(le=MAX_STORED_INTEGER, description="only this rank")]
JobQuery = Annotated[str | None, Query(description="only this job")]
LastEvent = Annotated[
    NonNegativeInt | None, Header(le=MAX_STORED_INTEGER, description="number of the last event received")
]
Newest = Annotated[bool, Query(description="the last entries after the cursor, not the first")]
States = Annotated[
    list[JobState] | None,
    Query(max_length=len(get_args(JobState)), description="only these states; repeat it for several"),
]
NameQuery = Annotated[Name | None, Query(description="only jobs with this name")]
UserQuery = Annotated[Name | None, Query(description="only jobs of this user (admin)")]
OwnerQuery = Annotated[Name | None, Query(description="only jobs whose plan uses a cluster of this owner")]
SinceQuery = Annotated[
    NonNegativeFloat | None,
    Query(allow_inf_nan=False, description="only jobs submitted at or after this time (seconds since the epoch)"),
]


async def get_job_filter(
    state: States = None,
    name: NameQuery = None,
    user: UserQuery = None,
    owner: OwnerQuery = None,
    since_s: SinceQuery = None,
) -> JobFilter:
    """Return the filter of a listing, from the query."""
    return JobFilter(state=tuple(state or ()), name=name, user=user, owner=owner, since_s=since_s)


Wanted = Annotated[JobFilter, Depends(get_job_filter)]


router = APIRouter(prefix="/v1", route_class=JsonRoute)
metrics_router = APIRouter(default_response_class=Response)


@router.get("/health")
def health() -> Health:
    """Return the server's version and protocol. Needs no token."""
    return Health(protocol=PROTOCOL_VERSION, version=isthmus.__version__)


@router.post(
    "/jobs", status_code=201, responses=error_responses(ConflictError, NotFoundError, QuotaError, TooLargeError)
)
async def submit_job(submission: Submission, caller: CurrentCaller, service: Service, batcher: Batcher) -> JobView:
    """Submit a job; returns once it is on disk. Repeating the same key returns the same job."""
    auth.require_role(caller, "user")
    submit = partial(service.submissions.submit_request, exempt=caller.role == "admin", high=caller.high, caller=caller)
    make_request = partial(submit, caller.name, submission)
    if submission.job.parallel == NO_FIXED_DEGREES:
        asked = make_request()
    else:  # its model is profiled
        asked = await run_in_threadpool(make_request)
    job: JobView = await batcher.result_of(asked)
    return job


@router.post("/jobs:bulk", response_model=list[SubmissionResult], responses=error_responses())
def submit_bulk(bulk: BulkSubmission, caller: CurrentCaller, service: Service) -> Response:
    """Submit several jobs independently; returns their results in order once all are on disk."""
    auth.require_role(caller, "user")
    submit = partial(service.submissions.submit_all, exempt=caller.role == "admin", high=caller.high, caller=caller)
    done = submit(caller.name, bulk.submissions)
    outcomes = [submission_result(outcome) for outcome in done]
    return Response(SUBMISSION_RESULTS.dump_json(outcomes), media_type="application/json")


@router.post("/jobs:dry-run", responses=error_responses(PlanError, ConflictError, NotFoundError, TooLargeError))
def dry_run(submission: Submission, caller: CurrentCaller, service: Service) -> DryRun:
    """Return a job's plans, queue position, expected start and victims without submitting it."""
    auth.require_role(caller, "user")
    return service.dry_run(caller.name, submission, exempt=caller.role == "admin", high=caller.high)


@router.get("/jobs", responses=error_responses(NotFoundError))
def list_jobs(
    caller: CurrentCaller,
    service: Service,
    response: Response,
    wanted: Wanted,
    after: Annotated[str | None, Query(description="the previous page's `Isthmus-Next-Job`, or its last job")] = None,
    limit: Limit = 1000,
    newest_first: Annotated[bool, Query(description="latest submission first, instead of oldest first")] = False,
) -> list[JobView]:
    """List one page of the caller's jobs (an admin: all jobs), without their plans.

    A page examines a bounded number of jobs. While more may follow, the response header `Isthmus-Next-Job` is the
    `after` of the next page, even if a filter left this page short or empty.
    """
    auth.require_role(caller, "user")
    user = None if caller.role == "admin" else caller.name
    if user is not None and wanted.user not in (None, user):
        raise AuthError(f"the jobs of user '{wanted.user}' are visible to admins", hint="leave the user out")
    if after is not None:
        _own_job(service, caller, after)
    found, more = service.jobs(user, wanted, after=after, limit=limit, newest_first=newest_first)
    if more is not None:
        response.headers[NEXT_JOB_HEADER] = more
    return list(found)


@router.get("/jobs/{job_id}", responses=error_responses(NotFoundError))
def get_job(job_id: str, caller: CurrentCaller, service: Service) -> JobView:
    """Return a job with its candidate plans and the state of its parts."""
    return _own_job(service, caller, job_id)


@router.get(
    "/events",
    response_class=StreamingResponse,
    responses=error_responses(NotFoundError, UnavailableError) | {200: {"content": {MEDIA_TYPE: {}}}},
)
async def get_events(
    caller: CurrentCaller,
    service: Service,
    streams: Streams,
    job: JobQuery = None,
    last_event_id: LastEvent = None,
) -> EventStream:
    """Stream changes of the caller's jobs (an admin: all jobs) as server-sent events, newest state only.

    `job` restricts the stream to one job: its present state and its history so far are sent first, then new
    `history` events, and a `lines` event when metrics or logs arrive. `Last-Event-ID` resumes after that event;
    without it the stream starts now.
    """
    auth.require_role(caller, "user")
    if job is not None:
        await run_in_threadpool(_own_job, service, caller, job)
    user = None if caller.role == "admin" else caller.name
    return streams.open(EventSubscription(service, caller=caller, user=user, job_id=job, after=last_event_id))


@router.get("/jobs/{job_id}/plans", responses=error_responses(NotFoundError))
def get_plans(job_id: str, caller: CurrentCaller, service: Service) -> PlanSet:
    """Return a job's candidate plans, and why other combinations of clusters were rejected."""
    return _own_job(service, caller, job_id).plans or PlanSet(plans=())


@router.get("/jobs/{job_id}/queue", responses=error_responses(NotFoundError))
def get_queue_status(job_id: str, caller: CurrentCaller, service: Service) -> QueueStatus:
    """Return why a job waits: missing resources, jobs ahead of it, expected start."""
    _own_job(service, caller, job_id)
    return service.queue_status(job_id, None if caller.role == "admin" else caller.name)


@router.get("/jobs/{job_id}/ranks", responses=error_responses(NotFoundError, ConflictError))
def get_ranks(job_id: str, caller: CurrentCaller, service: Service) -> list[RankView]:
    """Return the ranks of a job's plan: cluster, node, addresses, and the peers with the demands between addresses."""
    _own_job(service, caller, job_id)
    return list(service.ranks(job_id))


@router.get("/queue", responses=error_responses())
def get_queue(caller: CurrentCaller, service: Service) -> list[QueueStatus]:
    """Return the queue status of the caller's waiting jobs (an admin: all), in expected starting order."""
    auth.require_role(caller, "user")
    return list(service.queue(None if caller.role == "admin" else caller.name))


@router.get("/queue/page", responses=error_responses())
def get_queue_page(
    caller: CurrentCaller,
    service: Service,
    start: Annotated[NonNegativeInt, Query(le=MAX_STORED_INTEGER, description="index of the first job, from 0")] = 0,
    limit: Annotated[int, Query(ge=1, le=200, description="largest number of jobs")] = 50,
) -> QueuePage:
    """Return the caller's jobs (an admin: all) with a place in the queue, from any position on, and their number."""
    auth.require_role(caller, "user")
    return service.queue_page(None if caller.role == "admin" else caller.name, start, limit)


@router.post("/jobs/{job_id}/choose", responses=error_responses(NotFoundError, ConflictError))
def choose_plan(job_id: str, choice: PlanChoice, caller: CurrentCaller, service: Service) -> JobView:
    """Choose one of the job's candidate plans."""
    job = _own_job(service, caller, job_id)
    line = service.audit.line("plan-chosen", caller, job_id, f"{choice.plan} for {job.user}'s job")
    return service.choose(job_id, choice.plan, line)


@router.post("/jobs/{job_id}/plans/{plan_id}/check", responses=error_responses(NotFoundError))
def check_plan(
    job_id: str,
    plan_id: str,
    caller: CurrentCaller,
    service: Service,
    timeout_s: Annotated[
        float, Query(ge=0, le=ANSWER_TIMEOUT_S, description="longest wait for the sites")
    ] = ANSWER_TIMEOUT_S,
) -> list[SitePreflight]:
    """Have the sites of a candidate plan check what the job needs there, without choosing the plan."""
    _own_job(service, caller, job_id)
    return list(service.check_plan(job_id, plan_id, timeout_s))


@router.post("/jobs/{job_id}/preempt", responses=error_responses(NotFoundError, ConflictError))
def preempt_victims(job_id: str, agreement: PreemptionRequest, caller: CurrentCaller, service: Service) -> JobView:
    """Preempt the named victims for the job: all or none, each after its checkpoint is verified."""
    job = _own_job(service, caller, job_id)
    victims = ", ".join(f"{one.job} at {one.cluster}" for one in agreement.victims)
    line = service.audit.line("job-preempted-others", caller, job_id, f"for {job.user}'s job: {victims}")
    return service.preempt(job_id, agreement.victims, line)


@router.post("/jobs/{job_id}/cancel", responses=error_responses(NotFoundError, ConflictError))
def cancel_job(job_id: str, caller: CurrentCaller, service: Service) -> JobView:
    """Stop the job at all sites."""
    job = _own_job(service, caller, job_id)
    line = service.audit.line("job-cancelled", caller, job_id, f"{job.user}'s job")
    return service.cancel(job_id, "" if caller.name == job.user else f"{caller.role} {caller.name}", line)


@router.delete("/jobs/{job_id}", status_code=204, responses=error_responses(NotFoundError, ConflictError))
def delete_job(job_id: str, caller: CurrentCaller, service: Service) -> None:
    """Delete an ended job with its metrics and logs."""
    job = _own_job(service, caller, job_id)
    service.delete(job_id, service.audit.line("job-deleted", caller, job_id, f"{job.user}'s job"))


@router.get("/jobs/{job_id}/metrics", responses=error_responses(NotFoundError))
def get_metrics(
    job_id: str,
    caller: CurrentCaller,
    service: Service,
    after: After = 0,
    limit: Limit = 1000,
    newest: Newest = False,
) -> MetricsPage:
    """Return step metrics of all ranks in order of arrival."""
    _own_job(service, caller, job_id)
    return service.metrics(job_id, after, limit, newest=newest)


@router.get("/jobs/{job_id}/history", responses=error_responses(NotFoundError))
def get_history(
    job_id: str, caller: CurrentCaller, service: Service, after: After = 0, limit: Limit = 1000
) -> HistoryPage:
    """Return what happened to a job, with times: plans, attempts, losses, recoveries, checkpoints, its end."""
    _own_job(service, caller, job_id)
    return service.history(job_id, after, limit)


@router.get("/jobs/{job_id}/logs", responses=error_responses(NotFoundError))
def get_logs(
    job_id: str,
    caller: CurrentCaller,
    service: Service,
    after: After = 0,
    rank: Rank = None,
    limit: Limit = 1000,
) -> LogPage:
    """Return the workers' log output (of one rank) in order of arrival."""
    _own_job(service, caller, job_id)
    return service.logs(job_id, after, rank, limit)


@router.get("/pool", responses=error_responses())
def get_pool(caller: CurrentCaller, service: Service) -> PoolView:
    """Return clusters, free chips and links; an owner sees its own clusters only."""
    return auth.visible_pool(caller, service.pool())


@router.post("/pool/unknown-jobs/{job_id}/end", responses=error_responses(NotFoundError))
def end_unknown_job(job_id: Name, caller: CurrentCaller, service: Service) -> PoolView:
    """Release the running parts of a job that the server's log does not have since its restore (admin only)."""
    auth.require_role(caller)
    return service.end_unknown(job_id, service.audit.line("unknown-job-ended", caller, job_id))


@router.post("/agents/{cluster}/sync", responses=error_responses(ConflictError, ProtocolError))
def sync_agent(cluster: str, report: AgentReport, caller: CurrentCaller, service: Service) -> AgentOrders:
    """Apply a report of a site's agent and return its orders."""
    check_protocol(report.protocol)
    auth.require_own_cluster(caller, cluster, report.cluster, service.agents.owner_of(cluster))
    service.site_keys.note_use(caller)

    def refuse_lines(number: int) -> None:
        service.audit.record("refused", caller, cluster, f"{number} lines of output of ranks of other sites")

    return service.agents.sync(report, refuse_lines, caller)


@router.get("/usage", responses=error_responses())
def get_usage(caller: CurrentCaller, service: Service) -> UsageView:
    """Return chip-hours by owner, cluster and user: for an owner of its clusters, for a user of its jobs."""
    if caller.role == "user":
        return service.usage(user=caller.name)
    auth.require_role(caller, "owner")
    return service.usage() if caller.role == "admin" else service.usage(owner=caller.name, cluster=caller.site or None)


@metrics_router.get(METRICS_PATH, responses=error_responses() | {200: {"content": {"text/plain": {}}}})
def get_server_metrics(caller: CurrentCaller, service: Service) -> Response:
    """Return metrics in Prometheus text format: for an admin all, for an owner those of its clusters."""
    auth.require_role(caller, "owner")
    seen = auth.visible_pool(caller, service.pool())
    text = render_metrics(caller, service.server_metrics, seen, service.gauges(), service.figures())
    return Response(text, media_type=CONTENT_TYPE)


def _own_job(service: ControlService, caller: Caller, job_id: str) -> JobView:
    auth.require_role(caller, "user")
    job = service.job(job_id)
    try:
        auth.require_own_job(caller, job)
    except NotFoundError:
        service.audit.record("refused", caller, job_id, "a job of another user")
        raise
    return job


def check_protocol(agent_protocol: int) -> None:
    """Raise `ProtocolError` for an agent with another protocol version."""
    if agent_protocol != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the agent speaks protocol {agent_protocol}, this server {PROTOCOL_VERSION}",
            hint="use the same release for agent and server; running workers continue meanwhile",
        )
