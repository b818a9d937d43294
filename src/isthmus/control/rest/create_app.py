"""The REST interface as a FastAPI application: `create_app(service)`.

Every error, including FastAPI's own, is answered as `IsthmusError.as_dict()` with the error's HTTP status.
"""

from __future__ import annotations

import functools
import json

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException

import isthmus
from isthmus.control.rest.access_endpoints import access_router
from isthmus.control.rest.body_limit import BodyLimits, BodySizeMiddleware, BodyTooLargeError
from isthmus.control.rest.catalogue_endpoints import catalogue_router
from isthmus.control.rest.console.job_text_endpoint import job_text_router
from isthmus.control.rest.console.oidc_endpoints import oidc_router
from isthmus.control.rest.console.session_endpoints import session_router
from isthmus.control.rest.console.static_files import console_router
from isthmus.control.rest.endpoints import check_protocol, metrics_router, router
from isthmus.control.rest.event_stream import OpenStreams
from isthmus.control.rest.interface_page import interface_page
from isthmus.control.rest.ledger_endpoints import ledger_router
from isthmus.control.rest.middleware import HeadMiddleware, TokenMiddleware, error_response
from isthmus.control.rest.quota_endpoints import quota_router
from isthmus.control.rest.request_batcher import RequestBatcher
from isthmus.control.rest.site_endpoints import site_router
from isthmus.control.rest.subscription_endpoints import subscription_router
from isthmus.control.service.control_service import ControlService
from isthmus.core.errors import AuthError, InputError, IsthmusError, NotFoundError, ProtocolError
from isthmus.core.messages.agent_messages import PROTOCOL_VERSION, protocol_version_of


def create_app(service: ControlService) -> FastAPI:
    """Return the application that serves `service`; the caller starts and closes `service`."""
    app = FastAPI(
        title="Isthmus", version=isthmus.__version__, summary="The pool's control plane.",
        docs_url=None, redoc_url=None, openapi_url=None,
    )  # fmt: skip
    app.state.service = service
    app.state.streams = OpenStreams()
    app.state.batcher = RequestBatcher(service.execute)
    for part in (
        router, metrics_router, access_router, catalogue_router, site_router, ledger_router, quota_router,
        oidc_router, session_router,
        subscription_router, job_text_router, console_router,
    ):  # fmt: skip
        app.router.routes += part.routes  # `include_router` would make each route again, 60 ms of CPU
    _describe(app)
    quotas = service.quotas
    app.add_middleware(BodySizeMiddleware, limits=BodyLimits(quotas.job_bytes if quotas else None))
    app.add_middleware(TokenMiddleware, gate=service.gate, audit=service.audit)
    app.add_middleware(HeadMiddleware, audit=service.audit)
    app.add_exception_handler(IsthmusError, _handle_error)
    app.add_exception_handler(RequestValidationError, _handle_invalid_request)
    app.add_exception_handler(HTTPException, _handle_http_error)
    app.add_exception_handler(Exception, _handle_unexpected_error)
    return app


def _describe(app: FastAPI) -> None:
    """Serve the description of the interface, made once: it needs no token, so each answer has to cost little."""

    @functools.cache
    def page() -> bytes:
        return interface_page(app.openapi()).encode()

    @functools.cache
    def document() -> bytes:
        return json.dumps(app.openapi()).encode()

    async def docs() -> Response:
        return HTMLResponse(page())

    async def openapi() -> Response:
        return Response(document(), media_type="application/json")

    app.add_api_route("/docs", docs, include_in_schema=False)
    app.add_api_route("/openapi.json", openapi, include_in_schema=False)


async def _handle_error(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, IsthmusError):
        raise error
    if isinstance(error, AuthError):
        caller = getattr(request.state, "caller", None)
        request.app.state.service.audit.record("refused", caller, _request_line(request), error.message)
    return error_response(error, error.http_status)


def _request_line(request: Request) -> str:
    return f"{request.method} {request.url.path}"


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
    if isinstance(error, BodyTooLargeError):
        return error_response(error.refusal, 413)
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
