"""Tokens that are stolen, ended or guessed, and attempts to get around the audit log."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from isthmus.control.service.access.audit_log import BURST, MAX_ACTORS, AuditLog, RateOfActors
from isthmus.control.service.access.token_admin import MAX_TOKENS_OF_A_NAME
from isthmus.control.service.auth import Caller, token_digest
from isthmus.control.store.sqlite_store import SqliteStore
from isthmus.control.store.store_interface import MemoryStore, StoredToken
from isthmus.core.views.access_views import AuditFilter, AuditRecord
from tests.control.test_server_api import Server
from tests.control.test_stream import Streaming

pytestmark = pytest.mark.attack


@pytest.fixture
def server() -> Iterator[Server]:
    """The application in this process."""
    server = Server()
    yield server
    server.shell.close()


def make(server: Server, role: str, name: str, **more: object) -> dict[str, str]:
    answer = server.call("POST", "/v1/tokens", {"role": role, "name": name} | more, token="root")
    assert answer.status_code == 201, answer.text
    made: dict[str, str] = answer.json()
    return made


def status(server: Server, token: str) -> int:
    return int(server.call("GET", "/v1/jobs", token=token).status_code)


def audited(server: Server, action: str) -> list[dict[str, str]]:
    page = server.call("GET", "/v1/audit", token="root").json()
    return [one for one in page["records"] if one["action"] == action]


def test_a_revoked_token_is_rejected_at_once(server: Server) -> None:
    """Also where it was in use before; it stays in the list as revoked."""
    made = make(server, "user", "carl")
    assert status(server, made["token"]) == 200
    server.call("POST", f"/v1/tokens/{made['id']}/revoke", token="root")
    assert status(server, made["token"]) == 401
    listed = {one["id"]: one["state"] for one in server.call("GET", "/v1/tokens", token="root").json()}
    assert listed[made["id"]] == "revoked"


def test_a_token_that_another_server_revokes_is_rejected_after_the_next_tick(server: Server) -> None:
    """Servers that share a store follow it: the token in memory does not outlive it."""
    server.shell.gate.registry.refresh()
    assert status(server, "ann") == 200
    (stored,) = [one for one in server.store.tokens() if one.name == "ann"]
    server.store.put_token(stored.model_copy(update={"revoked_s": 1.0}))
    server.shell.gate.registry.refresh()
    assert status(server, "ann") == 401


def test_an_expired_token_is_rejected(server: Server) -> None:
    """From the second on at which it ends; a period beyond the limit or without end in it is refused."""
    made = make(server, "user", "carl", expires_in_s=60)
    assert status(server, made["token"]) == 200
    server.now_s += 60
    assert status(server, made["token"]) == 401
    for bad in (0, -5, 1e12):
        body = {"role": "user", "name": "carl", "expires_in_s": bad}
        assert server.call("POST", "/v1/tokens", body, token="root").status_code == 422


def test_a_rotated_token_counts_for_its_grace_and_never_extends_itself(server: Server) -> None:
    """A stolen token that rotates itself gets one that ends as it would have; only an admin renews."""
    made = make(server, "user", "carl", expires_in_s=1000)
    rotated = server.call("POST", f"/v1/tokens/{made['id']}/rotate", {"grace_s": 10}, token=made["token"]).json()
    assert rotated["expires_s"] == made["expires_s"]
    assert (status(server, made["token"]), status(server, rotated["token"])) == (200, 200)
    server.now_s += 10
    assert (status(server, made["token"]), status(server, rotated["token"])) == (401, 200)
    renewed = server.call("POST", f"/v1/tokens/{rotated['id']}/rotate", {}, token="root").json()
    assert renewed["expires_s"] > made["expires_s"]
    again = server.call("POST", f"/v1/tokens/{made['id']}/rotate", {}, token="root")
    assert again.status_code == 409


def test_a_user_sees_and_changes_its_own_tokens_only(server: Server) -> None:
    """Another's token is not found, none of the answers has a token or its digest, an owner is not a user."""
    others = make(server, "owner", "owner-east")
    mine = server.call("GET", "/v1/tokens", token="ann").json()
    assert [(one["role"], one["name"]) for one in mine] == [("user", "ann")]
    for act in ("revoke", "rotate"):
        answer = server.call("POST", f"/v1/tokens/{others['id']}/{act}", {}, token="ann")
        assert answer.status_code == 404
    text = server.call("GET", "/v1/tokens", token="root").text + server.call("GET", "/v1/audit", token="root").text
    assert others["token"] not in text
    assert token_digest(others["token"]) not in text
    assert server.call("POST", "/v1/tokens", {"role": "user", "name": "eve"}, token="ann").status_code == 403


def test_the_last_admin_token_cannot_be_revoked(server: Server) -> None:
    """Nobody would be left to make another one."""
    (root,) = [one["id"] for one in server.call("GET", "/v1/tokens", token="root").json() if one["role"] == "admin"]
    answer = server.call("POST", f"/v1/tokens/{root}/revoke", token="root")
    assert answer.status_code == 409
    assert "create" in answer.json()["hint"]


def test_a_name_has_a_bounded_number_of_tokens(server: Server) -> None:
    """A user that rotates in a loop stops at the limit."""
    made = make(server, "user", "carl")
    statuses = []
    for _ in range(MAX_TOKENS_OF_A_NAME + 5):
        answer = server.call("POST", f"/v1/tokens/{made['id']}/rotate", {"grace_s": 1000}, token=made["token"])
        statuses.append(answer.status_code)
    assert statuses[-1] == 409
    assert len(server.store.tokens()) < MAX_TOKENS_OF_A_NAME + 20


def test_cancelled_by_an_admin_says_so(server: Server) -> None:
    """The job's history and reason name the admin, the audit log names both; one's own cancel is as before."""
    one, two = server.submit("ann", key="1"), server.submit("ann", key="2")
    server.call("POST", f"/v1/jobs/{one.id}/cancel", token="root")
    server.call("POST", f"/v1/jobs/{two.id}/cancel", token="ann")
    history = server.call("GET", f"/v1/jobs/{one.id}/history").json()["events"]
    assert server.job(one.id).reason == "cancelled by admin root"
    assert "cancelled by admin root" in [event["text"] for event in history]
    assert server.job(two.id).reason == "cancelled by the user"
    found = [(one["actor"], one["subject"], one["detail"]) for one in audited(server, "job-cancelled")]
    assert found == [("root", one.id, "ann's job"), ("ann", two.id, "ann's job")]


def test_acts_on_tokens_are_audited_with_ids_only(server: Server) -> None:
    """Who created, rotated and revoked which token, for whom, from where."""
    made = make(server, "user", "carl")
    server.call("POST", f"/v1/tokens/{made['id']}/rotate", {"grace_s": 5}, token=made["token"])
    server.call("POST", f"/v1/tokens/{made['id']}/revoke", token="root")
    for action, actor in (("token-created", "root"), ("token-rotated", "carl"), ("token-revoked", "root")):
        (record,) = audited(server, action)
        assert (record["actor"], record["subject"]) == (actor, made["id"])
        assert record["token"].startswith("t-")
        assert record["address"]


def test_records_are_bounded_in_size_and_free_of_control_characters() -> None:
    """Names and details from others are cut and shown with `?` for what a terminal would obey."""
    store = MemoryStore()
    audit = AuditLog(store, lambda: 1.0)
    audit.record("refused", Caller(role="user", name="ann"), "x" * 10_000, "line\nred\x1b[31m\u202eabc" + "y" * 10_000)
    audit.close()
    (record,) = store.audit(AuditFilter())
    assert (len(record.subject), len(record.detail)) == (200, 500)
    assert record.detail.startswith("line?red?[31m?abc")


def test_records_of_one_actor_are_bounded_in_rate_and_counted() -> None:
    """A user that acts in a loop neither fills the store nor hides the acts of others."""
    store, now_s = MemoryStore(), [1.0]
    audit = AuditLog(store, lambda: now_s[0])
    for i in range(BURST + 1000):
        audit.record("job-submitted", Caller(role="user", name="ann"), f"job-{i}")
    audit.record("job-cancelled", Caller(role="user", name="bob"), "job-1")
    now_s[0] = 2.0
    audit.record("job-submitted", Caller(role="user", name="ann"), "late")
    audit.close()
    records = store.audit(AuditFilter(), limit=10_000)
    assert len(records) == BURST + 3
    assert [one.detail for one in records if one.action == "dropped"] == [
        "1000 records of this actor exceeded its rate"
    ]
    assert [one.actor for one in records if one.action == "job-cancelled"] == ["bob"]


def test_rates_of_actors_take_bounded_memory() -> None:
    """Names that an attacker varies do not fill the memory: those beyond the limit are counted together."""
    rate = RateOfActors()
    for i in range(MAX_ACTORS + 100):
        assert rate.admit(f"a{i}", 0.0)
    for _ in range(2 * BURST):
        rate.admit("again", 0.0)
    assert rate.take_dropped("again") == BURST


def test_the_interface_offers_no_way_to_change_or_delete_a_record(server: Server) -> None:
    """The audit log is read-only for every role, and readable for admins only."""
    for method in ("POST", "PUT", "PATCH", "DELETE"):
        for path in ("/v1/audit", "/v1/audit/1"):
            assert server.call(method, path, {}, token="root").status_code in (404, 405)
    assert server.call("GET", "/v1/audit", token="ann").status_code == 403
    assert server.call("GET", "/v1/audit", token="owner-east").status_code == 403


def test_the_database_refuses_to_change_or_delete_a_record(tmp_path: Path) -> None:
    """A bug or a query by hand changes nothing; records older than a year may go."""
    store = SqliteStore(tmp_path / "pool.db")
    now_s = 4e9  # in the year 2096
    store.append_audit([AuditRecord(at_s=at_s, action="refused") for at_s in (1.0, now_s)])
    with sqlite3.connect(tmp_path / "pool.db") as db:
        for sql in ("UPDATE audit SET actor = 'x'", "DELETE FROM audit"):
            with pytest.raises(sqlite3.IntegrityError, match="audit log"):
                db.execute(sql)
    db.close()
    store.prune_audit(now_s - 400 * 86400, now_s + 1)
    assert [one.at_s for one in store.audit(AuditFilter())] == [now_s, now_s + 1], "the last line says what was deleted"
    store.close()


def test_an_unknown_state_of_the_store_trusts_no_token_in_memory(server: Server) -> None:
    """A store that fails is asked for each request: its error is the answer, never a token that may be revoked."""
    server.shell.gate.registry.refresh()
    assert server.shell.gate.known(b"Bearer ann") is not None
    assert server.shell.gate.known(b"Bearer " + b"x" * 100_000) is None
    assert StoredToken(role="user", name="a", digest="d" * 64, created_s=0).id == "t-" + "d" * 12


@pytest.fixture
def real_server(tmp_path: Path) -> Iterator[Streaming]:
    server = Streaming(tmp_path)
    yield server
    server.close()


@pytest.mark.parametrize("how", ["revoked", "expired"])
def test_an_open_stream_ends_with_its_token(real_server: Streaming, how: str) -> None:
    """The script: 1. a stream is open; 2. its token is revoked, or expires; 3. the stream ends, and no other opens."""
    body = {"role": "user", "name": "carl"} | ({"expires_in_s": 1.5} if how == "expired" else {})
    made = real_server.call("POST", "/v1/tokens", "root", body).json()
    real_server.tokens["carl"] = made["token"]
    with real_server.events("carl") as events:
        assert next(events)[0] == "hello"
        if how == "revoked":
            assert real_server.call("POST", f"/v1/tokens/{made['id']}/revoke", "root").status_code == 200
        assert list(events) == [], "it ends before the client's time limit of 10 s; the keep-alive comes after 15 s"
    assert httpx.get(f"{real_server.url}/v1/events", headers=real_server.headers("carl")).status_code == 401
