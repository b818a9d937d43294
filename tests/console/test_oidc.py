"""Sign-in by OpenID Connect against a provider on loopback: who gets which session, and what gets none."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from joserfc import jwt
from joserfc.jwk import ECKey, OctKey, RSAKey

from isthmus.control.service.access.console_sessions import SESSION_S
from isthmus.control.service.oidc.device_sign_in import DeviceSignIn
from isthmus.control.service.oidc.oidc_provider import MAX_ANSWER_BYTES, OidcProvider
from isthmus.control.service.oidc.oidc_sign_in import OidcSignIn
from isthmus.core.errors import FileError
from isthmus.core.files.user_files import load_oidc
from isthmus.core.owner.oidc_file import OidcFile
from isthmus.core.views.access_views import AuditFilter
from tests.console.browser_like import SAME_ORIGIN, Browser
from tests.console.stand_in_provider import REDIRECT, StandInProvider, running_provider
from tests.control.conftest import server
from tests.control.test_server_api import Server

__all__ = ["server"]
pytestmark = pytest.mark.integration
RULES = [
    {"claim": "groups", "value": "operators", "role": "admin"},
    {"claim": "groups", "value": "east", "role": "owner", "name": "owner-east"},
    {"claim": "groups", "value": "researchers", "role": "user"},
]
COOKIE = "isthmus-sign-in"


@pytest.fixture
def provider(server: Server) -> Iterator[StandInProvider]:
    """A provider that `server` knows; its clock is that of the server."""
    with running_provider(lambda: server.now_s) as found:
        know(server, found)
        yield found


def know(server: Server, provider: StandInProvider) -> None:
    """Let the server know a provider, and nothing of its keys yet."""
    file = OidcFile.model_validate(
        {"issuer": provider.issuer, "client_id": "isthmus", "redirect_url": REDIRECT, "rules": RULES}
    )
    shell, asked = server.shell, OidcProvider(file, provider.secret)
    shell.oidc = OidcSignIn(asked, shell.sessions, shell.gate.registry, shell.audit, shell.clock)
    shell.device_oidc = DeviceSignIn(asked, shell.gate.registry, shell.audit, shell.clock)


def begin(server: Server, **headers: str) -> tuple[str, str]:
    """Begin a sign-in as a page of the console does; return the seed of the browser and the address to open."""
    answer = server.http.post("/v1/oidc/begin", headers=SAME_ORIGIN | headers)
    server.http.cookies.clear()
    assert answer.status_code == 200, answer.text
    return answer.cookies[COOKIE], answer.json()["url"]


def finish(server: Server, seed: str, code: str, state: str, **headers: str) -> httpx.Response:
    cookie = {"Cookie": f"{COOKIE}={seed}"} if seed else {}
    body = {"code": code, "state": state}
    answer = server.http.post("/v1/oidc/session", json=body, headers=SAME_ORIGIN | cookie | headers)
    server.http.cookies.clear()
    return answer


def sign_in(server: Server, provider: StandInProvider) -> httpx.Response:
    seed, url = begin(server)
    return finish(server, seed, *provider.sign_in(url))


def browser_of(server: Server, answer: httpx.Response) -> Browser:
    assert answer.status_code == 201, answer.text
    browser = Browser(server)
    browser.cookie, browser.key = answer.cookies["isthmus-session"], answer.json()["key"]
    return browser


@pytest.mark.parametrize(
    ("groups", "found"),
    [
        (["researchers"], ("user", "ann")),
        (["x", "operators", "researchers"], ("admin", "ann")),
        (["east"], ("owner", "owner-east")),
        ("researchers", ("user", "ann")),
    ],
)
def test_a_person_gets_the_role_of_the_first_rule_that_fits(
    server: Server, provider: StandInProvider, groups: Any, found: tuple[str, str]
) -> None:
    """The session acts as a token of that role and name does."""
    provider.claims["groups"] = groups
    browser = browser_of(server, sign_in(server, provider))
    session = browser.call("GET", "/v1/session").json()
    assert ((session["role"], session["name"]), session["expires_s"]) == (found, server.now_s + SESSION_S)
    assert browser.call("GET", "/v1/limits").status_code == (200 if found[0] == "admin" else 403)


def test_one_token_carries_all_sessions_of_a_person_and_ends_them(server: Server, provider: StandInProvider) -> None:
    """`isthmus token list` shows it; revoked, it ends the sessions; another role of the person does as well."""
    first, second = (browser_of(server, sign_in(server, provider)) for _ in range(2))
    mine = [
        one for one in server.call("GET", "/v1/tokens", token="root").json() if one["created_by"].startswith("oidc")
    ]
    assert [(one["role"], one["name"]) for one in mine] == [("user", "ann")]
    assert server.call("POST", f"/v1/tokens/{mine[0]['id']}/revoke", token="root").status_code == 200
    assert [one.call("GET", "/v1/jobs").status_code for one in (first, second)] == [401, 401]
    third = browser_of(server, sign_in(server, provider))
    provider.claims["groups"] = ["operators"]
    assert browser_of(server, sign_in(server, provider)).call("GET", "/v1/limits").status_code == 200
    assert third.call("GET", "/v1/jobs").status_code == 401


def test_a_person_without_a_rule_or_a_usable_name_is_refused(server: Server, provider: StandInProvider) -> None:
    """With what the operator has to do; nothing is stored."""
    before = len(server.store.tokens())
    provider.claims["groups"] = ["guests"]
    assert "admits none of your groups" in sign_in(server, provider).json()["message"]
    provider.claims |= {"groups": ["researchers"], "preferred_username": "ann b <x>"}
    assert "is no name of a user" in sign_in(server, provider).json()["message"]
    assert len(server.store.tokens()) == before


def test_a_new_key_of_the_provider_is_asked_for_once(server: Server, provider: StandInProvider) -> None:
    """Providers change keys; a token of an unknown one makes the server ask again, but not at each request."""
    assert sign_in(server, provider).status_code == 201
    provider.key = ECKey.generate_key("P-256", {"kid": "k2", "use": "sig"}, private=True)
    assert sign_in(server, provider).status_code == 403, "asked just before"
    know(server, provider)
    assert sign_in(server, provider).status_code == 201
    assert provider.asked.count("/keys") == 2


@pytest.mark.attack
@pytest.mark.parametrize(
    "change",
    [
        {"iss": "https://evil.example"},
        {"aud": "another"},
        {"aud": ["isthmus", "another"]},
        {"aud": ["isthmus", "another"], "azp": "another"},
        {"azp": "another"},
        {"aud": None},
        {"nonce": "0" * 43},
        {"nonce": None},
        {"exp": 0},
        {"exp": None},
        {"exp": "9999999999"},
        {"exp": True},
        {"iat": None},
        {"iat": 10**12},
        {"nbf": 10**12},
        {"sub": ""},
        {"sub": None},
        {"sub": 7},
        {"groups": None},
        {"groups": {"researchers": 1}},
        {"preferred_username": ["ann"]},
    ],
    ids=json.dumps,
)
def test_a_token_that_is_not_of_this_sign_in_is_refused(
    server: Server, provider: StandInProvider, change: dict[str, Any]
) -> None:
    """Each claim that binds it: issuer, client, nonce, times, person; signed by the right key."""
    provider.change = change
    answer = sign_in(server, provider)
    assert answer.status_code == 403, answer.text
    assert "isthmus-session" not in answer.cookies


def _unsigned(token: str) -> str:
    head = base64.urlsafe_b64encode(b'{"alg":"none"}').rstrip(b"=").decode()
    return f"{head}.{token.split('.')[1]}."


def _claims(token: str) -> dict[str, Any]:
    part = token.split(".")[1]
    found: dict[str, Any] = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    return found


@pytest.mark.attack
@pytest.mark.parametrize("forgery", ["none", "hmac", "other key", "own key in the header", "cut", "no token", "long"])
def test_a_token_without_a_signature_of_the_provider_is_refused(
    server: Server, provider: StandInProvider, forgery: str
) -> None:
    """No algorithm `none`, no HMAC with the public key, no key of the header (RFC 8725)."""
    public = json.dumps(provider.key.as_dict(private=False))
    other = RSAKey.generate_key(2048, {"kid": "k1"}, private=True)
    forged = {
        "none": _unsigned,
        "hmac": lambda token: jwt.encode({"alg": "HS256", "kid": "k1"}, _claims(token), OctKey.import_key(public)),
        "other key": lambda token: jwt.encode({"alg": "RS256", "kid": "k1"}, _claims(token), other),
        "own key in the header": lambda token: jwt.encode(
            {"alg": "RS256", "jwk": other.as_dict(private=False)}, _claims(token), other
        ),
        "cut": lambda token: token[:-8],
        "no token": lambda _: "a.b",
        "long": lambda token: token + "A" * 40_000,
    }
    provider.token = forged[forgery]
    answer = sign_in(server, provider)
    assert answer.status_code == 403, answer.text
    assert "identity token is refused" in answer.json()["message"]


@pytest.mark.attack
def test_an_answer_counts_once_and_only_in_the_browser_that_asked(server: Server, provider: StandInProvider) -> None:
    """Not with the seed of another sign-in, without one, or with a changed state; a code not twice."""
    seed, url = begin(server)
    code, state = provider.sign_in(url)
    other, _ = begin(server)
    for wrong in (
        finish(server, other, code, state), finish(server, "", code, state), finish(server, "a" * 5000, code, state),
        finish(server, seed, code, state[:-1] + "x"),
    ):  # fmt: skip
        assert wrong.status_code == 403
        assert "no sign-in of this browser" in wrong.json()["message"]
    assert "/token" not in provider.asked, "nothing is sent to the provider for a forged answer"
    assert finish(server, seed, code, state).status_code == 201
    again = finish(server, seed, code, state)
    assert (again.status_code, "refuses the sign-in" in again.json()["message"]) == (403, True)


@pytest.mark.attack
def test_a_stolen_code_is_worth_nothing_in_another_sign_in(server: Server, provider: StandInProvider) -> None:
    """Its verifier is that of the browser that asked (PKCE)."""
    code, _ = provider.sign_in(begin(server)[1])
    seed, url = begin(server)
    _, state = provider.sign_in(url)
    assert finish(server, seed, code, state).status_code == 403


@pytest.mark.attack
def test_a_page_of_another_origin_neither_begins_nor_finishes_a_sign_in(
    server: Server, provider: StandInProvider
) -> None:
    """Else it could sign a victim in as the attacker."""
    for path in ("/v1/oidc/begin", "/v1/oidc/session"):
        for headers in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
            answer = server.http.post(path, json={"code": "c", "state": "s"}, headers=SAME_ORIGIN | headers)
            assert answer.status_code == 403, (path, headers)
    assert not provider.asked


@pytest.mark.attack
@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/.well-known/openid-configuration", (200, b'{"issuer": "https://evil.example"}')),
        ("/.well-known/openid-configuration", (200, b"[" * 100_000)),
        ("/.well-known/openid-configuration", (302, b"")),
        ("/.well-known/openid-configuration", (500, b"no")),
        ("/token", (200, b" " * (MAX_ANSWER_BYTES + 1))),
        ("/token", (200, b"[]")),
        ("/token", (200, b"{}")),
        ("/keys", (200, b'{"keys": []}')),
        ("/keys", (200, b'{"keys": [{"kty": "oct", "k": "AAAA"}, {"kty": "RSA"}]}')),
    ],
    ids=lambda one: str(one)[:40],
)
def test_a_provider_that_answers_wrongly_signs_no_person_in(
    server: Server, provider: StandInProvider, path: str, answer: tuple[int, bytes]
) -> None:
    """With an error that says what it did; never followed elsewhere, never read without bound."""
    provider.answer_as[path] = answer
    begun = server.http.post("/v1/oidc/begin", headers=SAME_ORIGIN)
    server.http.cookies.clear()
    if path.startswith("/.well"):
        assert (begun.status_code, "provider of sign-ins fails" in begun.json()["message"]) == (503, True), begun.text
        return
    code, state = provider.sign_in(begun.json()["url"])
    found = finish(server, begun.cookies[COOKIE], code, state)
    assert found.status_code in (403, 503), found.text


@pytest.mark.attack
@pytest.mark.parametrize("endpoint", ["http://evil.example/token", "ftp://x/y", "https://u:p@evil.example/", 7, None])
def test_a_description_with_an_unsafe_address_is_refused(
    server: Server, provider: StandInProvider, endpoint: object
) -> None:
    """The client's secret goes to https addresses alone, but for loopback."""
    provider.metadata = {"token_endpoint": endpoint}
    answer = server.http.post("/v1/oidc/begin", headers=SAME_ORIGIN)
    assert (answer.status_code, "token_endpoint" in answer.json()["message"]) == (503, True)


@pytest.mark.attack
def test_a_wrong_secret_of_this_server_is_said_to_no_stranger(server: Server, provider: StandInProvider) -> None:
    """The answer is that of any refusal."""
    provider.secret = "another"
    answer = sign_in(server, provider)
    assert (answer.status_code, "s3cret" in answer.text) == (403, False)


@pytest.mark.attack
def test_refused_answers_slow_an_address_down_and_are_audited(server: Server, provider: StandInProvider) -> None:
    """As wrong tokens do."""
    statuses = {finish(server, "x", "c", "s").status_code for _ in range(60)}
    assert statuses == {403, 429}
    server.until(lambda: any(one.subject == "oidc" for one in server.shell.store.audit(AuditFilter(), limit=100)))


def test_a_pool_without_a_provider_says_so(server: Server) -> None:
    """The page then asks for a token only."""
    assert server.http.get("/v1/oidc").json() == {"issuer": None}
    assert server.http.post("/v1/oidc/begin", headers=SAME_ORIGIN).status_code == 404


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("https://id.example.org", "http://id.example.org", "no https address"),
        ("/console/", "/elsewhere", "ends with /console/"),
        ("scopes: [openid, profile]", "scopes: [profile]", "scopes contain openid"),
        ("role: user", "role: owner", "needs the `name`"),
        ("role: user", "role: root", "'root'"),
    ],
)
def test_a_file_of_a_provider_that_cannot_work_is_refused(tmp_path: Any, old: str, new: str, said: str) -> None:
    """With the line and the reason."""
    text = (
        "issuer: https://id.example.org\nclient_id: isthmus\nredirect_url: https://pool.example.org/console/\n"
        "scopes: [openid, profile]\nrules:\n  - {claim: groups, value: all, role: user}\n"
    )
    file = tmp_path / "oidc.yaml"
    file.write_text(text)
    assert load_oidc(file).client_id == "isthmus"
    file.write_text(text.replace(old, new))
    with pytest.raises(FileError) as error:
        load_oidc(file)
    assert said in str(error.value)
