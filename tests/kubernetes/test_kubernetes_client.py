"""The client of an API server: every answer is bounded, read whole or refused, and says whether the outcome is open."""

from __future__ import annotations

import logging
from collections.abc import Callable

import httpx
import pytest

from isthmus.agent.adapters.kubernetes.api_access import ApiAccess
from isthmus.agent.adapters.kubernetes.kubernetes_client import ExpiredVersionError, KubernetesClient
from isthmus.core.errors import AuthError, ConflictError, InputError, IsthmusError, NotFoundError, UnavailableError
from tests.kubernetes.api_stand_in import ApiStandIn
from tests.kubernetes.samples import NAMESPACE, client_of, filled

PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"


def answering(
    answer: Callable[[httpx.Request], httpx.Response], clock: Callable[[], float] = lambda: 0.0, **limits: int
) -> KubernetesClient:
    """Return a client whose server answers so."""
    access = ApiAccess(server="https://api.example", token="t0ken")
    return KubernetesClient(access, transport=httpx.MockTransport(answer), clock=clock, **limits)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (400, InputError), (401, AuthError), (403, AuthError), (404, NotFoundError), (409, ConflictError),
        (410, ExpiredVersionError), (422, InputError), (429, UnavailableError), (500, UnavailableError),
        (503, UnavailableError), (504, UnavailableError), (302, UnavailableError),
    ],
)  # fmt: skip
def test_each_status_says_whether_the_outcome_is_open(code: int, error: type[IsthmusError]) -> None:
    """Only what leaves the outcome open is `UnavailableError`; the message has the request and what the server says."""
    client = answering(lambda _: httpx.Response(code, json={"kind": "Status", "message": "it is\nso\x1b[1m"}))
    with pytest.raises(error) as found:
        client.get(PODS)
    assert type(found.value) is error
    assert f"GET {PODS}: {code} it is so [1m" in str(found.value)


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b"[]", b"null", b'{"kind": 3}', b"{}", b'{"kind": "PodList"', b"\xff\xfe", b"[" * 100_000],
)
def test_an_answer_that_cannot_be_read_is_never_an_empty_list(body: bytes) -> None:
    """It is an error that names the request and shows nothing of the answer."""
    client = answering(lambda _: httpx.Response(200, content=body))
    with pytest.raises(UnavailableError, match=f"the answer to {PODS} cannot be read"):
        client.get(PODS)


def test_an_answer_without_end_is_cut_off() -> None:
    """No more than the bound is kept of it."""
    sent = []

    def endless():
        while True:
            sent.append(1)
            yield b"x" * 100

    client = answering(lambda _: httpx.Response(200, content=endless()), max_answer_bytes=1000)
    with pytest.raises(UnavailableError, match="more than 1000 bytes"):
        client.get(PODS)
    assert len(sent) < 20


def test_a_server_that_asks_for_rest_gets_it() -> None:
    """After 429 no request is sent before Retry-After has passed, and a huge one is bounded."""
    now, asked = [0.0], []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.method)
        return httpx.Response(429, headers={"Retry-After": "99999999"}, json={"message": "slow down"})

    client = answering(answer, lambda: now[0])
    for _ in range(3):
        with pytest.raises(UnavailableError):
            client.get(PODS)
    assert len(asked) == 1
    now[0] = 61.0
    with pytest.raises(UnavailableError):
        client.get(PODS)
    assert len(asked) == 2


def test_no_secret_is_shown_or_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Neither the token nor anything of a Secret is in an error, a log line or a `repr`."""
    ticket = "dGlja2V0"
    path = f"/api/v1/namespaces/{NAMESPACE}/secrets"
    bodies = [
        httpx.Response(200, content=f'{{"data": {{"0": "{ticket}"}}'.encode()),
        httpx.Response(422, json={"kind": "Status", "message": f"invalid value {ticket}"}),
        httpx.Response(409, json={"kind": "Status", "message": f"{ticket} exists"}),
    ]
    for body in bodies:
        client = answering(lambda _, body=body: body)
        with caplog.at_level(logging.DEBUG), pytest.raises(IsthmusError) as found:
            client.create(path, {"data": {"0": ticket}})
        text = f"{found.value!r} {found.value} {caplog.text} {client.access!r}"
        assert ticket not in text
        assert "t0ken" not in text


def test_a_reply_that_is_lost_leaves_the_outcome_open() -> None:
    """The object may be there: asking again meets it as a conflict."""
    server = filled(ApiStandIn())
    client = client_of(server)
    body = {"metadata": {"name": "one"}, "type": "Opaque"}
    server.lose_replies(1)
    with pytest.raises(UnavailableError, match="no answer"):
        client.create(f"/api/v1/namespaces/{NAMESPACE}/secrets", body)
    with pytest.raises(ConflictError):
        client.create(f"/api/v1/namespaces/{NAMESPACE}/secrets", body)
    assert client.delete(f"/api/v1/namespaces/{NAMESPACE}/secrets/one")
    assert not client.delete(f"/api/v1/namespaces/{NAMESPACE}/secrets/one")
