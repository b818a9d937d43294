"""`JsonRoute`: a request's body is read once, from its bytes straight into its model.

FastAPI makes dictionaries of the bytes and then a model of these, all in the event loop. Here pydantic reads
the bytes itself, and a large body is read in a thread, so that nobody else waits for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.concurrency import run_in_threadpool

LARGE_BYTES = 64 * 1024
"""From this size on a body is read in a thread: it takes about a millisecond."""


class JsonRoute(APIRoute):
    """A route whose body, where it has one, is handed to FastAPI as the model that it is to be."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, given requests that read their bodies themselves."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        kind: Any = self.body_field.field_info.annotation
        model = TypeAdapter(kind)

        async def handle_read(request: Request) -> Response:
            return await handle(_ReadOnce(request, model))

        return handle_read


class _ReadOnce(Request):
    def __init__(self, request: Request, model: TypeAdapter[Any]) -> None:
        super().__init__(request.scope, request.receive)
        self._model = model

    async def json(self) -> Any:
        """Return the body as its model; where it is none, as plain data, of which FastAPI says why."""
        body = await self.body()
        if len(body) < LARGE_BYTES:
            return self._read(body)
        return await run_in_threadpool(self._read, body)

    def _read(self, body: bytes) -> Any:
        try:
            return self._model.validate_json(body)
        except ValidationError:
            return json.loads(body)
