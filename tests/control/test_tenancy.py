"""Who may read or change what, one test per operation of the OpenAPI document and token.

An operation without a rule in `RULES` fails: a new endpoint needs a rule here that says whose it is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from isthmus.control.rest.create_app import create_app
from isthmus.control.service.auth import token_digest
from isthmus.control.service.control_service import ControlService
from isthmus.control.store.store_interface import MemoryStore
from isthmus.core.messages.agent_messages import LogChunk, ObservedPart, StepMetrics
from tests.control.serving import EAST, plan_across, report, submission
from tests.control.test_server_api import Server
from tests.plan.hand import model_of

pytestmark = pytest.mark.integration

ANNS = "anns-secret"
"""In the name, and so in the id, of all that is ann's; only ann and admins may ever read it."""
ANNS_TOKEN = f"t-{token_digest('ann')[:12]}"
TOKENS = ("ann", "bob", "owner-east", "owner-west", "root")


@dataclass(frozen=True)
class Rule:
    """Who is answered 2xx by an operation asked about ann's job or site east; all others are refused.

    `sees` are those of them whose answer may hold what is ann's. `body` is what is sent, `query` is appended.
    What is `endless` is not read here where it is allowed: `test_stream.py` does.
    """

    may: tuple[str, ...]
    sees: tuple[str, ...] = ()
    body: Any = None
    query: str = ""
    endless: bool = False


OPEN = (*TOKENS, "")
USERS = ("ann", "bob", "root")
ANN = Rule(may=("ann", "root"), sees=("ann", "root"))
MINE = Rule(may=USERS, sees=("ann", "root"))
EAST_SITE = Rule(may=("owner-east", "root"), sees=("owner-east", "root"))


DATA = {
    "kind": "data",
    "name": "words",
    "source": "https://example.org/words",
    "manifest": {"files": [{"path": ANNS, "num_bytes": 1, "sha256": "0" * 64}]},
}
"""A version of ann's in the catalogue, whose manifest names what is hers."""


def _wish(name: str = "other") -> dict[str, Any]:
    return submission("k", name=name).model_dump(mode="json")


JOB_TEXT = {
    "text": "{version: 1, name: k, model: /m, data: {paths: [/d]}, training: {steps: 9, sequence_length: 64, "
    "micro_batch_size: 1, global_batch_size: 8}, checkpoints: {folder: /c}, output: /o}",
    "config": json.dumps(model_of(4, 64).config | {"architectures": ["LlamaForCausalLM"]}),
}


RULES: dict[tuple[str, str], Rule] = {
    ("GET", "/v1/health"): Rule(may=OPEN),
    ("GET", "/metrics"): Rule(may=("owner-east", "owner-west", "root")),
    ("POST", "/v1/jobs"): Rule(may=("bob", "root"), body=_wish()),
    ("POST", "/v1/jobs:bulk"): Rule(may=USERS, body={"submissions": [_wish()]}),
    ("POST", "/v1/jobs:dry-run"): Rule(may=USERS, sees=("ann", "root"), body=_wish()),
    ("GET", "/v1/jobs"): MINE,
    ("GET", "/v1/queue"): MINE,
    ("GET", "/v1/queue/page"): MINE,
    ("POST", "/v1/jobs:read"): Rule(may=USERS, body=JOB_TEXT),
    ("GET", "/v1/tariffs"): Rule(may=TOKENS),
    ("GET", "/v1/limits"): Rule(may=("root",), sees=("root",)),
    ("POST", "/v1/session"): Rule(may=TOKENS),
    ("GET", "/v1/session"): Rule(may=TOKENS),
    ("GET", "/v1/oidc"): Rule(may=OPEN),
    ("POST", "/v1/oidc/begin"): Rule(may=()),  # this pool has no provider
    ("POST", "/v1/oidc/session"): Rule(may=(), body={"code": "c", "state": "s"}),
    ("POST", "/v1/oidc/device"): Rule(may=()),
    ("POST", "/v1/oidc/device/token"): Rule(may=(), body={"device_code": "d"}),
    ("DELETE", "/v1/session"): Rule(may=()),  # a token is no session (`tests/console/test_sessions.py`)
    ("GET", "/v1/jobs/{job_id}"): ANN,
    ("DELETE", "/v1/jobs/{job_id}"): Rule(may=()),  # it has not ended: no token may, and ann learns that
    ("GET", "/v1/jobs/{job_id}/plans"): ANN,
    ("GET", "/v1/jobs/{job_id}/queue"): ANN,
    ("GET", "/v1/jobs/{job_id}/metrics"): ANN,
    ("GET", "/v1/jobs/{job_id}/logs"): ANN,
    ("GET", "/v1/jobs/{job_id}/history"): ANN,
    ("POST", "/v1/jobs/{job_id}/plans/{plan_id}/check"): Rule(
        may=("ann", "root"), sees=("ann", "root"), query="?timeout_s=0"
    ),
    ("POST", "/v1/jobs/{job_id}/choose"): Rule(may=("ann", "root"), sees=("ann", "root"), body={"plan": "p1"}),
    ("POST", "/v1/jobs/{job_id}/preempt"): Rule(
        may=(),  # it has its chips: no token may, and ann learns that
        body={"victims": [{"cluster": "east", "job": "none", "attempt": 1}]},
    ),
    ("POST", "/v1/jobs/{job_id}/cancel"): ANN,
    ("GET", "/v1/events"): Rule(may=("ann", "root"), query="?job={job_id}", endless=True),
    ("POST", "/v1/pool/unknown-jobs/{job_id}/end"): Rule(may=()),  # it is known: admins get 404, others 403
    # Owners see which jobs run at their sites, as their agents do.
    ("GET", "/v1/pool"): Rule(may=TOKENS, sees=("owner-east", "owner-west", "root")),
    ("POST", "/v1/agents/{cluster}/sync"): Rule(
        may=("owner-east", "root"),
        sees=("owner-east", "root"),
        body=report(EAST).model_dump(mode="json", by_alias=True),
    ),
    ("POST", "/v1/sites/{cluster}/gone"): Rule(may=(), sees=("root",)),  # its agent is in contact
    ("POST", "/v1/sites/{cluster}/enrol"): Rule(may=(), sees=("owner-east", "root")),
    ("POST", "/v1/sites/{cluster}/cordon"): EAST_SITE,
    ("POST", "/v1/sites/{cluster}/uncordon"): EAST_SITE,
    ("POST", "/v1/sites/{cluster}/drain"): Rule(may=("owner-east", "root"), sees=("owner-east", "root"), body={}),
    ("POST", "/v1/sites/{cluster}/leave"): Rule(may=("owner-east", "root"), sees=("owner-east", "root"), body={}),
    ("POST", "/v1/agents/{cluster}/left"): Rule(may=()),  # it is not leaving
    ("POST", "/v1/agents/{cluster}/key"): Rule(may=(), body={"key": "0" * 64}),  # no token here is a key of the site
    ("POST", "/v1/sites/{cluster}/accept"): Rule(may=("root",), sees=("root",)),
    ("POST", "/v1/invitations"): Rule(may=("root",), body={"owner": "owner-east"}),
    ("GET", "/v1/invitations"): Rule(may=("root",)),
    ("POST", "/v1/join"): Rule(may=(), body={"cluster": EAST.model_dump(mode="json"), "key": "0" * 64}),  # codes only
    # An owner sees who has used its own clusters, a user what it has used itself.
    ("GET", "/v1/usage"): Rule(may=TOKENS),
    ("POST", "/v1/tariffs"): Rule(
        may=("owner-east", "root"),
        body={"currency": "EUR", "prices": [{"cluster": "east", "node_group": "h20", "per_chip_hour": "1"}]},
    ),
    # Entries of its own accounts alone (`test_ledger_api.py`).
    ("GET", "/v1/ledger"): Rule(may=TOKENS),
    ("GET", "/v1/quotas"): Rule(may=TOKENS),
    ("POST", "/v1/quotas"): Rule(may=("root",), body={"projects": []}),
    # The operator alone for a user; owners for their projects (`test_quota_api.py`).
    ("POST", "/v1/quotas/{account}"): Rule(may=("root",), sees=("root",), body={"chips": 8}),
    ("GET", "/v1/ledger/check"): Rule(may=("root",)),
    ("GET", "/v1/statements/{party}/{name}"): Rule(may=("root",), query="?month=2027-01"),
    # Ann is a user of the owner in the east, which sees how long her jobs wait.
    ("GET", "/v1/waits/{owner}"): Rule(may=("owner-east", "root"), sees=("owner-east", "root"), query="?month=1970-01"),
    ("POST", "/v1/tokens"): Rule(may=("root",), body={"role": "user", "name": "eve"}),
    ("GET", "/v1/tokens"): Rule(may=TOKENS),
    ("POST", "/v1/tokens/{token_id}/revoke"): ANN,
    ("POST", "/v1/tokens/{token_id}/rotate"): Rule(may=("ann", "root"), body={}),
    ("POST", "/v1/tokens/{token_id}/grant"): Rule(may=("root",), sees=("root",), body={"high": True}),
    ("GET", "/v1/audit"): Rule(may=("root",), sees=("root",)),
    # Each caller has its own, by role and name.
    ("GET", "/v1/subscription"): Rule(may=TOKENS),
    ("PUT", "/v1/subscription"): Rule(may=TOKENS, body={"webhook": "https://hooks.example.org/"}),
    ("DELETE", "/v1/subscription"): Rule(may=TOKENS),
    ("GET", "/v1/jobs/{job_id}/ranks"): ANN,
    ("POST", "/v1/catalogue"): Rule(may=USERS, body=DATA | {"name": "other"}),
    ("GET", "/v1/catalogue/{kind}"): Rule(may=USERS, sees=("ann", "root")),
    ("GET", "/v1/catalogue/{kind}/{owner}/{name}"): ANN,
    ("GET", "/v1/catalogue/{kind}/{owner}/{name}/manifest"): ANN,
    ("POST", "/v1/catalogue/{kind}/{owner}/{name}/grants"): Rule(
        may=("ann", "root"), sees=("ann", "root"), body={"user": "bob"}
    ),
    ("DELETE", "/v1/catalogue/{kind}/{owner}/{name}"): ANN,
    # No job at east needs the version, so none of its owner's agents reads it.
    ("GET", "/v1/agents/{cluster}/versions/{owner}/{version}"): Rule(may=()),
}


@cache
def operations() -> list[tuple[str, str]]:
    """Every operation of the document."""
    paths = create_app(ControlService(MemoryStore(), planner=plan_across)).openapi()["paths"]
    return sorted((method.upper(), path) for path, item in paths.items() for method in item)


def anns_job(server: Server) -> str:
    """Make a job of ann's with the key `k`, with a part, metrics and a log at east, whose orders name it."""
    found = server.committed(name=ANNS, key="k")
    line = StepMetrics(job=found.id, attempt=1, rank=0, step=0, values={"loss": 1.0})
    said = LogChunk(job=found.id, attempt=1, rank=0, offset=0, text=ANNS)
    part = ObservedPart(job=found.id, attempt=1, state="prepared")
    server.sync(report(EAST, part, metrics=(line,), logs=(said,)))
    assert server.call("POST", "/v1/catalogue", DATA, token="ann").status_code == 201
    return found.id


@pytest.fixture(scope="module")
def shared(shared_server: Server) -> tuple[Server, str]:
    """A server with a job of ann's, for requests that change nothing."""
    return shared_server, anns_job(shared_server)


@pytest.fixture
def pool(request: pytest.FixtureRequest, method: str, path: str, token: str) -> tuple[Server, str]:
    """A server with a job of ann's: one of its own for a request that may change something, or bears no token.

    A server answers only a few requests without a token from one address.
    """
    if token and (method == "GET" or token not in RULES[method, path].may):
        return request.getfixturevalue("shared")
    server = request.getfixturevalue("server")
    return server, anns_job(server)


def test_every_operation_has_a_rule() -> None:
    """Neither an endpoint without a rule, nor a rule without an endpoint."""
    assert set(operations()) == set(RULES)


@pytest.mark.parametrize("token", [*TOKENS, ""])
@pytest.mark.parametrize(("method", "path"), sorted(RULES))
def test_a_token_reads_and_changes_only_what_is_its_own(
    pool: tuple[Server, str], method: str, path: str, token: str
) -> None:
    """A permitted token is answered; another is refused, reads nothing of ann's, and changes nothing of ann's."""
    server, job = pool
    rule = RULES[method, path]
    if rule.endless and token in rule.may:
        return
    before = server.job(job)
    pool_before = server.shell.pool()
    owner = "owner-east" if path.startswith("/v1/waits/") else "ann"
    entry = {"kind": "data", "owner": owner, "name": "words", "version": "0" * 64}
    entry |= {"party": "user", "account": "user:ann"}
    where = (path + rule.query).format(job_id=job, cluster="east", plan_id="p1", token_id=ANNS_TOKEN, **entry)
    answer = server.call(method, where, rule.body, token=token or None)
    assert answer.status_code < 500
    if token in rule.may:
        assert answer.status_code < 300, answer.text
    else:
        assert 400 <= answer.status_code < 500, answer.text
        no_provider = path.startswith("/v1/oidc/")  # sign-ins need no token, and this pool has no provider
        assert token or answer.status_code == (404 if no_provider else 401)
    if token not in ("ann", "root", *rule.sees):
        told = answer.text.replace(job, "") if token in ("bob",) and answer.status_code == 404 else answer.text
        assert ANNS not in told
    if method == "GET" or token not in rule.may:
        assert server.job(job) == before
        assert server.shell.pool() == pool_before


def test_an_owner_is_told_of_no_other_owners_site(shared: tuple[Server, str]) -> None:
    """Whatever an owner may read, the name of another's cluster is not in it."""
    server, _ = shared
    for method, path in operations():
        rule = RULES[method, path]
        if method == "GET" and "owner-west" in rule.may:
            answer = server.call(method, path, token="owner-west")
            assert answer.status_code == 200
            assert "owner-east" not in answer.text
