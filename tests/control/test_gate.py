"""What a request passes before anything of it is read."""

from __future__ import annotations

import asyncio

import pytest

from isthmus.control.rest.middleware import TOKEN_CACHE_S, TokenMiddleware
from isthmus.control.service.auth import Caller, UnknownCallerError


class Reached(Exception):  # noqa: N818 - it is what happens, not an error
    """The application behind the gate was called."""


def pass_through(path: str, token: str | None) -> list[int]:
    """Send the head of a request; return the statuses answered. Its body must not be asked for."""
    answered: list[int] = []

    async def app(scope, receive, send):  # type: ignore[no-untyped-def]
        raise Reached(scope.get("state", {}).get("caller"))

    async def receive():  # type: ignore[no-untyped-def]
        raise AssertionError("the body was read")

    async def send(message):  # type: ignore[no-untyped-def]
        if message["type"] == "http.response.start":
            answered.append(message["status"])

    def identify(header: str | None) -> Caller:
        if header != "Bearer good":
            raise UnknownCallerError
        return Caller(role="user", name="ann")

    headers = [(b"authorization", f"Bearer {token}".encode())] if token else []
    scope = {"type": "http", "path": path, "headers": headers, "method": "POST"}
    asyncio.run(TokenMiddleware(app, identify=identify)(scope, receive, send))
    return answered


@pytest.mark.parametrize("token", [None, "bad"])
@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/agents/east/sync", "/v1/nothing"])
def test_without_a_token_no_byte_of_a_body_is_read(path: str, token: str | None) -> None:
    """A stranger's body costs nothing: 401 comes before it is asked for."""
    assert pass_through(path, token) == [401]


def test_who_is_known_comes_in_by_name() -> None:
    """The application finds the caller in the request's state."""
    with pytest.raises(Reached) as caught:
        pass_through("/v1/jobs", "good")
    assert caught.value.args == (Caller(role="user", name="ann"),)


def test_health_needs_no_token() -> None:
    """A client without a token may ask whether the server is there."""
    with pytest.raises(Reached):
        pass_through("/v1/health", None)


def test_a_known_token_is_looked_up_again_only_after_a_while() -> None:
    """The store is asked once in `TOKEN_CACHE_S`; of strangers always."""
    asked: list[str | None] = []
    now_s = [0.0]
    known = {"Bearer good"}

    def identify(header: str | None) -> Caller:
        asked.append(header)
        if header not in known:
            raise UnknownCallerError
        return Caller(role="user", name="ann")

    async def app(scope, receive, send):  # type: ignore[no-untyped-def]
        return

    async def drop(_message):  # type: ignore[no-untyped-def]
        return

    gate = TokenMiddleware(app, identify=identify, clock=lambda: now_s[0])

    def come(token: str) -> None:
        headers = [(b"authorization", f"Bearer {token}".encode())]
        scope = {"type": "http", "path": "/v1/jobs", "headers": headers, "method": "GET"}
        asyncio.run(gate(scope, None, drop))  # type: ignore[arg-type]

    for token in ("good", "good", "bad", "bad"):
        come(token)
    assert asked == ["Bearer good", "Bearer bad", "Bearer bad"]
    known.clear()
    now_s[0] = TOKEN_CACHE_S
    come("good")
    assert asked[3:] == ["Bearer good"]
