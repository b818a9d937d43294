"""The REST interface as a FastAPI application: `create_app(shell)`.

Every error, including FastAPI's own, is answered as `IsthmusError.as_dict()` with the error's HTTP status.
"""

from __future__ import annotations

import functools

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

import isthmus
from isthmus.control.rest.endpoints import check_protocol, own_metrics, router
from isthmus.control.rest.gate import BodyLimit, TokenGate, as_json
from isthmus.control.rest.stream import OpenStreams
from isthmus.control.rest.together import Together
from isthmus.control.service import auth
from isthmus.control.service.control_service import ControlShell
from isthmus.core.errors import InputError, IsthmusError, NotFoundError, ProtocolError
from isthmus.core.messages.agent_messages import PROTOCOL_VERSION, parse_protocol

MAX_BODY_BYTES = 16 * 2**20
"""Largest request body."""


def create_app(shell: ControlShell) -> FastAPI:
    """Return the application that serves `shell`; the caller starts and closes `shell`."""
    app = FastAPI(title="Isthmus", version=isthmus.__version__, summary="The pool's control plane.")
    app.state.shell = shell
    app.state.streams = OpenStreams()
    app.state.together = Together(shell.settle)
    app.include_router(router)
    app.include_router(own_metrics)
    app.add_middleware(BodyLimit, max_bytes=MAX_BODY_BYTES)
    app.add_middleware(TokenGate, identify=functools.partial(auth.identify, shell.store))
    app.add_exception_handler(IsthmusError, _answer_error)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.add_exception_handler(HTTPException, _answer_http)
    app.add_exception_handler(Exception, _answer_bug)
    return app


async def _answer_error(_request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, IsthmusError):
        raise error
    return as_json(error, error.http_status)


async def _answer_invalid(request: Request, error: Exception) -> JSONResponse:
    """Answer a validation error with the first invalid field, or with a protocol version mismatch."""
    if not isinstance(error, RequestValidationError):
        raise error
    try:
        if request.url.path.endswith("/sync") and isinstance(error.body, dict):
            check_protocol(parse_protocol(error.body))
    except ProtocolError as other:
        return as_json(other, other.http_status)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        server_version = f"version {isthmus.__version__}, protocol {PROTOCOL_VERSION}"
        unknown = InputError(
            f"{where}: unknown field on this server ({server_version})",
            hint="fix the name, or use the same version of client and server",
        )
        return as_json(unknown, 422)
    return as_json(InputError(f"{where}: {first['msg']}", hint="/docs describes every body"), 422)


async def _answer_http(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, HTTPException):
        raise error
    kind = NotFoundError if error.status_code == 404 else InputError
    unreadable = error.status_code == 400  # a body that is not JSON: report it like any other invalid body
    status = 422 if unreadable else error.status_code
    answer = as_json(kind(f"{request.method} {request.url.path}: {error.detail}"), status)
    answer.headers.update(error.headers or {})
    return answer


async def _answer_bug(request: Request, _error: Exception) -> JSONResponse:
    """Answer an unexpected exception without its details; the traceback goes to the server's log."""
    what = f"{request.method} {request.url.path}: internal server error"
    return as_json(IsthmusError(what, hint="please report the traceback in the server's log"), 500)
