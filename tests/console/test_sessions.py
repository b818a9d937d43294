"""Sessions of the console: they begin with a token, act as it does, and end with it, by hand, or in time."""

from __future__ import annotations

import pytest

from isthmus.control.rest.console.static_files import CONSOLE_HEADERS, CONSOLE_POLICY, console_files
from isthmus.control.service.access.console_sessions import MAX_SESSIONS, MAX_SIGN_INS, SESSION_S
from isthmus.control.service.access.session_cookie import COOKIE, SECURE_COOKIE, cookie_name, credentials
from isthmus.control.service.access.token_gate import TokenGate
from isthmus.control.service.access.token_registry import TokenRegistry
from isthmus.control.service.auth import token_digest
from isthmus.core.views.access_views import AuditFilter
from tests.console.browser_like import Browser
from tests.control.conftest import server
from tests.control.test_server_api import Server

__all__ = ["server"]
pytestmark = pytest.mark.integration


def signed_in(server: Server, token: str = "ann") -> Browser:
    browser = Browser(server)
    answer = browser.sign_in(token)
    assert answer.status_code == 201, answer.text
    return browser


def test_a_session_acts_as_its_token_until_it_signs_out(server: Server) -> None:
    """The same jobs, the same role; after signing out its halves are those of a stranger."""
    job = server.submit("ann")
    browser = signed_in(server)
    assert [one["id"] for one in browser.call("GET", "/v1/jobs").json()] == [job.id]
    assert browser.call("GET", "/v1/session").json() | {"id": "", "key": ""} == {
        "id": "", "key": "", "role": "user", "name": "ann", "expires_s": server.now_s + SESSION_S,
    }  # fmt: skip
    ended = browser.call("DELETE", "/v1/session")
    assert ended.status_code == 204
    assert f'{COOKIE}=""' in ended.headers["set-cookie"]
    assert "Max-Age=0" in ended.headers["set-cookie"]
    assert browser.call("GET", "/v1/jobs").status_code == 401
    assert server.call("GET", "/v1/jobs").status_code == 200, "the token stays"


@pytest.mark.attack
def test_the_cookie_is_for_this_server_alone(server: Server) -> None:
    """No script reads it, no other site sends it, and under TLS it never leaves it."""
    set_cookie = Browser(server).sign_in("ann").headers["set-cookie"]
    assert {part.strip() for part in set_cookie.split(";")[1:]} == {
        "HttpOnly", f"Max-Age={SESSION_S:.0f}", "Path=/", "SameSite=strict",
    }  # fmt: skip
    secure = server.http.post("https://testserver/v1/session", headers={"Authorization": "Bearer ann"})
    assert secure.headers["set-cookie"].startswith(f"{SECURE_COOKIE}=")
    assert "Secure" in secure.headers["set-cookie"].split("; ")
    assert secure.headers["strict-transport-security"]
    assert (cookie_name(secure=True), cookie_name(secure=False)) == ("__Host-isthmus-session", "isthmus-session")


@pytest.mark.attack
def test_a_session_ends_with_its_token(server: Server) -> None:
    """Revoked: at once at this server. Expired: a session never counts longer than its token, nor than 12 hours."""
    made = server.call("POST", "/v1/tokens", {"role": "user", "name": "carl", "expires_in_s": 600}, token="root").json()
    browser = signed_in(server, made["token"])
    assert browser.call("GET", "/v1/session").json()["expires_s"] == server.now_s + 600
    assert browser.call("GET", "/v1/jobs").status_code == 200
    server.call("POST", f"/v1/tokens/{made['id']}/revoke", token="root")
    assert browser.call("GET", "/v1/jobs").status_code == 401
    later = signed_in(server)
    server.now_s += SESSION_S - 1
    assert later.call("GET", "/v1/jobs").status_code == 200
    server.now_s += 1
    assert later.call("GET", "/v1/jobs").status_code == 401


def test_a_token_that_another_server_revokes_ends_its_sessions_with_the_next_tick(server: Server) -> None:
    """Servers of one store agree within a tick, half a second."""
    browser = signed_in(server)
    server.shell.gate.registry.refresh()
    token = server.store.find_token(token_digest("ann"))
    assert token is not None
    server.store.put_token(token.model_copy(update={"revoked_s": server.now_s}))
    server.shell.gate.registry.refresh()
    assert browser.call("GET", "/v1/jobs").status_code == 401


def test_a_session_is_known_to_a_server_that_starts_again(server: Server) -> None:
    """It is in the store, as a hash: the other server has never seen it."""
    browser = signed_in(server)
    cookie = (b"cookie", f"{COOKIE}={browser.cookie}".encode())
    shown = credentials([cookie, (b"isthmus-session-key", browser.key.encode())], secure=False)
    caller = TokenGate(TokenRegistry(server.store, lambda: server.now_s)).look_up(shown, "127.0.0.1")
    assert (caller.role, caller.name, caller.token_id) == ("user", "ann", browser.id)


def test_a_grant_to_the_token_counts_in_its_sessions(server: Server) -> None:
    """Priority `high` is given to tokens and taken from them, also for the sessions that they began."""
    browser = signed_in(server)
    token = server.store.find_token(token_digest("ann"))
    assert token is not None
    for high in (True, False):
        server.call("POST", f"/v1/tokens/{token.id}/grant", {"high": high}, token="root")
        found = server.shell.gate.registry.get(browser.id)
        assert found is not None
        assert found.high is high
    assert server.call("POST", f"/v1/tokens/{browser.id}/grant", {"high": True}, token="root").status_code == 409


def test_sessions_are_listed_and_revoked_like_tokens_and_neither_rotated_nor_prolonged(server: Server) -> None:
    """The list says of which token; a session makes neither a session nor a token of itself."""
    browser = signed_in(server)
    listed = {one["id"]: one for one in browser.call("GET", "/v1/tokens").json()}
    token = server.store.find_token(token_digest("ann"))
    assert token is not None
    assert listed[browser.id]["session_of"] == token.id
    assert browser.call("POST", f"/v1/tokens/{browser.id}/rotate", {}).status_code == 409
    assert browser.call("POST", "/v1/session").status_code == 403
    assert browser.call("POST", f"/v1/tokens/{browser.id}/revoke").status_code == 200
    assert browser.call("GET", "/v1/jobs").status_code == 401


@pytest.mark.attack
def test_sessions_of_a_token_are_bounded_and_deleted_once_they_have_expired(server: Server) -> None:
    """The oldest ends for the newest; what has expired leaves the store."""
    first = signed_in(server)
    for _ in range(MAX_SESSIONS):
        signed_in(server)
    assert first.call("GET", "/v1/jobs").status_code == 401
    for _ in range(MAX_SIGN_INS - MAX_SESSIONS - 1):
        signed_in(server)
    refused = Browser(server).sign_in("ann")
    assert refused.status_code == 429, refused.text
    assert signed_in(server, "bob").call("GET", "/v1/jobs").status_code == 200, "others sign in"
    num_stored = len(server.store.tokens())
    server.now_s += SESSION_S + 1
    signed_in(server)
    assert len(server.store.tokens()) == num_stored - MAX_SIGN_INS


def test_signing_in_and_out_is_audited_without_secrets(server: Server) -> None:
    """Records name the session by its id."""
    browser = signed_in(server)
    browser.call("DELETE", "/v1/session")
    server.shell.audit.flush()
    records = server.store.audit(AuditFilter(), 0, 100)
    acts = [(one.action, one.subject) for one in records if one.actor == "ann"]
    assert acts == [("signed-in", browser.id), ("signed-out", browser.id)]
    text = "".join(one.model_dump_json() for one in records) + "".join(map(repr, server.store.tokens()))
    assert browser.cookie not in text
    assert browser.key not in text


def test_keys_of_agents_and_codes_do_not_sign_in(server: Server) -> None:
    """A site's key acts for its agent, a code joins one cluster."""
    owner = server.store.find_token(token_digest("owner-east"))
    assert owner is not None
    server.store.put_token(owner.model_copy(update={"digest": token_digest("key"), "site": "east"}))
    assert Browser(server).sign_in("key").status_code == 403


def test_the_files_of_the_console_need_no_token_and_carry_a_strict_policy(server: Server) -> None:
    """Each file of the bundle has it; an unknown name is not found, also one that climbs out of the folder."""
    for name in ("", *console_files()):
        answer = server.http.get(f"/console/{name}")
        assert answer.status_code == 200, name
        assert {key: answer.headers[key] for key in CONSOLE_HEADERS} == CONSOLE_HEADERS
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = server.http.get(f"/console/{name}", headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    assert "unsafe" not in CONSOLE_POLICY
    for name in ("nothing.js", "../__init__.py", "..%2f__init__.py", "vendor", "lib/"):
        assert server.http.get(f"/console/{name}").status_code == 404, name
    for path in ("/", "/console"):
        answer = server.http.get(path, follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (307, "/console/")
