"""The REST interface as a FastAPI application: `create_app(service)`.

Every error, including FastAPI's own, is answered as `IsthmusError.as_dict()` with the error's HTTP status.
"""

from __future__ import annotations

import functools

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

import isthmus
from isthmus.control.rest.endpoints import check_protocol, metrics_router, router
from isthmus.control.rest.event_stream import OpenStreams
from isthmus.control.rest.middleware import BodySizeMiddleware, TokenMiddleware, error_response
from isthmus.control.rest.request_batcher import RequestBatcher
from isthmus.control.service import auth
from isthmus.control.service.control_service import ControlService
from isthmus.core.errors import InputError, IsthmusError, NotFoundError, ProtocolError
from isthmus.core.messages.agent_messages import PROTOCOL_VERSION, protocol_version_of

MAX_BODY_BYTES = 16 * 2**20
"""Largest request body."""


def create_app(service: ControlService) -> FastAPI:
    """Return the application that serves `service`; the caller starts and closes `service`."""
    app = FastAPI(title="Isthmus", version=isthmus.__version__, summary="The pool's control plane.")
    app.state.service = service
    app.state.streams = OpenStreams()
    app.state.batcher = RequestBatcher(service.execute)
    app.include_router(router)
    app.include_router(metrics_router)
    app.add_middleware(BodySizeMiddleware, max_bytes=MAX_BODY_BYTES)
    app.add_middleware(TokenMiddleware, identify=functools.partial(auth.identify, service.store))
    app.add_exception_handler(IsthmusError, _handle_error)
    app.add_exception_handler(RequestValidationError, _handle_invalid_request)
    app.add_exception_handler(HTTPException, _handle_http_error)
    app.add_exception_handler(Exception, _handle_unexpected_error)
    return app


async def _handle_error(_request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, IsthmusError):
        raise error
    return error_response(error, error.http_status)


async def _handle_invalid_request(request: Request, error: Exception) -> JSONResponse:
    """Answer a validation error with the first invalid field, or with a protocol version mismatch."""
    if not isinstance(error, RequestValidationError):
        raise error
    try:
        if request.url.path.endswith("/sync") and isinstance(error.body, dict):
            check_protocol(protocol_version_of(error.body))
    except ProtocolError as other:
        return error_response(other, other.http_status)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        server_version = f"version {isthmus.__version__}, protocol {PROTOCOL_VERSION}"
        unknown = InputError(
            f"{where}: unknown field on this server ({server_version})",
            hint="fix the name, or use the same version of client and server",
        )
        return error_response(unknown, 422)
    return error_response(InputError(f"{where}: {first['msg']}", hint="/docs describes every body"), 422)


async def _handle_http_error(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, HTTPException):
        raise error
    kind = NotFoundError if error.status_code == 404 else InputError
    unreadable = error.status_code == 400  # a body that is not JSON: report it like any other invalid body
    status = 422 if unreadable else error.status_code
    answer = error_response(kind(f"{request.method} {request.url.path}: {error.detail}"), status)
    answer.headers.update(error.headers or {})
    return answer


async def _handle_unexpected_error(request: Request, _error: Exception) -> JSONResponse:
    """Answer an unexpected exception without its details; the traceback goes to the server's log."""
    what = f"{request.method} {request.url.path}: internal server error"
    return error_response(IsthmusError(what, hint="please report the traceback in the server's log"), 500)
