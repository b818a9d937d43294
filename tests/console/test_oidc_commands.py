"""Sign-in of a command at a provider on loopback: which token it gets, where that is kept, and what gets none."""

from __future__ import annotations

import io
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from isthmus.cli import main
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.control.service.access.console_sessions import SESSION_S
from isthmus.control.service.oidc.device_sign_in import MAX_BEGUN, MAX_TOKENS
from isthmus.core.views.access_views import AuditFilter
from tests.cli.test_catalogue_commands import forwarded
from tests.console.stand_in_provider import StandInProvider
from tests.console.test_oidc import know, provider
from tests.control.conftest import server
from tests.control.test_server_api import Server

__all__ = ["provider", "server"]
pytestmark = pytest.mark.integration


def run(server: Server, folder: Path, *arguments: object, asleep: Callable[[float], None]) -> tuple[int, str]:
    """Run a command line without a token; `asleep` is what happens while it pauses."""
    env = CliEnvironment(
        variables={"ISTHMUS_SERVER": "http://127.0.0.1:1", "XDG_CONFIG_HOME": str(folder), "HOME": str(folder)},
        stdout=io.StringIO(), stderr=io.StringIO(), transport=forwarded(server), now=lambda: server.now_s, sleep=asleep,
    )  # fmt: skip
    status = main([str(one) for one in arguments], env=env)
    return status, env.stdout.getvalue() + env.stderr.getvalue()  # type: ignore[attr-defined]


def begin(server: Server) -> httpx.Response:
    return server.http.post("/v1/oidc/device")


def finish(server: Server, code: str) -> httpx.Response:
    server.now_s += 5
    return server.http.post("/v1/oidc/device/token", json={"device_code": code})


def acts(server: Server) -> list[str]:
    return [one.action for one in server.shell.store.audit(AuditFilter(), limit=100)]


def signed_in(server: Server, provider: StandInProvider) -> dict[str, Any]:
    code = begin(server).json()["device_code"]
    provider.devices[code] = True
    answer = finish(server, code)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_a_person_signs_in_for_the_command_line_and_later_commands_find_the_token(
    server: Server, provider: StandInProvider, tmp_path: Path
) -> None:
    """The command waits for the person; the token's file is its owner's alone, and the context file names it."""
    pauses: list[float] = []

    def asleep(pause_s: float) -> None:
        pauses.append(pause_s)
        server.now_s += pause_s
        if len(pauses) == 3:
            provider.devices = dict.fromkeys(provider.devices, True)

    status, text = run(server, tmp_path, "login", asleep=asleep)
    assert status == 0, text
    assert f"open {provider.issuer}/enter?user_code=WDJB-MJHT and enter the code WDJB-MJHT, within 10 min" in text
    assert "signed in as user ann until" in text
    assert pauses == [5, 5, 5]
    file = tmp_path / "isthmus" / "token"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_text().strip() not in text
    status, text = run(server, tmp_path, "jobs", asleep=asleep)
    assert status == 0, text
    assert acts(server).count("signed-in") == 1


def test_a_command_that_no_person_confirms_ends_with_its_code(
    server: Server, provider: StandInProvider, tmp_path: Path
) -> None:
    """It stops by itself, and pauses longer when the provider asks for that; nothing is written."""
    pauses: list[float] = []

    def asleep(pause_s: float) -> None:
        pauses.append(pause_s)
        server.now_s += pause_s
        provider.answer_as["/token"] = (400, b'{"error": "slow_down"}')

    status, text = run(server, tmp_path, "login", "--save", tmp_path / "t", asleep=asleep)
    assert (status, "the code has expired" in text) == (4, True)
    assert pauses[:3] == [5, 10, 15]
    assert not (tmp_path / "t").exists()


def test_the_token_of_a_command_acts_for_its_person_until_it_ends(server: Server, provider: StandInProvider) -> None:
    """For 12 hours, or until its person has another role, or has signed in often enough since."""
    found = signed_in(server, provider)
    assert (found["role"], found["name"], found["expires_s"]) == ("user", "ann", server.now_s + SESSION_S)
    tokens = [signed_in(server, provider)["token"] for _ in range(MAX_TOKENS)]

    def status(token: str, path: str = "/v1/jobs") -> int:
        return server.http.get(path, headers={"Authorization": f"Bearer {token}"}).status_code

    assert [status(found["token"]), status(tokens[0]), status(tokens[-1])] == [401, 200, 200]
    provider.claims["groups"] = ["operators"]
    admin = signed_in(server, provider)["token"]
    assert (status(admin, "/v1/limits"), status(tokens[-1])) == (200, 401)
    server.now_s += SESSION_S + 1
    assert status(admin) == 401


@pytest.mark.attack
def test_a_code_counts_once_and_only_once_its_person_has_signed_in(server: Server, provider: StandInProvider) -> None:
    """Pending, refused, spent and invented codes give no token; invented ones slow their address down."""
    code = begin(server).json()["device_code"]
    assert finish(server, code).json() == {"token": None, "role": None, "name": None, "expires_s": None,
                                           "slow_down": False}  # fmt: skip
    provider.devices[code] = True
    assert finish(server, code).json()["token"]
    assert finish(server, code).status_code == 403
    refused = begin(server).json()["device_code"]
    provider.devices[refused] = None
    assert finish(server, refused).status_code == 403
    asked = provider.asked.count("/token")
    waiting = begin(server).json()["device_code"]
    server.now_s -= 5
    finish(server, waiting)
    server.now_s -= 5
    assert finish(server, waiting).json()["slow_down"], "asked in the same moment"
    assert provider.asked.count("/token") == asked + 1
    server.until(lambda: "refused" in acts(server))
    statuses = [finish(server, f"guess-{at}").status_code for at in range(60)]
    assert (statuses[0], statuses[-1]) == (403, 429)


@pytest.mark.attack
@pytest.mark.parametrize(
    "change",
    [{"device_code": None}, {"device_code": "a" * 5000}, {"user_code": ""}, {"user_code": 7}, {"expires_in": -1},
     {"expires_in": 10**9}, {"interval": "soon"}, {"verification_uri": "http://evil.example/x"},
     {"verification_uri": "javascript:alert(1)"}, {"verification_uri": None},
     {"verification_uri_complete": "https://u:p@evil.example/"}, {"verification_uri_complete": "https://a/\n\u202e"}],
)  # fmt: skip
def test_a_provider_that_begins_wrongly_sends_no_person_anywhere(
    server: Server, provider: StandInProvider, change: dict[str, Any]
) -> None:
    """The server names what is wrong and passes none of it on."""
    provider.change = change
    answer = begin(server)
    assert answer.status_code == 503, answer.text
    assert "the provider of sign-ins fails" in answer.json()["message"]
    assert "evil" not in answer.text


@pytest.mark.attack
def test_a_token_of_a_browsers_sign_in_is_none_of_a_commands(server: Server, provider: StandInProvider) -> None:
    """A nonce, another client, an old token: refused as for the console."""
    for change in ({"nonce": "n"}, {"aud": "other"}, {"iat": 1, "exp": 2}):
        code = begin(server).json()["device_code"]
        provider.devices[code], provider.change = True, change
        assert finish(server, code).status_code == 403, change
        provider.change = {}


@pytest.mark.attack
def test_begun_sign_ins_are_bounded_and_no_page_begins_one(server: Server, provider: StandInProvider) -> None:
    """The provider is asked at most so often in a minute; pages of other origins never reach it."""
    foreign = server.http.post("/v1/oidc/device", headers={"Origin": "https://evil.example"})
    assert (foreign.status_code, provider.asked.count("/device")) == (403, 0)
    statuses = [begin(server).status_code for _ in range(MAX_BEGUN + 1)]
    assert (statuses[-2:], provider.asked.count("/device")) == ([200, 429], MAX_BEGUN)
    server.now_s += 61
    assert begin(server).status_code == 200


def test_a_pool_or_a_provider_without_sign_ins_of_commands_says_so(
    server: Server, provider: StandInProvider, tmp_path: Path
) -> None:
    """With what to do instead."""
    provider.metadata = {"device_authorization_endpoint": None}
    know(server, provider)
    status, text = run(server, tmp_path, "login", asleep=lambda _: None)
    assert (status, "admits no commands" in text, "sign in with a token" in text) == (5, True, True)
