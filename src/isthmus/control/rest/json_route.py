"""`JsonRoute`: parses a request body once, from bytes directly into its model.

FastAPI parses bytes into dictionaries and these into a model, all in the event loop. Here pydantic parses the
bytes itself, and a large body is parsed in a thread so that it does not block other requests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.concurrency import run_in_threadpool

THREAD_PARSE_BYTES = 64 * 1024
"""Body size from which on a thread parses it; parsing this size takes about 1 ms."""


class JsonRoute(APIRoute):
    """A route that passes its body to FastAPI as a parsed model."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, wrapped so that requests parse their bodies themselves."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        kind: Any = self.body_field.field_info.annotation
        model = TypeAdapter(kind)

        async def handle_read(request: Request) -> Response:
            return await handle(_ModelRequest(request, model))

        return handle_read


class _ModelRequest(Request):
    def __init__(self, request: Request, model: TypeAdapter[Any]) -> None:
        super().__init__(request.scope, request.receive)
        self._model = model

    async def json(self) -> Any:
        """Return the body as its model, or as plain data if invalid, so that FastAPI reports the errors."""
        body = await self.body()
        if len(body) < THREAD_PARSE_BYTES:
            return self._parse(body)
        return await run_in_threadpool(self._parse, body)

    def _parse(self, body: bytes) -> Any:
        try:
            return self._model.validate_json(body)
        except ValidationError:
            return json.loads(body)
