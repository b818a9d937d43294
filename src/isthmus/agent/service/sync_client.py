"""The agent's client of the sync endpoint: sends a report, receives orders."""

from __future__ import annotations

import json
import ssl
from pathlib import Path
from typing import Any

import httpx
from pydantic import ValidationError

from isthmus.core.catalogue import CopyKey, FileManifest
from isthmus.core.errors import (
    AuthError,
    ConflictError,
    InputError,
    IsthmusError,
    NotFoundError,
    ProtocolError,
    TooLargeError,
    UnavailableError,
)
from isthmus.core.messages.agent_messages import PROTOCOL_VERSION, AgentOrders, AgentReport, protocol_version_of

_TIMEOUT_S = 5.0
_ERRORS: dict[int, type[IsthmusError]] = {
    401: AuthError,
    403: AuthError,
    404: NotFoundError,
    409: ConflictError,
    413: TooLargeError,
    422: InputError,
    426: ProtocolError,
}


class SyncClient:
    """HTTP client of the server. `ca` is a certificate file to trust instead of the system's, `transport` for tests."""

    def __init__(
        self, server: str, token: str, cluster: str, ca: Path | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:  # fmt: skip
        try:
            verify = ssl.create_default_context(cafile=str(ca) if ca else None)
        except OSError as error:
            raise InputError(f"cannot load certificate file {ca}: {error.strerror or error}") from error
        self._path, self._versions = f"/v1/agents/{cluster}/sync", f"/v1/agents/{cluster}/versions"
        self._left, self._key = f"/v1/agents/{cluster}/left", f"/v1/agents/{cluster}/key"
        self._server = server
        self._client = httpx.Client(
            base_url=server,
            headers={"Authorization": f"Bearer {token}"},
            timeout=_TIMEOUT_S,
            verify=verify,
            trust_env=False,
            transport=transport,
        )

    def __enter__(self) -> SyncClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def sync(self, report: AgentReport) -> AgentOrders:
        """Send `report` and return the orders.

        Raises `UnavailableError` if the server is unreachable or overloaded, `ProtocolError` if its version
        differs, and the server's own `AuthError`, `ConflictError` or `InputError`.
        """
        body = self._exchange("POST", self._path, report.model_dump_json(by_alias=True))
        if protocol_version_of(body) != PROTOCOL_VERSION:
            raise ProtocolError(
                f"{self._server} uses protocol {protocol_version_of(body)}, this agent {PROTOCOL_VERSION}",
                hint="use the same release of agent and server; the workers of this site keep running",
            )
        try:
            return AgentOrders.model_validate(body)
        except ValidationError as error:
            raise ProtocolError(f"malformed orders: {error.errors()[0]['msg']}") from error

    def renew_key(self, digest: str) -> None:
        """Have the next key of this agent accepted, by its SHA-256; raises like `sync`."""
        self._exchange("POST", self._key, json.dumps({"key": digest}))

    def use_token(self, token: str) -> None:
        """Send `token` with every request from now on."""
        self._client.headers["Authorization"] = f"Bearer {token}"

    def leave(self) -> None:
        """Report that this agent has ended for good; raises like `sync`."""
        self._exchange("POST", self._left, "{}")

    def manifest(self, key: CopyKey) -> FileManifest:
        """Return the files of a version that a part of this site needs, as its digest says.

        Raises `UnavailableError` if the server is unreachable or sends something else, `NotFoundError` if no part here
        needs the version any more.
        """
        body = self._exchange("GET", f"{self._versions}/{key.owner}/{key.version}")
        try:
            found = FileManifest.model_validate(body)
        except ValidationError as error:
            raise UnavailableError(f"{self._server} sent a malformed manifest") from error
        if found.version != key.version:
            raise UnavailableError(f"{self._server} sent the manifest of another version than {key}")
        return found

    def _exchange(self, method: str, path: str, content: str | None = None) -> dict[str, Any]:
        """Send a request; return the object in its response, or raise the server's error."""
        head = {"Content-Type": "application/json"} if content is not None else {}
        try:
            answer = self._client.request(method, path, content=content, headers=head)
            body = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise UnavailableError(f"no valid response from {self._server}: {error}") from error
        if not isinstance(body, dict):
            raise UnavailableError(f"{self._server} sent a malformed response")
        if answer.status_code != httpx.codes.OK:
            kind = _ERRORS.get(answer.status_code, UnavailableError)
            raise kind(str(body.get("message", answer.reason_phrase)), hint=body.get("hint"))
        return body
