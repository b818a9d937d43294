"""`FakeServer`: the REST interface in memory behind httpx's MockTransport; it keeps state as the real one."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from pydantic import BaseModel

from isthmus.cli import main
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.client.api_client import ApiClient
from isthmus.core.errors import AuthError, ConflictError, IsthmusError, NotFoundError
from isthmus.core.messages.agent_messages import PROTOCOL_VERSION, LogChunk, StepMetrics
from isthmus.core.messages.preflight import ANSWER_TIMEOUT_S, SitePreflight
from isthmus.core.plan import PlanSet
from isthmus.core.views.access_views import AuditPage, AuditRecord, TokenInfo, TokenRotation
from isthmus.core.views.api_views import (
    Health,
    HistoryEvent,
    HistoryPage,
    JobView,
    LogPage,
    MetricsPage,
    PoolView,
    Submission,
    TokenRequest,
    TokenView,
)
from isthmus.core.views.audit_chain import audit_start, line_digest
from isthmus.core.views.queue_status import DryRun, QueueStatus
from isthmus.core.views.rank_views import RankView
from isthmus.core.views.usage_views import UsageView
from tests.cli.samples import START_S, make_pool, make_view

TOKEN = "a-token"
TOKEN_INFO = TokenInfo(id="t-0123456789ab", role="user", name="bo", state="valid", created_s=1e9, created_by="eve")
URL = "http://127.0.0.1:1"


@dataclass
class FakeServer:
    """Jobs, metrics and logs by id. `outages` requests fail to connect before the next one is answered."""

    jobs: dict[str, JobView] = field(default_factory=dict)
    metrics: dict[str, list[StepMetrics]] = field(default_factory=dict)
    history: dict[str, list[HistoryEvent]] = field(default_factory=dict)
    logs: dict[str, list[LogChunk]] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    standings: dict[str, QueueStatus] = field(default_factory=dict)
    ranks: dict[str, Sequence[RankView]] = field(default_factory=dict)
    # What the sites of an offered plan answer, by its id; a server without the endpoint if empty.
    site_checks: dict[str, tuple[SitePreflight, ...]] = field(default_factory=dict)
    pool: PoolView = field(default_factory=make_pool)
    usage: UsageView = field(default_factory=lambda: UsageView(since_s=None, now_s=START_S, given={}, taken={}))
    ended_unknown: list[str] = field(default_factory=list)
    protocol: int = PROTOCOL_VERSION
    outages: int = 0
    page_size: int = 7
    seen: list[str] = field(default_factory=list)
    before_answer: Callable[[FakeServer, str], None] | None = None

    def add(self, **changes: Any) -> JobView:
        """Add a job made from the sample."""
        view = make_view(**changes)
        self.jobs[view.id] = view
        return view

    def transport(self) -> httpx.MockTransport:
        """Return the transport that leads here."""
        return httpx.MockTransport(self._handle)

    def client(self, token: str | None = TOKEN) -> ApiClient:
        """Return a client of this server that never waits."""
        return ApiClient(URL, token, transport=self.transport(), sleep=lambda _: None)

    def _handle(self, request: httpx.Request) -> httpx.Response:
        if self.outages:
            self.outages -= 1
            raise httpx.ConnectError("Connection refused")
        name = f"{request.method} {request.url.path}"
        self.seen.append(name)
        if self.before_answer:
            self.before_answer(self, name)
        try:
            return self._route(request)
        except IsthmusError as error:
            return httpx.Response(error.http_status, json=error.as_dict())

    def _route(self, request: httpx.Request) -> httpx.Response:
        match request.method, request.url.path.strip("/").split("/")[1:]:
            case "GET", ["health"]:
                return _answer(Health(protocol=self.protocol, version="9.9"))
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return httpx.Response(401, json=AuthError("no valid token").as_dict())
        match request.method, request.url.path.strip("/").split("/")[1:]:
            case _, ["pool", *rest]:
                return self._pool(rest)
            case "GET", ["queue" | "usage" as what]:
                waiting = [one.model_dump(mode="json") for one in self.standings.values()]
                return _answer(self.usage) if what == "usage" else httpx.Response(200, json=waiting)
            case "POST", ["sites", name, "gone" | "enrol"]:
                return _answer(next(one for one in make_pool().clusters if one.cluster.name == name))
            case _, ["tokens" | "audit" as what, *rest]:
                return _access(request, what, rest)
            case "POST", ["jobs:dry-run"]:
                job = Submission.model_validate_json(request.content).job
                view = make_view(id="dry-run", name=job.name, job=job, state="waiting")
                standing = self.standings.get("dry-run") or running(view)
                return _answer(DryRun(plans=view.plans or PlanSet(plans=()), standing=standing))
            case "POST", ["jobs"]:
                return self._submit(Submission.model_validate_json(request.content))
            case "GET", ["jobs"]:
                return self._list(request.url.params)
            case method, ["jobs", job, *rest]:
                if job not in self.jobs:
                    raise NotFoundError(f"no job {job}")
                return self._job(method, self.jobs[job], rest, request)
        return httpx.Response(404, text="not here")

    def _list(self, query: httpx.QueryParams) -> httpx.Response:
        states, since_s = query.get_list("state"), float(query.get("since_s", 0))
        views = sorted(self.jobs.values(), key=lambda view: view.submitted_s, reverse="newest_first" in query)
        found = [
            view.model_copy(update={"plans": None})
            for view in views
            if (not states or view.state in states)
            and query.get("name", view.name) == view.name
            and query.get("user", view.user) == view.user
            and view.submitted_s >= since_s
        ]
        page = found[: int(query["limit"])]
        return httpx.Response(200, json=[view.model_dump(mode="json") for view in page])

    def _submit(self, submission: Submission) -> httpx.Response:
        known = self.keys.get(submission.key)
        if known is None:
            known = f"j-{len(self.jobs):04d}"
            self.keys[submission.key] = known
            job = submission.job
            self.add(id=known, name=job.name, job=job, state="planning", plan=None, plans=None, parts=())
        return _answer(self.jobs[known], 201)

    def _agree(self, view: JobView, verb: str, said: dict[str, Any]) -> httpx.Response:
        if verb == "preempt":
            named = {(one["cluster"], one["job"]) for one in said["victims"]}
            if named != {(one.cluster, one.job) for one in view.offer}:
                raise ConflictError(f"the chips of these jobs no longer suffice for job {view.id}")
            return self._change(view, state="preempting", offer=())
        plans = {plan.id: plan for plan in (view.plans.plans if view.plans else ())}
        if said["plan"] not in plans:
            raise NotFoundError(f"no plan {said['plan']}", hint="it has " + ", ".join(plans))
        return self._change(view, state="preparing", plan=plans[said["plan"]])

    def _pool(self, rest: list[str]) -> httpx.Response:
        if rest:
            self.ended_unknown.append(rest[1])
        return _answer(self.pool)

    def _job(self, method: str, view: JobView, rest: list[str], request: httpx.Request) -> httpx.Response:
        match method, rest:
            case "GET", []:
                return _answer(view)
            case "GET", ["queue"]:
                return _answer(self.standings.get(view.id) or running(view))
            case "GET", ["ranks"]:
                return httpx.Response(200, json=[one.model_dump(mode="json") for one in self.ranks[view.id]])
            case "GET", ["plans"]:
                return _answer(view.plans or PlanSet(plans=()))
            case "POST", ["choose" | "preempt" as verb]:
                return self._agree(view, verb, json.loads(request.content))
            case "POST", ["plans", plan, "check"]:
                if plan not in self.site_checks:
                    return httpx.Response(404, text="not here")
                assert 0 <= float(request.url.params["timeout_s"]) <= ANSWER_TIMEOUT_S
                return httpx.Response(200, json=[one.model_dump(mode="json") for one in self.site_checks[plan]])
            case "POST", ["cancel"]:
                return self._change(view, state="stopping")
            case "DELETE", []:
                if view.state not in ("succeeded", "failed", "cancelled"):
                    raise ConflictError(f"job {view.id} is {view.state}", hint="cancel it first")
                del self.jobs[view.id]
                return httpx.Response(204)
            case "GET", [kind]:
                return self._output(kind, view, request)
        return httpx.Response(405, text="not so")

    def _output(self, kind: str, view: JobView, request: httpx.Request) -> httpx.Response:
        query = request.url.params
        after = int(query.get("after", 0))
        match kind:
            case "history":
                events = [one for one in self.history.get(view.id, []) if one.number > after][: int(query["limit"])]
                return _answer(HistoryPage(events=tuple(events), next=events[-1].number if events else after))
            case "metrics" if query.get("newest"):
                page = self.metrics.get(view.id, [])[-int(query["limit"]) :]
                return _answer(MetricsPage(metrics=tuple(page), next=len(self.metrics.get(view.id, []))))
            case "metrics":
                page = self.metrics.get(view.id, [])[after : after + self.page_size]
                return _answer(MetricsPage(metrics=tuple(page), next=after + len(page)))
            case "logs":
                chunks = self.logs.get(view.id, [])
                if "rank" in query:
                    chunks = [chunk for chunk in chunks if chunk.rank == int(query["rank"])]
                page_ = chunks[after : after + self.page_size]
                return _answer(LogPage(chunks=tuple(page_), next=after + len(page_)))
        return httpx.Response(405, text="not so")

    def _change(self, view: JobView, **changes: Any) -> httpx.Response:
        self.jobs[view.id] = view.model_copy(update=changes)
        return _answer(self.jobs[view.id])


def running(view: JobView) -> QueueStatus:
    """Where a job stands that has what it needs."""
    return QueueStatus(
        id=view.id, name=view.name, user=view.user, state=view.state, priority=view.job.priority,
        submitted_s=view.submitted_s,
    )  # fmt: skip


def _answer(body: BaseModel, status: int = 200) -> httpx.Response:
    return httpx.Response(status, content=body.model_dump_json(by_alias=True))


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@dataclass(frozen=True)
class Outcome:
    """What one command did."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON document it printed."""
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        """The JSON documents it printed, one a line."""
        return [json.loads(line) for line in self.out.splitlines()]


def run(
    server: FakeServer | None,
    *arguments: object,
    terminal: bool = False,
    environ: dict[str, str] | None = None,
    sleep: Callable[[float], None] | None = None,
    typed: str | None = None,
    error_stream: io.StringIO | None = None,
) -> Outcome:
    """Run `isthmus ARGUMENTS` against `server`. Time is a clock that only sleeping advances.

    `typed` is what a person enters at a terminal; without it the input is no terminal and empty.
    """
    now_s = [START_S]

    def advance(seconds: float) -> None:
        now_s[0] += seconds
        if sleep is not None:
            sleep(seconds)

    shell = CliEnvironment(
        variables={"ISTHMUS_SERVER": URL, "ISTHMUS_TOKEN": TOKEN, "XDG_CONFIG_HOME": "/nonexistent"} | (environ or {}),
        stdout=Terminal() if terminal else io.StringIO(),
        stderr=error_stream or io.StringIO(),
        stdin=io.StringIO() if typed is None else Terminal(typed),
        transport=server.transport() if server else None,
        sleep=advance,
        now=lambda: now_s[0],
    )
    status = main([str(argument) for argument in arguments], env=shell)
    return Outcome(status, shell.stdout.getvalue(), shell.stderr.getvalue())  # type: ignore[attr-defined]


def _access(request: httpx.Request, what: str, rest: list[str]) -> httpx.Response:
    match request.method, [what, *rest]:
        case "POST", ["tokens"]:
            asked = TokenRequest.model_validate_json(request.content)
            return _answer(TokenView(role=asked.role, name=asked.name, token="isth_secret"), 201)
        case "GET", ["tokens"]:
            return httpx.Response(200, json=[TOKEN_INFO.model_dump(mode="json")])
        case "POST", ["tokens", TOKEN_INFO.id, "revoke"]:
            return _answer(TOKEN_INFO.model_copy(update={"state": "revoked", "revoked_s": 2e9}))
        case "POST", ["tokens", TOKEN_INFO.id, "rotate"]:
            grace_s = TokenRotation.model_validate_json(request.content).grace_s
            return _answer(TokenView(role="user", name="bo", token=f"isth_after_{grace_s:g}"))
        case "GET", ["audit"]:
            query = request.url.params
            one = AuditRecord(number=7, at_s=1e9, action="refused", actor=query.get("user", "bo"), role="user")
            shown = float(query.get("since_s", 0)) <= 1e9 and query["after"] != "7"
            line = one.model_copy(update={"hash": line_digest(audit_start("s-1").digest, one).hex()})
            return _answer(AuditPage(records=(line,) if shown else (), next=7, store="s-1"))
    return httpx.Response(404, text="not here")
