"""What a request passes before anything of it is read."""

from __future__ import annotations

import asyncio

import pytest

from isthmus.control.rest.middleware import TokenMiddleware
from isthmus.control.service.access.audit_log import AuditLog
from isthmus.control.service.access.token_gate import TokenGate
from isthmus.control.service.access.token_registry import STALE_S, TokenRegistry
from isthmus.control.service.auth import Caller, token_digest
from isthmus.control.store.store_interface import MemoryStore, StoredToken


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

    store = MemoryStore()
    store.put_token(StoredToken(role="user", name="ann", digest=token_digest("good"), created_s=0))
    gate = TokenGate(TokenRegistry(store, lambda: 1.0))
    headers = [(b"authorization", f"Bearer {token}".encode())] if token else []
    scope = {"type": "http", "path": path, "headers": headers, "method": "POST"}
    asyncio.run(TokenMiddleware(app, gate=gate, audit=AuditLog(store))(scope, receive, send))
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


class Counting(MemoryStore):
    """A store that counts how often it is asked for a token."""

    num_asked = 0

    def find_token(self, digest: str) -> StoredToken | None:
        self.num_asked += 1
        return super().find_token(digest)


def test_a_known_token_needs_no_store_while_the_store_answers() -> None:
    """The registry follows the store; once the store has not answered for a while, each request asks it again."""
    store, now_s = Counting(), [0.0]
    store.put_token(StoredToken(role="user", name="ann", digest=token_digest("good"), created_s=0))
    registry = TokenRegistry(store, lambda: 1.0, lambda: now_s[0])
    gate = TokenGate(registry, lambda: now_s[0])
    assert gate.known(b"Bearer good") is None, "nothing was read yet"
    registry.refresh()
    assert gate.known(b"Bearer good") == Caller(role="user", name="ann")
    assert store.num_asked == 0
    now_s[0] = STALE_S
    assert gate.known(b"Bearer good") is None
    assert gate.look_up(b"Bearer good", "10.0.0.1").name == "ann"
    assert store.num_asked == 1
