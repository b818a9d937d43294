"""The endpoints of the console's sessions: sign in with a token, see who is signed in, sign out."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from isthmus.control.rest.console.session_response import set_session_cookie
from isthmus.control.rest.json_route import JsonRoute
from isthmus.control.rest.request_context import CurrentCaller, Service
from isthmus.control.rest.rest_bodies import error_responses
from isthmus.control.service.access.session_cookie import cookie_name
from isthmus.core.errors import QuotaError
from isthmus.core.views.access_views import SessionView

session_router = APIRouter(prefix="/v1", route_class=JsonRoute)


@session_router.post("/session", status_code=201, responses=error_responses(QuotaError))
def sign_in(caller: CurrentCaller, service: Service, request: Request, response: Response) -> SessionView:
    """Begin a session of the console for the token of the request: half of its secret is a cookie, half the `key`.

    Requests of the session send the cookie and the header `Isthmus-Session-Key`, instead of the token. It ends after 12
    hours, with its token, or by `DELETE /v1/session`.
    """
    started = service.sessions.start(caller)
    set_session_cookie(request, response, started.cookie)
    return started.view


@session_router.get("/session", responses=error_responses())
def get_session(caller: CurrentCaller, service: Service) -> SessionView:
    """Return the role, name and end of the session or token of the request."""
    return service.sessions.view(caller)


@session_router.delete("/session", status_code=204, responses=error_responses())
def sign_out(caller: CurrentCaller, service: Service, request: Request, response: Response) -> None:
    """End the session of the request, at this and all other servers within a second; its token stays."""
    service.sessions.end(caller)
    secure = request.url.scheme == "https"
    response.delete_cookie(cookie_name(secure=secure), path="/", secure=secure, httponly=True, samesite="strict")
