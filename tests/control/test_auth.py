"""Who may do what: every endpoint against every role, and tokens that are never kept or said."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from isthmus.control.service import auth
from isthmus.control.service.access.token_gate import TokenGate
from isthmus.control.service.access.token_registry import TokenRegistry
from isthmus.control.store.store_interface import MemoryStore
from isthmus.core.errors import UnavailableError
from isthmus.core.views.api_views import TokenRequest
from tests.control.serving import EAST, WEST, cluster, report, submission
from tests.control.test_server_api import Server

pytestmark = pytest.mark.integration

ENDPOINTS = {
    "list jobs": ("GET", "/v1/jobs", None),
    "submit": ("POST", "/v1/jobs", submission()),
    "job": ("GET", "/v1/jobs/{job}", None),
    "plans": ("GET", "/v1/jobs/{job}/plans", None),
    "metrics": ("GET", "/v1/jobs/{job}/metrics", None),
    "logs": ("GET", "/v1/jobs/{job}/logs", None),
    "check plan": ("POST", "/v1/jobs/{job}/plans/p1/check?timeout_s=0", None),
    "choose": ("POST", "/v1/jobs/{job}/choose", {"plan": "p1"}),
    "cancel": ("POST", "/v1/jobs/{job}/cancel", None),
    "delete": ("DELETE", "/v1/jobs/{job}", None),
    "pool": ("GET", "/v1/pool", None),
    "sync": ("POST", "/v1/agents/east/sync", report(EAST)),
    "make token": ("POST", "/v1/tokens", TokenRequest(role="user", name="carl")),
}
OF_A_JOB = ("job", "plans", "metrics", "logs", "check plan", "choose", "cancel", "delete")
FORBIDDEN = {
    "ann": ("sync", "make token"),
    "owner-east": ("list jobs", "submit", *OF_A_JOB, "make token"),
    "root": (),
}


def found(store: MemoryStore, authorization: str) -> auth.Caller:
    """The caller of a header, by a gate on `store`."""
    return TokenGate(TokenRegistry(store, lambda: 0.0)).look_up(authorization.encode(), "127.0.0.1")


def ask(server: Server, endpoint: str, token: str | None) -> tuple[int, dict[str, object]]:
    """Send the endpoint's request about a job of ann's; return status and body."""
    mine = server.submit(token="ann", key="hers").id
    method, path, body = ENDPOINTS[endpoint]
    answer = server.call(method, path.format(job=mine), body, token=token)
    return answer.status_code, answer.json() if answer.content else {}


@pytest.mark.parametrize("token", [None, "nobody", ""])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_without_a_valid_token_nothing_is_answered(server: Server, endpoint: str, token: str | None) -> None:
    """Every endpoint but health answers 401 to a stranger, and says how to send a token."""
    status, body = ask(server, endpoint, token)
    assert (status, body["error"]) == (401, "AuthError")


def test_a_401_names_the_scheme(server: Server) -> None:
    """RFC 9110, section 11.6.1: a 401 says which scheme would do."""
    answer = server.call("GET", "/v1/jobs", token=None)
    assert answer.headers["www-authenticate"] == "Bearer"
    basic = server.http.get("/v1/jobs", headers={"Authorization": "Basic ann"})
    assert basic.status_code == 401


@pytest.mark.parametrize("token", FORBIDDEN)
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_each_role_may_do_its_own_and_no_more(server: Server, endpoint: str, token: str) -> None:
    """A user submits and follows, an owner's agent syncs, an admin does everything."""
    status, body = ask(server, endpoint, token)
    if endpoint in FORBIDDEN[token]:
        assert (status, body["error"]) == (403, "AuthError")
    else:
        assert status in (200, 201, 204, 404, 409), "allowed, though it may not fit the job's state"
        assert body == {} or "error" not in body or body["error"] != "AuthError"


@pytest.mark.parametrize("endpoint", OF_A_JOB)
def test_another_users_job_does_not_exist(server: Server, endpoint: str) -> None:
    """The answer about another's job is, to the letter, the one about no job at all."""
    status, body = ask(server, endpoint, "bob")
    assert (status, body["error"]) == (404, "NotFoundError")
    method, path, sent = ENDPOINTS[endpoint]
    nothing = server.call(method, path.format(job="nothing"), sent, token="bob")
    assert nothing.status_code == 404
    mine = server.submit(token="ann", key="hers").id
    assert str(body).replace(mine, "nothing") == str(nothing.json())


def test_users_see_only_their_own_jobs_and_an_admin_all(server: Server) -> None:
    """A list holds the caller's jobs."""
    hers, his = server.submit(token="ann").id, server.submit(token="bob").id
    listed = {
        token: [job["id"] for job in server.call("GET", "/v1/jobs", token=token).json()]
        for token in ("ann", "bob", "root")
    }
    assert listed == {"ann": [hers], "bob": [his], "root": [hers, his]}


@pytest.mark.parametrize(
    ("path", "site", "token"),
    [
        ("east", EAST, "owner-west"),
        ("west", EAST, "owner-west"),
        ("west", EAST, "owner-east"),
        ("west", cluster("west", owner="owner-east"), "owner-east"),
        ("west", cluster("west", owner="owner-east"), "root"),
    ],
)
def test_an_owner_speaks_only_for_its_own_clusters(server: Server, path: str, site: object, token: str) -> None:
    """Neither another's cluster, nor another's name in the path, nor a claim against the pool's file."""
    answer = server.call("POST", f"/v1/agents/{path}/sync", site and report(site), token=token)  # type: ignore[arg-type]
    assert (answer.status_code, answer.json()["error"]) == (403, "AuthError")
    assert server.call("GET", "/v1/pool", token="root").json()["clusters"] == []


def test_a_cluster_belongs_to_the_first_owner_that_brings_it(server: Server) -> None:
    """Where the pool's file does not name a cluster, no other owner takes it over later."""
    server.shell.pool_file = None
    north = cluster("north", owner="owner-east")
    server.sync(report(north))
    claim = report(cluster("north", owner="owner-west"), incarnation="i2")
    answer = server.call("POST", "/v1/agents/north/sync", claim, token="owner-west")
    assert answer.status_code == 403


def test_an_owner_sees_its_own_clusters_and_their_links(server: Server) -> None:
    """The pool as one owner sees it; users and admins see it whole."""
    server.sync(report(EAST))
    server.sync(report(WEST))
    seen = {}
    for token in ("owner-east", "owner-west", "ann", "root"):
        pool = server.call("GET", "/v1/pool", token=token).json()
        seen[token] = [view["cluster"]["name"] for view in pool["clusters"]]
    both = ["east", "west"]
    assert seen == {"owner-east": ["east"], "owner-west": ["west"], "ann": both, "root": both}


def test_a_new_token_works_and_is_kept_as_a_hash_only(server: Server) -> None:
    """256 random bits, shown once; the store has their SHA-256 and nothing else."""
    made = server.call("POST", "/v1/tokens", TokenRequest(role="user", name="carl"), token="root").json()
    assert len(made["token"]) == 43
    assert server.call("GET", "/v1/jobs", token=made["token"]).status_code == 200
    assert all(made["token"] not in token.model_dump_json() for token in server.store.tokens())


def test_the_first_start_writes_an_admins_token_for_its_owner_only(tmp_path: Path) -> None:
    """Mode 0600, valid, and kept at the next start."""
    store = MemoryStore()
    auth.ensure_admin_token(store, tmp_path, now_s=0)
    file = tmp_path / auth.ADMIN_TOKEN_FILE
    token = file.read_text().strip()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert found(store, f"Bearer {token}") == auth.Caller(role="admin", name="admin")
    auth.ensure_admin_token(store, tmp_path, now_s=1)
    assert file.read_text().strip() == token


def test_a_crash_between_file_and_store_is_mended_at_the_next_start(tmp_path: Path) -> None:
    """A file whose token the store does not know is replaced by one that works."""
    (tmp_path / auth.ADMIN_TOKEN_FILE).write_text("lost\n")
    store = MemoryStore()
    auth.ensure_admin_token(store, tmp_path, now_s=0)
    token = (tmp_path / auth.ADMIN_TOKEN_FILE).read_text().strip()
    assert found(store, f"bearer {token}").role == "admin"


def test_a_folder_that_takes_no_token_is_named(tmp_path: Path) -> None:
    """Without the file no admin is made."""
    store = MemoryStore()
    with pytest.raises(UnavailableError, match="nowhere"):
        auth.ensure_admin_token(store, tmp_path / "nowhere", now_s=0)
    assert store.tokens() == ()
