"""`HttpService`: a service that answers a JSON object to one, in time and in few bytes; it follows no redirect."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from isthmus.core.errors import DataError
from isthmus.rl.rewards.function_process import FunctionKind

MAX_ANSWER_BYTES = 1 << 16


class HttpService:
    """Posts to `url`; what fails is an `error` whose hint is `form`, the answer that is expected."""

    def __init__(
        self, url: str, kind: FunctionKind, timeout_s: float, error: type[DataError], form: str, *,
        transport: httpx.BaseTransport | None = None, max_bytes: int = MAX_ANSWER_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._url, self._kind, self._timeout_s, self._error, self._form = url, kind, timeout_s, error, form
        self._max_bytes, self._clock = max_bytes, clock
        self._client = httpx.Client(timeout=timeout_s, transport=transport, follow_redirects=False)

    def call(self, body: Mapping[str, Any], field: str) -> Any:
        """Return `field` of the answer; raises the error for a service that fails or takes longer than `timeout_s`."""
        try:
            deadline_s = self._clock() + self._timeout_s
            with self._client.stream("POST", self._url, json=body) as reply:
                reply.raise_for_status()
                content = b""
                for piece in reply.iter_bytes():
                    content += piece
                    if len(content) > self._max_bytes:
                        raise self._error(f"{self._url} answered more than {self._max_bytes} bytes", hint=self._form)
                    if self._clock() > deadline_s:
                        raise httpx.ReadTimeout("the answer comes too slowly")
            return httpx.Response(200, content=content).json()[field]
        except httpx.TimeoutException as error:
            hint = f"set timeout_s of the {self._kind}, or make the service faster"
            raise self._error(f"{self._url} took longer than {self._timeout_s:g} s", hint=hint) from error
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise self._error(f"{self._url} gave no {self._kind}: {reason}", hint=self._form) from error

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
