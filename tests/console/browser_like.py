"""`Browser`: a client of the application that keeps cookies and the session's key, as a page of the console does."""

from __future__ import annotations

from typing import Any

import httpx

from isthmus.control.service.access.session_cookie import COOKIE, KEY_HEADER
from tests.control.test_server_api import Server

ORIGIN = "http://testserver"
SAME_ORIGIN = {"Sec-Fetch-Site": "same-origin", "Origin": ORIGIN}


class Browser:
    """Signs in to `server` and sends requests of the session; its cookie is kept apart from those of other clients."""

    def __init__(self, server: Server) -> None:
        self.server, self.key, self.cookie, self.id = server, "", "", ""

    def sign_in(self, token: str, **headers: str) -> httpx.Response:
        """Sign in with a token; keep the cookie and the key of the answer."""
        answer = self.server.http.post(
            "/v1/session", headers=SAME_ORIGIN | {"Authorization": f"Bearer {token}"} | headers
        )
        self.server.http.cookies.clear()
        if answer.status_code == 201:
            self.cookie, self.key, self.id = answer.cookies[COOKIE], answer.json()["key"], answer.json()["id"]
        return answer

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        cookie: str | None = None,
        key: str | None = None,
        **more: str,
    ) -> httpx.Response:
        """Send a request of the session; `cookie` and `key` replace its own, "" leaves one out."""
        half, key = self.cookie if cookie is None else cookie, self.key if key is None else key
        headers = SAME_ORIGIN | more
        if half:
            headers["Cookie"] = f"{COOKIE}={half}"
        if key:
            headers[KEY_HEADER] = key
        return self.server.http.request(method, path, json=body, headers=headers)
