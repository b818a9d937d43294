"""A site that joins the server of the tests by a code: what its owner, its agent and an attacker send."""

from __future__ import annotations

import hashlib

import httpx

from isthmus.core.pool import Cluster
from isthmus.core.views.access_views import AuditFilter, AuditRecord
from tests.control.serving import cluster, report
from tests.control.test_server_api import Server

NORTH = cluster("north", owner="owner-east")
"""A cluster of the owner of east that is not in the operator's file."""


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def invite(server: Server, **terms: object) -> str:
    """Return the code of a new invitation of the owner of east."""
    answer = server.call("POST", "/v1/invitations", {"owner": "owner-east"} | terms, token="root")
    assert answer.status_code == 201, answer.text
    return str(answer.json()["code"])


def join(server: Server, code: str, key: str = "key-1", site: Cluster = NORTH) -> httpx.Response:
    body = {"cluster": site.model_dump(mode="json", by_alias=True), "key": digest(key)}
    return server.call("POST", "/v1/join", body, token=code)  # type: ignore[no-any-return]


def renew(server: Server, key: str, following: str, site: str = "north") -> httpx.Response:
    return server.call("POST", f"/v1/agents/{site}/key", {"key": digest(following)}, token=key)  # type: ignore[no-any-return]


def sync(server: Server, key: str, site: Cluster = NORTH) -> httpx.Response:
    return server.call("POST", f"/v1/agents/{site.name}/sync", report(site), token=key)  # type: ignore[no-any-return]


def audit(server: Server) -> tuple[AuditRecord, ...]:
    server.shell.audit.flush()
    return server.store.audit(AuditFilter(), 0, 1000)


def actions(server: Server) -> list[str]:
    return [one.action for one in audit(server)]
