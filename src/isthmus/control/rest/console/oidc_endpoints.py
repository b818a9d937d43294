"""The endpoints of sign-ins by OpenID Connect, of browsers and of commands: begin, and finish with the answer."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from isthmus.control.rest.console.session_response import set_session_cookie
from isthmus.control.rest.json_route import JsonRoute
from isthmus.control.rest.request_context import Service
from isthmus.control.rest.rest_bodies import error_responses
from isthmus.control.service.oidc.oidc_sign_in import SIGN_IN_S
from isthmus.core.errors import AuthError, NotFoundError, QuotaError
from isthmus.core.views.access_views import (
    DeviceAnswer,
    DeviceBegun,
    DeviceCode,
    OidcAnswer,
    OidcBegun,
    OidcView,
    SessionView,
)

oidc_router = APIRouter(prefix="/v1", route_class=JsonRoute)
_NAME = "isthmus-sign-in"
MAX_SEED_CHARS = 200


@oidc_router.get("/oidc", responses=error_responses())
def get_provider(service: Service) -> OidcView:
    """Return the provider by which persons sign in to the console, if there is one; needs no token."""
    return OidcView(issuer=service.oidc.issuer)


@oidc_router.post("/oidc/begin", responses=error_responses(NotFoundError))
def begin_sign_in(service: Service, request: Request, response: Response) -> OidcBegun:
    """Begin a sign-in: return the address at the provider that the browser opens; needs no token."""
    _check_rate(service, request)
    begun = service.oidc.begin()
    secure = request.url.scheme == "https"
    response.set_cookie(
        _cookie_name(secure=secure), begun.seed, max_age=int(SIGN_IN_S), path="/", secure=secure, httponly=True,
        samesite="strict",
    )  # fmt: skip
    response.headers["Cache-Control"] = "no-store"
    return OidcBegun(url=begun.url)


@oidc_router.post("/oidc/session", status_code=201, responses=error_responses(NotFoundError, QuotaError))
def finish_sign_in(answer: OidcAnswer, service: Service, request: Request, response: Response) -> SessionView:
    """Begin a session of the console with the provider's answer, in the browser that began the sign-in."""
    address = _check_rate(service, request)
    secure = request.url.scheme == "https"
    seed = request.cookies.get(_cookie_name(secure=secure))
    try:
        usable = seed if seed is not None and len(seed) <= MAX_SEED_CHARS else None
        started = service.oidc.finish(usable, answer.state, answer.code, address)
    except AuthError as error:
        service.gate.count_failure(address)
        service.oidc.refuse(address, error)
        raise
    response.delete_cookie(_cookie_name(secure=secure), path="/", secure=secure, httponly=True, samesite="strict")
    set_session_cookie(request, response, started.cookie)
    return started.view


@oidc_router.post("/oidc/device", responses=error_responses(NotFoundError))
def begin_device_sign_in(service: Service, request: Request, response: Response) -> DeviceBegun:
    """Begin the sign-in of a command: return the code that a person enters at the provider; needs no token."""
    _check_rate(service, request)
    response.headers["Cache-Control"] = "no-store"
    return service.device_oidc.begin()


@oidc_router.post("/oidc/device/token", responses=error_responses(NotFoundError))
def finish_device_sign_in(given: DeviceCode, service: Service, request: Request, response: Response) -> DeviceAnswer:
    """Return the command's token once the person has signed in at the provider, until then none; needs no token."""
    address = _check_rate(service, request)
    response.headers["Cache-Control"] = "no-store"
    try:
        return service.device_oidc.finish(given.device_code, address)
    except AuthError as error:
        service.gate.count_failure(address)
        service.oidc.refuse(address, error)
        raise


def _check_rate(service: Service, request: Request) -> str:
    """Return the address of a request; raise as the gate does if too many requests from it have failed."""
    address = request.client.host if request.client else ""
    if service.gate.refuses_unknown(address):
        raise service.gate.refuse(address)
    return address


def _cookie_name(*, secure: bool) -> str:
    return f"__Host-{_NAME}" if secure else _NAME
