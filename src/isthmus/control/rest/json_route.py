"""`JsonRoute`: parses a request body once, from bytes directly into its model.

FastAPI parses bytes into dictionaries and these into a model, all in the event loop. Here pydantic parses the
bytes itself, and a large body is parsed in a thread so that it does not block other requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine
from itertools import islice
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

THREAD_PARSE_BYTES = 64 * 1024
"""Body size from which on a thread parses it; parsing this size takes about 1 ms."""
MAX_EXPLAINED_BYTES = 4 << 20
"""Largest invalid body that FastAPI explains: as plain data it takes up to thirty times its size."""
MAX_LISTED_ERRORS = 1000
"""Most errors of an invalid body that FastAPI explains."""
MAX_BODY_VALUES = 300_000
"""Most values of a body; each may become an error of half a kilobyte."""
_MARK_OR_TEXT = re.compile(rb'[,\[{]|"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""A mark before a value, or a text, which may contain such marks; one without an end takes the rest."""
_CONSTANT_OR_TEXT = re.compile(rb'(?P<constant>Infinity|NaN)|"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""A number that JSON does not have, or a text, which may contain its name."""


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
        """Return the body as its model, or as plain data if invalid, so that FastAPI reports the errors.

        Of a large one only the first error is reported: it is not built a second time.
        """
        body = await self.body()
        if len(body) < THREAD_PARSE_BYTES:
            return self._parse(body)
        return await run_in_threadpool(self._parse, body)

    def _parse(self, body: bytes) -> Any:
        if has_too_many_values(body):
            raise HTTPException(413, detail=f"the body has more than {MAX_BODY_VALUES:,} values")
        if (constant := _non_finite_number(body)) is not None:
            raise HTTPException(
                422, detail=f"the body has {constant}, which is no number of JSON; give a finite number"
            )
        try:
            return self._model.validate_json(body)
        except ValidationError as error:
            if len(body) > MAX_EXPLAINED_BYTES and error.error_count() <= MAX_LISTED_ERRORS:
                raise HTTPException(422, detail=_first_problem(error)) from error
            if error.error_count() > MAX_LISTED_ERRORS:
                raise HTTPException(422, detail=f"{error.error_count():,} fields of the body are wrong") from error
            return _plain_data(body)


def _plain_data(body: bytes) -> Any:
    """Return an invalid body as plain data; raise for a text that no answer, event or file could hold."""
    found = json.loads(body)
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise HTTPException(422, detail="the body has half of a surrogate pair, which is no character") from error
    return found


def has_too_many_values(body: bytes) -> bool:
    """Return whether a JSON body has more than `MAX_BODY_VALUES` values, without building them."""
    if sum(map(body.count, (b",", b"[", b"{"))) <= MAX_BODY_VALUES:
        return False
    marks = (one for one in _MARK_OR_TEXT.finditer(body) if one[0][:1] != b'"')
    return next(islice(marks, MAX_BODY_VALUES, None), None) is not None


def _non_finite_number(body: bytes) -> str | None:
    """Return the first `Infinity` or `NaN` outside of texts; parsers take both, but no event or file keeps them."""
    if b"Infinity" not in body and b"NaN" not in body:
        return None
    found = (one["constant"] for one in _CONSTANT_OR_TEXT.finditer(body))
    return next((name.decode() for name in found if name), None)


def _first_problem(error: ValidationError) -> str:
    """Return where the first problem of a body is and what it is, without its value."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    return f"{'.'.join(map(str, ('body', *first['loc'])))}: {first['msg']}"
