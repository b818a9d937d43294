"""`KubernetesClient`: bounded requests to an API server; a failure says whether the outcome is open."""

from __future__ import annotations

import json
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx

from isthmus.agent.adapters.kubernetes.api_access import ApiAccess
from isthmus.core.errors import AuthError, ConflictError, InputError, NotFoundError, UnavailableError

MAX_ANSWER_BYTES = 64 << 20
MAX_EVENT_BYTES = 4 << 20
"""An object of an API server has 1.5 MiB at most, that is etcd's limit of a request."""

_MAX_REST_S = 60.0
_MAX_SHOWN = 300
_MERGE_PATCH = "application/merge-patch+json"
_WATCH_SPARE_S = 15.0


class ExpiredVersionError(UnavailableError):
    """The API server has forgotten the version of a list (410): only a full list helps."""


class KubernetesClient:
    """Requests to one API server. `transport` and `clock` are given by tests.

    409 is `ConflictError`, 404 `NotFoundError`, 403 `AuthError`, 422 `InputError`; whatever leaves the outcome open is
    `UnavailableError`: no answer, 429, 5xx, and an answer that cannot be read. While the server asks for rest (429 with
    Retry-After) requests fail here, without being sent.
    """

    def __init__(
        self,
        access: ApiAccess,
        *,
        timeout_s: float = 10.0,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
        transport: httpx.BaseTransport | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.access, self.timeout_s, self._clock = access, timeout_s, clock
        self._max_answer_bytes = max_answer_bytes
        verify = access.tls if access.tls is not None else True
        self._http = httpx.Client(
            base_url=access.server, timeout=timeout_s, transport=transport, verify=verify, trust_env=False
        )  # fmt: skip
        weakref.finalize(self, self._http.close)
        self._rests_until_s = 0.0
        self._lock = threading.Lock()

    def get(self, path: str, **query: str | int) -> dict[str, Any]:
        """Return an object or a list."""
        return self._request("GET", path, query=query)

    def get_version(self) -> tuple[int, int]:
        """Return the version of the API server, such as (1, 30)."""
        answer = self._request("GET", "/version", has_kind=False)
        numbers = [re.match(r"\d{1,4}", str(answer.get(name, ""))) for name in ("major", "minor")]
        if numbers[0] is None or numbers[1] is None:
            raise UnavailableError("the answer to /version cannot be read: no version of Kubernetes")
        return int(numbers[0][0]), int(numbers[1][0])

    def create(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Create an object in the collection `path`; `ConflictError` if its name is taken."""
        return self._request("POST", path, body=body)

    def patch(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Merge `body` into an object."""
        return self._request("PATCH", path, body=body, content_type=_MERGE_PATCH)

    def delete(self, path: str, *, grace_s: int | None = None) -> bool:
        """Delete an object and, later, what it owns; return whether there was one."""
        body: dict[str, Any] = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        try:
            self._request("DELETE", path, body=body if grace_s is None else {**body, "gracePeriodSeconds": grace_s})
        except NotFoundError:
            return False
        return True

    @contextmanager
    def watch(self, path: str, version: str, limit_s: float) -> Iterator[tuple[Iterator[bytes], Callable[[], None]]]:
        """Yield the lines of a watch from `version` on, which ends after `limit_s`, and a function that ends it."""
        query: dict[str, str | int] = {
            "watch": "1", "resourceVersion": version, "allowWatchBookmarks": "true", "timeoutSeconds": int(limit_s)
        }  # fmt: skip
        timeout = httpx.Timeout(self.timeout_s, read=limit_s + _WATCH_SPARE_S)
        request = self._http.build_request("GET", path, params=query, headers=self.access.headers(), timeout=timeout)
        try:
            response = self._http.send(request, stream=True)
        except httpx.HTTPError as error:
            raise _no_answer(self.access.server, error) from error
        try:
            if response.status_code != httpx.codes.OK:
                self._raise_status("GET", path, response, self._read(response, path))
            yield _lines(response, path), lambda: _cut(response)
        except httpx.HTTPError as error:
            raise _no_answer(self.access.server, error) from error
        finally:
            response.close()

    def _request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str | int] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
        has_kind: bool = True,
    ) -> dict[str, Any]:
        with self._lock:
            left_s = self._rests_until_s - self._clock()
        if left_s > 0:
            raise UnavailableError(f"the API server {self.access.server} asked for rest, {left_s:.0f} s more")
        content = None if body is None else json.dumps(body).encode()
        headers = {**self.access.headers(), "Accept": "application/json", "Content-Type": content_type}
        try:
            with self._http.stream(method, path, params=query, content=content, headers=headers) as response:
                data = self._read(response, path)
        except httpx.HTTPError as error:
            raise _no_answer(self.access.server, error) from error
        if not response.is_success:
            self._raise_status(method, path, response, data)
        return _object_of(data, path, has_kind=has_kind)

    def _read(self, response: httpx.Response, path: str) -> bytes:
        data = bytearray()
        for chunk in response.iter_bytes():
            data += chunk
            if len(data) > self._max_answer_bytes:
                raise UnavailableError(f"the answer to {path} has more than {self._max_answer_bytes} bytes")
        return bytes(data)

    def _raise_status(self, method: str, path: str, response: httpx.Response, data: bytes) -> None:
        code = response.status_code
        text = f"{method} {path}: {code} {_status_message(path, data)}"
        if code == httpx.codes.TOO_MANY_REQUESTS:
            with self._lock:
                self._rests_until_s = self._clock() + _retry_after_s(response)
        if code == httpx.codes.UNAUTHORIZED:
            raise AuthError(f"{self.access.server} does not know this agent: {text}", hint="renew its token")
        if code == httpx.codes.FORBIDDEN:
            raise AuthError(text, hint="give the agent this right: deploy/kubernetes has the role")
        if code == httpx.codes.NOT_FOUND:
            raise NotFoundError(text)
        if code == httpx.codes.CONFLICT:
            raise ConflictError(text)
        if code == httpx.codes.GONE:
            raise ExpiredVersionError(text)
        if code in (httpx.codes.BAD_REQUEST, httpx.codes.UNPROCESSABLE_ENTITY):
            raise InputError(text)
        raise UnavailableError(text)


def _object_of(data: bytes, path: str, *, has_kind: bool) -> dict[str, Any]:
    """Return the object of an answer, whose text is shown nowhere: it may be a Secret's."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UnavailableError(f"the answer to {path} cannot be read: no JSON, {len(data)} bytes") from error
    if not isinstance(found, dict) or (has_kind and not isinstance(found.get("kind"), str)):
        raise UnavailableError(f"the answer to {path} cannot be read: no object of a kind")
    return found


def _status_message(path: str, data: bytes) -> str:
    """Return what a `Status` says, without line ends; nothing for Secrets."""
    if "/secrets" in path:
        return "(a Secret)"
    try:
        found = json.loads(data)
        text = str(found["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return "without a message"
    return " ".join("".join(one if one.isprintable() else " " for one in text).split())[:_MAX_SHOWN]


def _retry_after_s(response: httpx.Response) -> float:
    text = response.headers.get("Retry-After", "")
    return min(float(text), _MAX_REST_S) if text.isdecimal() else 1.0


def _lines(response: httpx.Response, path: str) -> Iterator[bytes]:
    """Yield whole lines; an unfinished one at the end is dropped, as its event will come again."""
    rest = b""
    for chunk in response.iter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > MAX_EVENT_BYTES:
            raise UnavailableError(f"an event of {path} has more than {MAX_EVENT_BYTES} bytes")
        yield from lines


def _cut(response: httpx.Response) -> None:
    """End a response that another thread reads."""
    stream = response.extensions.get("network_stream")
    socket = stream.get_extra_info("socket") if stream is not None else None
    if socket is not None:
        try:
            socket.shutdown(2)
        except OSError:
            return


def _no_answer(server: str, error: httpx.HTTPError) -> UnavailableError:
    text = " ".join(str(error).split())[:_MAX_SHOWN]
    return UnavailableError(f"no answer from the API server {server}: {type(error).__name__} {text}".rstrip())
