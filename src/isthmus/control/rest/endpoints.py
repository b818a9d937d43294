"""The endpoints of the REST interface. Bodies are models of `isthmus.core` and of `rest/bodies.py`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.responses import Response, StreamingResponse
from starlette.concurrency import run_in_threadpool

import isthmus
from isthmus.control.placement import NOT_FIXED
from isthmus.control.rest.bodies import OUTCOMES, Agreement, Bulk, Choice, Submitted, documented, submitted
from isthmus.control.rest.gate import METRICS
from isthmus.control.rest.json_route import JsonRoute
from isthmus.control.rest.stream import MEDIA_TYPE, EventStream, Follower, OpenStreams
from isthmus.control.rest.together import Together
from isthmus.control.service import auth
from isthmus.control.service.auth import Caller
from isthmus.control.service.control_service import ControlShell
from isthmus.control.service.prometheus import CONTENT_TYPE, exposition
from isthmus.core.base import Index
from isthmus.core.errors import ConflictError, NotFoundError, PlanError, ProtocolError, UnavailableError
from isthmus.core.messages.agent_messages import PROTOCOL_VERSION, AgentOrders, AgentReport
from isthmus.core.messages.api_views import (
    Health,
    JobView,
    LogPage,
    MetricsPage,
    PoolView,
    Submission,
    TokenRequest,
    TokenView,
)
from isthmus.core.messages.queue_status import DryRun, Standing
from isthmus.core.plan import PlanSet


async def caller_of(request: Request) -> Caller:
    """Return the request's caller as authenticated by the middleware."""
    caller: Caller = request.state.caller
    return caller


async def shell_of(request: Request) -> ControlShell:
    """Return the service that the application exposes."""
    shell: ControlShell = request.app.state.shell
    return shell


async def streams_of(request: Request) -> OpenStreams:
    """Return the application's open event streams."""
    streams: OpenStreams = request.app.state.streams
    return streams


async def together_of(request: Request) -> Together:
    """Return the application's request batcher."""
    together: Together = request.app.state.together
    return together


By = Annotated[Caller, Depends(caller_of)]
AllTogether = Annotated[Together, Depends(together_of)]
Streams = Annotated[OpenStreams, Depends(streams_of)]
Shell = Annotated[ControlShell, Depends(shell_of)]
LARGEST = 2**63 - 1
"""Largest integer that a store holds."""
After = Annotated[Index, Query(le=LARGEST, description="cursor: `next` of the previous page")]
Rank = Annotated[Index | None, Query(le=LARGEST, description="only this rank")]
JobQuery = Annotated[str | None, Query(description="only this job")]
LastEvent = Annotated[Index | None, Header(le=LARGEST, description="number of the last event received")]
Limit = Annotated[int, Query(ge=1, le=10_000, description="largest number of entries per page")]


router = APIRouter(prefix="/v1", route_class=JsonRoute)
own_metrics = APIRouter(default_response_class=Response)


@router.get("/health")
def health() -> Health:
    """Return the server's version and protocol. Needs no token."""
    return Health(protocol=PROTOCOL_VERSION, version=isthmus.__version__)


@router.post("/jobs", status_code=201, responses=documented(ConflictError))
async def submit(submission: Submission, caller: By, shell: Shell, together: AllTogether) -> JobView:
    """Submit a job; returns once it is on disk. Repeating the same key returns the same job."""
    auth.require(caller, "user")
    if submission.job.parallel == NOT_FIXED:
        asked = shell.intake.submission(caller.name, submission)
    else:  # its model is profiled
        asked = await run_in_threadpool(shell.intake.submission, caller.name, submission)
    job: JobView = await together.value(asked)
    return job


@router.post("/jobs:bulk", response_model=list[Submitted], responses=documented())
def submit_bulk(bulk: Bulk, caller: By, shell: Shell) -> Response:
    """Submit several jobs independently; returns their results in order once all are on disk."""
    auth.require(caller, "user")
    outcomes = [submitted(outcome) for outcome in shell.intake.submit_all(caller.name, bulk.submissions)]
    return Response(OUTCOMES.dump_json(outcomes), media_type="application/json")


@router.post("/jobs:dry-run", responses=documented(PlanError, ConflictError))
def dry_run(submission: Submission, caller: By, shell: Shell) -> DryRun:
    """Return a job's plans, queue position, expected start and victims without submitting it."""
    auth.require(caller, "user")
    return shell.dry_run(caller.name, submission)


@router.get("/jobs", responses=documented(NotFoundError))
def list_jobs(
    caller: By,
    shell: Shell,
    after: Annotated[str | None, Query(description="id of the last job of the previous page")] = None,
    limit: Limit = 1000,
) -> list[JobView]:
    """List one page of the caller's jobs (an admin: all jobs), oldest first, without their plans."""
    auth.require(caller, "user")
    if after is not None:
        _own_job(shell, caller, after)
    return list(shell.jobs(None if caller.role == "admin" else caller.name, after, limit))


@router.get("/jobs/{job_id}", responses=documented(NotFoundError))
def get_job(job_id: str, caller: By, shell: Shell) -> JobView:
    """Return a job with its candidate plans and the state of its parts."""
    return _own_job(shell, caller, job_id)


@router.get(
    "/events",
    response_class=StreamingResponse,
    responses=documented(NotFoundError, UnavailableError) | {200: {"content": {MEDIA_TYPE: {}}}},
)
async def get_events(
    caller: By, shell: Shell, streams: Streams, job: JobQuery = None, last_event_id: LastEvent = None
) -> EventStream:
    """Stream changes of the caller's jobs (an admin: all jobs) as server-sent events, newest state only.

    `job` restricts the stream to one job: its present state is sent first, and a `lines` event follows when
    metrics or logs arrive. `Last-Event-ID` resumes after that event; without it the stream starts now.
    """
    auth.require(caller, "user")
    if job is not None:
        await run_in_threadpool(_own_job, shell, caller, job)
    user = None if caller.role == "admin" else caller.name
    return streams.open(Follower(shell, user=user, job_id=job, after=last_event_id))


@router.get("/jobs/{job_id}/plans", responses=documented(NotFoundError))
def get_plans(job_id: str, caller: By, shell: Shell) -> PlanSet:
    """Return a job's candidate plans, and why other combinations of clusters were rejected."""
    return _own_job(shell, caller, job_id).plans or PlanSet(plans=())


@router.get("/jobs/{job_id}/queue", responses=documented(NotFoundError))
def get_standing(job_id: str, caller: By, shell: Shell) -> Standing:
    """Return why a job waits: missing resources, jobs ahead of it, expected start."""
    _own_job(shell, caller, job_id)
    return shell.standing(job_id, None if caller.role == "admin" else caller.name)


@router.get("/queue", responses=documented())
def get_queue(caller: By, shell: Shell) -> list[Standing]:
    """Return the queue status of the caller's waiting jobs (an admin: all), in expected starting order."""
    auth.require(caller, "user")
    return list(shell.queue(None if caller.role == "admin" else caller.name))


@router.post("/jobs/{job_id}/choose", responses=documented(NotFoundError, ConflictError))
def choose(job_id: str, choice: Choice, caller: By, shell: Shell) -> JobView:
    """Choose one of the job's candidate plans."""
    _own_job(shell, caller, job_id)
    return shell.choose(job_id, choice.plan)


@router.post("/jobs/{job_id}/preempt", responses=documented(NotFoundError, ConflictError))
def preempt(job_id: str, agreement: Agreement, caller: By, shell: Shell) -> JobView:
    """Preempt the named victims for the job: all or none, each after its checkpoint is verified."""
    _own_job(shell, caller, job_id)
    return shell.preempt(job_id, agreement.victims)


@router.post("/jobs/{job_id}/cancel", responses=documented(NotFoundError, ConflictError))
def cancel(job_id: str, caller: By, shell: Shell) -> JobView:
    """Stop the job at all sites."""
    _own_job(shell, caller, job_id)
    return shell.cancel(job_id)


@router.delete("/jobs/{job_id}", status_code=204, responses=documented(NotFoundError, ConflictError))
def delete(job_id: str, caller: By, shell: Shell) -> None:
    """Delete an ended job with its metrics and logs."""
    _own_job(shell, caller, job_id)
    shell.delete(job_id)


@router.get("/jobs/{job_id}/metrics", responses=documented(NotFoundError))
def get_metrics(job_id: str, caller: By, shell: Shell, after: After = 0, limit: Limit = 1000) -> MetricsPage:
    """Return step metrics of all ranks in order of arrival."""
    _own_job(shell, caller, job_id)
    return shell.metrics(job_id, after, limit)


@router.get("/jobs/{job_id}/logs", responses=documented(NotFoundError))
def get_logs(
    job_id: str,
    caller: By,
    shell: Shell,
    after: After = 0,
    rank: Rank = None,
    limit: Limit = 1000,
) -> LogPage:
    """Return the workers' log output (of one rank) in order of arrival."""
    _own_job(shell, caller, job_id)
    return shell.logs(job_id, after, rank, limit)


@router.get("/pool", responses=documented())
def get_pool(caller: By, shell: Shell) -> PoolView:
    """Return clusters, free chips and links; an owner sees its own clusters only."""
    return auth.visible_pool(caller, shell.pool())


@router.post("/agents/{cluster}/sync", responses=documented(ConflictError, ProtocolError))
def sync(cluster: str, report: AgentReport, caller: By, shell: Shell) -> AgentOrders:
    """Apply a report of a site's agent and return its orders."""
    check_protocol(report.protocol)
    auth.require_own_cluster(caller, cluster, report.cluster, shell.sites.owner_of(cluster))
    return shell.sites.sync(report)


@router.post("/tokens", status_code=201, responses=documented())
def make_token(request: TokenRequest, caller: By, shell: Shell) -> TokenView:
    """Create a token for an owner, a user or an admin. Only this response contains it."""
    auth.require(caller)
    return auth.make_token(shell.store, request, shell.clock())


@own_metrics.get(METRICS, responses=documented() | {200: {"content": {"text/plain": {}}}})
def get_process_metrics(caller: By, shell: Shell) -> Response:
    """Return metrics in Prometheus text format: for an admin all, for an owner those of its clusters."""
    auth.require(caller, "owner")
    seen = auth.visible_pool(caller, shell.pool())
    return Response(exposition(caller, shell.meters, seen, shell.gauges()), media_type=CONTENT_TYPE)


def _own_job(shell: ControlShell, caller: Caller, job_id: str) -> JobView:
    auth.require(caller, "user")
    job = shell.job(job_id)
    auth.require_own_job(caller, job)
    return job


def check_protocol(theirs: int) -> None:
    """Raise `ProtocolError` for an agent with another protocol version."""
    if theirs != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the agent speaks protocol {theirs}, this server {PROTOCOL_VERSION}",
            hint="use the same release for agent and server; running workers continue meanwhile",
        )
