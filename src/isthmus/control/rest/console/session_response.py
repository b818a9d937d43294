"""`set_session_cookie`: the half of a session's secret that a browser keeps as a cookie."""

from __future__ import annotations

from fastapi import Request, Response

from isthmus.control.service.access.console_sessions import SESSION_S
from isthmus.control.service.access.session_cookie import cookie_name


def set_session_cookie(request: Request, response: Response, half: str) -> None:
    """Set the cookie of a session that has begun."""
    secure = request.url.scheme == "https"
    response.set_cookie(
        cookie_name(secure=secure), half, max_age=int(SESSION_S), path="/", secure=secure, httponly=True,
        samesite="strict",
    )  # fmt: skip
    response.headers["Cache-Control"] = "no-store"
