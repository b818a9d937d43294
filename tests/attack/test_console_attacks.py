"""Attacks on the console's sessions: forged requests, stolen halves, fixed sessions, frames, floods, oversize forms."""

from __future__ import annotations

import pytest

from isthmus.control.rest.body_limit import MAX_SMALL_BODY_BYTES
from isthmus.control.rest.console.static_files import CONSOLE_POLICY
from isthmus.control.server.head_refusal import refusal
from isthmus.control.service.access.login_backoff import FREE_FAILURES
from isthmus.control.service.access.session_cookie import COOKIE, SECURE_COOKIE, credentials
from isthmus.control.service.access.token_gate import MAX_TOKEN_BYTES
from tests.console.browser_like import Browser
from tests.control.test_server_api import Server

pytestmark = pytest.mark.attack


@pytest.fixture
def browser(server: Server) -> Browser:
    """Ann, signed in."""
    made = Browser(server)
    assert made.sign_in("ann").status_code == 201
    return made


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site", "Origin": "https://evil.example"},
        {"Sec-Fetch-Site": "same-site", "Origin": "http://testserver:9999"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "none"},
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_request_of_another_page_changes_and_reads_nothing(
    browser: Browser, method: str, headers: dict[str, str]
) -> None:
    """A forged request has the cookie: it lacks the key, and with a guessed or known key its origin gives it away."""
    job = browser.server.submit("ann")
    path = f"/v1/jobs/{job.id}/cancel" if method == "POST" else "/v1/jobs"
    assert browser.call(method, path, key="", **headers).status_code == 401
    assert browser.call(method, path, key="guessed", **headers).status_code in (401, 403)
    assert browser.call(method, path, **headers).status_code == 403
    assert browser.server.job(job.id).state != "cancelled"


def test_half_a_secret_is_a_strangers(browser: Browser) -> None:
    """Of a stolen cookie, as another service at the same host gets it, or a stolen key nothing follows."""
    assert browser.call("GET", "/v1/jobs", key="").status_code == 401
    assert browser.call("GET", "/v1/jobs", cookie="").status_code == 401
    assert browser.call("GET", "/v1/session", key="").status_code == 401, "the cookie does not ask for its other half"
    for shown in (f"Bearer {browser.cookie}.{browser.key}", f"session {browser.cookie}.{browser.key}"):
        answer = browser.server.http.get("/v1/jobs", headers={"Authorization": shown})
        assert answer.status_code == 401, "a session is no token"


def test_a_session_that_an_attacker_fixed_is_not_the_one_that_signs_in(browser: Browser) -> None:
    """The victim's browser has the attacker's cookie, or an invented one: signing in draws both halves itself."""
    victim = Browser(browser.server)
    victim.sign_in("bob", Cookie=f"{COOKIE}={browser.cookie}")
    assert victim.cookie not in ("", browser.cookie)
    assert victim.call("GET", "/v1/session", cookie=browser.cookie).status_code == 401
    assert victim.call("GET", "/v1/session").json()["name"] == "bob"
    assert browser.call("GET", "/v1/session").json()["name"] == "ann"
    twice = f"{COOKIE}={browser.cookie}; {COOKIE}={victim.cookie}"
    assert victim.call("GET", "/v1/session", cookie="", Cookie=twice).status_code == 401, "a cookie that was added"


def test_under_tls_a_cookie_that_a_page_without_tls_could_set_is_no_session() -> None:
    """Only the name with the prefix `__Host-` counts, which browsers take over TLS alone."""
    key = (b"isthmus-session-key", b"k")
    plain, prefixed = ((b"cookie", f"{name}=c".encode()) for name in (COOKIE, SECURE_COOKIE))
    assert credentials([plain, key], secure=True) is None
    assert credentials([prefixed, key], secure=True) == b"session c.k"
    assert credentials([prefixed, key], secure=False) is None


def test_no_page_of_the_server_is_shown_in_a_frame_or_runs_foreign_words(browser: Browser) -> None:
    """The console, the data and the errors forbid frames; scripts are the server's, and no text becomes HTML."""
    for path in ("/console/", "/console/app.js", "/v1/jobs", "/docs", "/v1/none"):
        answer = browser.call("GET", path)
        assert answer.headers["x-frame-options"] == "DENY"
        policy = answer.headers["content-security-policy"]
        assert "frame-ancestors 'none'" in policy
        assert "default-src 'none'" in policy
    rules = dict(rule.split(" ", 1) for rule in CONSOLE_POLICY.split("; "))
    assert rules["script-src"] == "'self'"
    assert rules["require-trusted-types-for"] == "'script'"
    assert rules["trusted-types"] == "'none'"
    assert rules["base-uri"] == rules["form-action"] == "'none'"


def test_guessed_sessions_count_as_failed_logins_and_hold_up_no_good_one(browser: Browser) -> None:
    """The address is limited as for guessed tokens; Ann, at the same address, goes on and others sign in."""
    answers = [browser.call("GET", "/v1/jobs", key=f"guess-{i}").status_code for i in range(int(FREE_FAILURES) + 5)]
    assert answers[0] == 401
    assert answers[-1] == 429
    assert browser.call("GET", "/v1/jobs").status_code == 200
    head = (
        f"GET /v1/jobs HTTP/1.1\r\nhost: testserver\r\nCookie: a=b; {COOKIE}={browser.cookie}\r\n"
        f"Isthmus-Session-Key: {browser.key}\r\n\r\n"
    ).encode()
    gate = browser.server.shell.gate
    gate.registry.refresh()
    assert refusal(gate, "testclient", head) is None, "a flood from its address does not cut a session off"
    assert refusal(gate, "testclient", head.replace(b"Key: ", b"Key: x")) is not None


def test_oversize_forms_are_refused_before_they_are_read(browser: Browser) -> None:
    """A token, a cookie and a body beyond their limits."""
    assert Browser(browser.server).sign_in("x" * MAX_TOKEN_BYTES).status_code == 401
    assert browser.call("GET", "/v1/jobs", cookie="c" * 5000).status_code == 401
    answer = browser.call("POST", "/v1/jobs/x/choose", {"plan": "p" * MAX_SMALL_BODY_BYTES})
    assert answer.status_code == 413
