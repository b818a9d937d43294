"""`ApiClient`: typed methods for the REST API. Error responses raise the error that they name."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
from httpx_sse import EventSource, ServerSentEvent, SSEError, connect_sse
from pydantic import TypeAdapter, ValidationError

from isthmus.client.server_address import parse_server_url, require_secure_server, tls_context
from isthmus.client.server_errors import error_from_response, unreachable_error
from isthmus.core.catalogue import EntryKind, FileManifest
from isthmus.core.errors import ProtocolError, UnavailableError
from isthmus.core.loopback import is_loopback
from isthmus.core.messages.agent_messages import PROTOCOL_VERSION
from isthmus.core.messages.preflight import SitePreflight
from isthmus.core.owner.accounts import Accounts
from isthmus.core.owner.tariff import Tariff
from isthmus.core.owner.with_quota import QuotaChange
from isthmus.core.plan import PlanSet
from isthmus.core.views.access_views import (
    AuditFilter,
    AuditPage,
    DeviceAnswer,
    DeviceBegun,
    TokenGrant,
    TokenInfo,
    TokenRotation,
)
from isthmus.core.views.api_views import (
    NEXT_JOB_HEADER,
    ClusterView,
    Health,
    HistoryPage,
    JobFilter,
    JobView,
    LogPage,
    MetricsPage,
    PoolView,
    Submission,
    TokenRequest,
    TokenView,
    VictimView,
)
from isthmus.core.views.catalogue_views import EntryView, GrantChange, VersionAddition
from isthmus.core.views.ledger_views import LedgerCheckView, LedgerPage, PartyKind, StatementView, TariffView
from isthmus.core.views.notice_views import Subscription, SubscriptionView
from isthmus.core.views.queue_status import DryRun, QueueStatus
from isthmus.core.views.quota_views import AccountsView, QuotaView
from isthmus.core.views.rank_views import RankView
from isthmus.core.views.site_views import (
    DrainRequest,
    InvitationRequest,
    InvitationView,
    InvitationWithCode,
    JoinedView,
    JoinRequest,
    LeaveRequest,
    LeaveView,
)
from isthmus.core.views.usage_views import UsageView
from isthmus.core.views.wait_views import WaitedJobsPage

STREAM_TIMEOUT = httpx.Timeout(45, connect=5)
"""For event streams: the server sends a keep-alive every 15 s."""
EVERY_JOB = JobFilter()
PAGE_SIZE = 1000
"""Jobs per page of a listing."""

RETRY_DELAYS_S = (0.1, 0.3, 0.9)
"""Waits between connection attempts, in seconds; long enough for a server restart."""

_Answer = TypeVar("_Answer")


class ApiClient:
    """HTTP client of the server at URL `server`, authenticated by `token`; a context manager.

    `ca` is the PEM file of the CA that signed the server's certificate (None: the system's).
    Every method raises `UnavailableError` if the server is unreachable, `ProtocolError` if its version
    differs, and otherwise the error that the server names.
    """

    def __init__(
        self,
        server: str,
        token: str | None = None,
        ca: Path | None = None,
        *,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.server = server.rstrip("/")
        url = parse_server_url(self.server)
        local = is_loopback(url.host)
        if token:
            require_secure_server(self.server)
        self._sleep = sleep
        self._version_checked = False
        self._http = httpx.Client(
            base_url=self.server,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            verify=tls_context(ca) if url.scheme == "https" else False,
            timeout=httpx.Timeout(30, connect=5),
            transport=transport,
            trust_env=not local,  # an HTTP proxy cannot reach this machine's loopback
        )

    def __enter__(self) -> ApiClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def health(self) -> Health:
        """Return the server's version; raise `ProtocolError` if its protocol differs."""
        health = self._call(Health, "GET", "/v1/health", check_version=False)
        if health.protocol != PROTOCOL_VERSION:
            raise ProtocolError(
                f"the server at {self.server} (version {health.version}) uses protocol {health.protocol}, "
                f"this command line {PROTOCOL_VERSION}",
                hint="install the server's version: pip install 'isthmus==" + health.version + "'",
            )
        return health

    def begin_sign_in(self) -> DeviceBegun:
        """Begin to sign in at the pool's provider; needs no token."""
        return self._call(DeviceBegun, "POST", "/v1/oidc/device")

    def finish_sign_in(self, device_code: str) -> DeviceAnswer:
        """Return the token, or none while the person has not signed in."""
        return self._call(DeviceAnswer, "POST", "/v1/oidc/device/token", json={"device_code": device_code})

    def submit(self, submission: Submission) -> JobView:
        """Submit a job; a retry with the same `submission.key` returns the same job."""
        return self._call(JobView, "POST", "/v1/jobs", json=_json_body(submission))

    def dry_run(self, submission: Submission) -> DryRun:
        """Return the plans and queue status that a job would have, without submitting it."""
        return self._call(DryRun, "POST", "/v1/jobs:dry-run", json=_json_body(submission))

    def jobs(self, wanted: JobFilter = EVERY_JOB, *, limit: int | None = None) -> list[JobView]:
        """Return the caller's jobs that meet `wanted`, latest first, at most `limit` (None: all), without plans."""
        found: list[JobView] = []
        query = wanted.model_dump(exclude_defaults=True) | {"newest_first": True}
        while limit is None or len(found) < limit:
            size = PAGE_SIZE if limit is None else min(PAGE_SIZE, limit - len(found))
            response = self._request("GET", "/v1/jobs", params=query | {"limit": size})
            found += self._parse(list[JobView], response)
            query["after"] = response.headers.get(NEXT_JOB_HEADER)
            if query["after"] is None:
                break
        return found

    def job(self, job: str) -> JobView:
        """Return one job by its full id."""
        return self._call(JobView, "GET", f"/v1/jobs/{_quote_segment(job)}")

    def check_plan(self, job: str, plan: str, *, timeout_s: float) -> list[SitePreflight]:
        """Return what the sites of an offered plan find within `timeout_s`, without choosing the plan."""
        path = f"/v1/jobs/{_quote_segment(job)}/plans/{_quote_segment(plan)}/check"
        return self._call(list[SitePreflight], "POST", path, params={"timeout_s": timeout_s})

    def plans(self, job: str) -> PlanSet:
        """Return the candidate plans and rejected cluster combinations of a job."""
        return self._call(PlanSet, "GET", f"/v1/jobs/{_quote_segment(job)}/plans")

    def ranks(self, job: str) -> list[RankView]:
        """Return the ranks of a job with their addresses and peers."""
        return self._call(list[RankView], "GET", f"/v1/jobs/{_quote_segment(job)}/ranks")

    def queue_status(self, job: str) -> QueueStatus:
        """Return the queue status of a job: why it waits, jobs ahead, expected start."""
        return self._call(QueueStatus, "GET", f"/v1/jobs/{_quote_segment(job)}/queue")

    def queue(self) -> list[QueueStatus]:
        """Return the queue status of the caller's waiting jobs in start order."""
        return self._call(list[QueueStatus], "GET", "/v1/queue")

    def usage(self) -> UsageView:
        """Return the chip-hours that owners have given and users have taken, as far as the caller may see them."""
        return self._call(UsageView, "GET", "/v1/usage")

    def publish_tariff(self, tariff: Tariff) -> TariffView:
        """Publish prices of the caller's clusters (an admin: of any cluster and of links)."""
        return self._call(TariffView, "POST", "/v1/tariffs", json=_json_body(tariff))

    def set_quotas(self, accounts: Accounts) -> AccountsView:
        """Set the pool's projects, groups and limits (admin only)."""
        return self._call(AccountsView, "POST", "/v1/quotas", json=_json_body(accounts))

    def set_quota(self, account: str, change: QuotaChange) -> QuotaView:
        """Set the quota of one account (an admin), or of a project of the caller at its clusters (an owner)."""
        return self._call(QuotaView, "POST", f"/v1/quotas/{_quote_segment(account)}", json=_json_body(change))

    def quotas(self, account: str | None = None) -> QuotaView:
        """Return the accounts that the caller may see, or one, such as `project:nlp`, with limits and use."""
        return self._call(QuotaView, "GET", "/v1/quotas", params={"account": account} if account else {})

    def ledger(self, *, after: int = 0, limit: int = 1000) -> LedgerPage:
        """Return entries of the caller's accounts (an admin: all) in transactions after number `after`."""
        return self._call(LedgerPage, "GET", "/v1/ledger", params={"after": after, "limit": limit})

    def check_ledger(self) -> LedgerCheckView:
        """Recount the ledger (admin only)."""
        return self._call(LedgerCheckView, "GET", "/v1/ledger/check")

    def statement(self, party: PartyKind, name: str, month: str) -> StatementView:
        """Return the statement of an owner, a user or a job for a month `YYYY-MM`."""
        path = f"/v1/statements/{party}/{_quote_segment(name)}"
        return self._call(StatementView, "GET", path, params={"month": month})

    def waits(self, owner: str, month: str, *, after: int = 0, limit: int = 1000) -> WaitedJobsPage:
        """Return a page of the jobs that an owner's own users submitted in a month (`YYYY-MM`), with their waits."""
        path = f"/v1/waits/{_quote_segment(owner)}"
        return self._call(WaitedJobsPage, "GET", path, params={"month": month, "after": after, "limit": limit})

    def choose(self, job: str, plan: str) -> JobView:
        """Choose the plan of a job."""
        return self._call(JobView, "POST", f"/v1/jobs/{_quote_segment(job)}/choose", json={"plan": plan})

    def preempt(self, job: str, victims: Sequence[VictimView]) -> JobView:
        """Let a waiting job preempt exactly these victims."""
        named = [one.model_dump(include={"cluster", "job", "attempt"}) for one in victims]
        return self._call(JobView, "POST", f"/v1/jobs/{_quote_segment(job)}/preempt", json={"victims": named})

    def cancel(self, job: str) -> JobView:
        """Stop a job and release its resources."""
        return self._call(JobView, "POST", f"/v1/jobs/{_quote_segment(job)}/cancel")

    def end_unknown(self, job: str) -> PoolView:
        """End a job that sites run and that the server does not know since its restore (admin only)."""
        return self._call(PoolView, "POST", f"/v1/pool/unknown-jobs/{_quote_segment(job)}/end")

    def delete(self, job: str) -> None:
        """Delete an ended job with its metrics and logs."""
        self._call(type(None), "DELETE", f"/v1/jobs/{_quote_segment(job)}")

    def history(self, job: str, *, after: int = 0, limit: int = 1000) -> HistoryPage:
        """Return up to `limit` events of the job's history after the cursor `after`."""
        query = {"after": after, "limit": limit}
        return self._call(HistoryPage, "GET", f"/v1/jobs/{_quote_segment(job)}/history", params=query)

    def metrics(self, job: str, *, after: int = 0, limit: int = 1000, newest: bool = False) -> MetricsPage:
        """Return up to `limit` step metrics after the cursor `after`: the first ones, or with `newest` the last."""
        query: dict[str, int | bool] = {"after": after, "limit": limit} | ({"newest": True} if newest else {})
        return self._call(MetricsPage, "GET", f"/v1/jobs/{_quote_segment(job)}/metrics", params=query)

    def logs(self, job: str, *, after: int = 0, rank: int | None = None, limit: int = 1000) -> LogPage:
        """Return up to `limit` log chunks after the cursor `after`, of one rank or of all."""
        query = {"after": after, "limit": limit} | ({} if rank is None else {"rank": rank})
        return self._call(LogPage, "GET", f"/v1/jobs/{_quote_segment(job)}/logs", params=query)

    @contextmanager
    def events(self, job: str, *, after: str = "") -> Iterator[Iterator[ServerSentEvent]]:
        """Open a job's event stream after event id `after` ("": starts with the current state).

        Iteration blocks until the next event and raises `UnavailableError` if the stream breaks.
        """
        headers = {"Last-Event-ID": after} if after else {}
        with (
            self._map_stream_errors(),
            connect_sse(
                self._http, "GET", "/v1/events", params={"job": job}, headers=headers, timeout=STREAM_TIMEOUT
            ) as source,
        ):
            if source.response.is_error:
                source.response.read()
                raise error_from_response(source.response, self.server)
            yield self._iter_events(source)

    def pool(self) -> PoolView:
        """Return the current state of the pool."""
        return self._call(PoolView, "GET", "/v1/pool")

    def declare_site_gone(self, cluster: str) -> ClusterView:
        """Count everything of the pool at a lost site as ended (admin only)."""
        return self._call(ClusterView, "POST", f"/v1/sites/{quote(cluster, safe='')}/gone")

    def enrol_site(self, cluster: str) -> ClusterView:
        """Let the next new agent of a cluster take the place of the enrolled one (admin, or its owner)."""
        return self._call(ClusterView, "POST", f"/v1/sites/{quote(cluster, safe='')}/enrol")

    def use_token(self, token: str) -> None:
        """Send `token` with every request from now on."""
        self._http.headers["Authorization"] = f"Bearer {token}"

    def invite_owner(self, request: InvitationRequest) -> InvitationWithCode:
        """Make a code by which an owner's cluster joins (admin only)."""
        return self._call(InvitationWithCode, "POST", "/v1/invitations", json=_json_body(request))

    def invitations(self) -> list[InvitationView]:
        """Return the invitations, without their codes (admin only)."""
        return self._call(list[InvitationView], "GET", "/v1/invitations")

    def join_pool(self, request: JoinRequest) -> JoinedView:
        """Join a cluster; the token of this client is the code."""
        return self._call(JoinedView, "POST", "/v1/join", json=_json_body(request))

    def accept_site(self, cluster: str) -> ClusterView:
        """End the probation of a site (admin only)."""
        return self._call(ClusterView, "POST", f"/v1/sites/{quote(cluster, safe='')}/accept")

    def cordon_site(self, cluster: str, *, cordoned: bool) -> ClusterView:
        """Close a site to new parts, or open it again (admin, or its owner)."""
        act = "cordon" if cordoned else "uncordon"
        return self._call(ClusterView, "POST", f"/v1/sites/{quote(cluster, safe='')}/{act}")

    def drain_site(self, cluster: str, request: DrainRequest) -> ClusterView:
        """Save and stop the jobs of a site, which takes no new ones (admin, or its owner)."""
        path = f"/v1/sites/{quote(cluster, safe='')}/drain"
        return self._call(ClusterView, "POST", path, json=_json_body(request))

    def leave_pool(self, cluster: str, request: LeaveRequest) -> LeaveView:
        """Take the next step of a site's leaving (admin, or its owner)."""
        path = f"/v1/sites/{quote(cluster, safe='')}/leave"
        return self._call(LeaveView, "POST", path, json=_json_body(request))

    def create_token(self, request: TokenRequest) -> TokenView:
        """Create a token (admin only)."""
        return self._call(TokenView, "POST", "/v1/tokens", json=_json_body(request))

    def tokens(self) -> list[TokenInfo]:
        """Return the caller's tokens (an admin: all), without the tokens themselves, oldest first."""
        return self._call(list[TokenInfo], "GET", "/v1/tokens")

    def revoke_token(self, token_id: str) -> TokenInfo:
        """Revoke a token by its id."""
        return self._call(TokenInfo, "POST", f"/v1/tokens/{_quote_segment(token_id)}/revoke")

    def grant_token(self, token_id: str, grant: TokenGrant) -> TokenInfo:
        """Grant priority `high` to a token, or take it back (admin only)."""
        return self._call(TokenInfo, "POST", f"/v1/tokens/{_quote_segment(token_id)}/grant", json=_json_body(grant))

    def rotate_token(self, token_id: str, rotation: TokenRotation) -> TokenView:
        """Replace a token by a new one; the old one counts for a while."""
        path = f"/v1/tokens/{_quote_segment(token_id)}/rotate"
        return self._call(TokenView, "POST", path, json=_json_body(rotation))

    def audit(self, wanted: AuditFilter, *, after: int = 0, limit: int = 1000, oldest: bool = False) -> AuditPage:
        """Return records of the audit log (admin only): the newest or the oldest ones, or the first after `after`."""
        query = wanted.model_dump(exclude_none=True) | {"after": after, "limit": limit}
        query |= {"oldest": True} if oldest else {}
        return self._call(AuditPage, "GET", "/v1/audit", params=query)

    def subscription(self) -> SubscriptionView:
        """Return the caller's subscription to notices, without its secret."""
        return self._call(SubscriptionView, "GET", "/v1/subscription")

    def set_subscription(self, subscription: Subscription) -> SubscriptionView:
        """Subscribe to notices; return the subscription with the secret of its webhooks."""
        return self._call(SubscriptionView, "PUT", "/v1/subscription", json=_json_body(subscription))

    def remove_subscription(self) -> None:
        """End the caller's subscription to notices."""
        self._call(type(None), "DELETE", "/v1/subscription")

    def entries(self, kind: EntryKind) -> list[EntryView]:
        """Return the entries of the catalogue that the caller owns or was granted (an admin: all)."""
        return self._call(list[EntryView], "GET", f"/v1/catalogue/{kind}")

    def entry(self, kind: EntryKind, owner: str, name: str) -> EntryView:
        """Return an entry of the catalogue."""
        return self._call(EntryView, "GET", _entry_path(kind, owner, name))

    def manifest(self, kind: EntryKind, owner: str, name: str, version: str | None = None) -> FileManifest:
        """Return the files of a version (None: the newest) of an entry."""
        query = {} if version is None else {"version": version}
        return self._call(FileManifest, "GET", f"{_entry_path(kind, owner, name)}/manifest", params=query)

    def add_version(self, addition: VersionAddition) -> EntryView:
        """Add a version to an entry of the caller; return the entry."""
        return self._call(EntryView, "POST", "/v1/catalogue", json=_json_body(addition))

    def change_grant(self, kind: EntryKind, owner: str, name: str, change: GrantChange) -> EntryView:
        """Grant an entry of the caller to a user, or take the grant back; return the entry."""
        return self._call(EntryView, "POST", f"{_entry_path(kind, owner, name)}/grants", json=_json_body(change))

    def remove_version(self, kind: EntryKind, owner: str, name: str, version: str | None = None) -> None:
        """Remove a version of an entry of the caller, or with None the entry."""
        query = {} if version is None else {"version": version}
        self._call(type(None), "DELETE", _entry_path(kind, owner, name), params=query)

    def _call(
        self, kind: type[_Answer], method: str, path: str, *, check_version: bool = True, **arguments: Any
    ) -> _Answer:
        return self._parse(kind, self._request(method, path, check_version=check_version, **arguments))

    def _request(self, method: str, path: str, *, check_version: bool = True, **arguments: Any) -> httpx.Response:
        if check_version and not self._version_checked:
            self.health()
            self._version_checked = True
        response = self._send(method, path, arguments)
        if response.is_error:
            raise error_from_response(response, self.server)
        return response

    def _parse(self, kind: type[_Answer], response: httpx.Response) -> _Answer:
        try:
            return TypeAdapter(kind).validate_json(response.content or b"null")
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"]) or "the body"
            request = f"{response.request.method} {self.server}{response.request.url.path}"
            raise ProtocolError(
                f"{request}: malformed response, {place}: {first['msg']}",
                hint="use the same version of server and command line, and check the server address",
            ) from error

    def _iter_events(self, source: EventSource) -> Iterator[ServerSentEvent]:
        with self._map_stream_errors():
            yield from source.iter_sse()

    @contextmanager
    def _map_stream_errors(self) -> Iterator[None]:
        try:
            yield
        except (httpx.TransportError, SSEError) as error:
            raise UnavailableError(
                f"the event stream of {self.server} broke: {error or type(error).__name__}"
            ) from error

    def _send(self, method: str, path: str, arguments: dict[str, Any]) -> httpx.Response:
        """Send a request, with a retry after each of `RETRY_DELAYS_S` on transport errors.

        Failed connection attempts are always retried. Broken connections are retried except for DELETE,
        whose retry could fail with "no such job".
        """
        for delay_s in (*RETRY_DELAYS_S, None):
            try:
                return self._http.request(method, path, **arguments)
            except httpx.TransportError as error:
                unsent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
                if isinstance(error.__cause__, ssl.SSLError) or "CERTIFICATE" in str(error):
                    raise UnavailableError(
                        f"{self.server}: {error}", hint="give the CA certificate with --ca FILE"
                    ) from error
                if delay_s is None or (method == "DELETE" and not unsent):
                    raise unreachable_error(self.server, error, unsent=unsent) from error
                self._sleep(delay_s)
        raise AssertionError("the last delay is None")  # pragma: no cover


def _quote_segment(text: str) -> str:
    return quote(text, safe="")


def _entry_path(kind: EntryKind, owner: str, name: str) -> str:
    return f"/v1/catalogue/{kind}/{_quote_segment(owner)}/{_quote_segment(name)}"


_Body = (
    Submission | TokenGrant | TokenRequest | TokenRotation | VersionAddition | GrantChange | DrainRequest
    | InvitationRequest | JoinRequest | Tariff | Subscription | Accounts | QuotaChange
)  # fmt: skip


def _json_body(
    model: _Body,
) -> Any:
    return model.model_dump(mode="json", by_alias=True)
