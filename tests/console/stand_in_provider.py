"""`StandInProvider`: an OpenID Connect provider on loopback for tests: discovery, codes with PKCE and of devices, keys.

It checks a client as a provider does: the address to send back to, the code once, the verifier of its challenge, and
the client's secret. What a test sets in `change` and `answer_as` it answers wrongly.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

from joserfc import jwt
from joserfc.jwk import ECKey, RSAKey

REDIRECT = "http://127.0.0.1:8470/console/"


class StandInProvider:
    """A provider whose persons sign in at once, as `claims` say."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.key: RSAKey | ECKey = RSAKey.generate_key(2048, {"kid": "k1", "use": "sig"}, private=True)
        self.secret: str | None = "s3cret:%"
        self.claims: dict[str, Any] = {"sub": "u-1", "preferred_username": "ann", "groups": ["researchers"]}
        self.change: dict[str, Any] = {}
        self.token: Callable[[str], str] = lambda token: token
        self.metadata: dict[str, Any] = {}
        self.answer_as: dict[str, tuple[int, bytes]] = {}
        self.codes: dict[str, dict[str, str]] = {}
        # By device code: whether the person has signed in (RFC 8628); None: it has refused.
        self.devices: dict[str, bool | None] = {}
        self.asked: list[str] = []
        self.issuer, self.redirect = "", REDIRECT

    def sign_in(self, url: str) -> tuple[str, str]:
        """Do what a browser and a person do at the authorization endpoint; return the code and the state."""
        found = {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}
        assert url.startswith(f"{self.issuer}/authorize?")
        assert (found["response_type"], found["client_id"], found["redirect_uri"]) == (
            "code", "isthmus", self.redirect,
        )  # fmt: skip
        assert found["code_challenge_method"] == "S256"
        assert "openid" in found["scope"].split()
        code = secrets.token_urlsafe(16)
        self.codes[code] = found
        return code, found["state"]

    def answer(self, path: str, form: dict[str, str], authorization: str) -> tuple[int, bytes]:
        """Return the status and body of a request."""
        self.asked.append(path)
        if path in self.answer_as:
            return self.answer_as[path]
        if path == "/.well-known/openid-configuration":
            return 200, json.dumps(
                {
                    "issuer": self.issuer,
                    "authorization_endpoint": f"{self.issuer}/authorize",
                    "token_endpoint": f"{self.issuer}/token",
                    "jwks_uri": f"{self.issuer}/keys",
                    "device_authorization_endpoint": f"{self.issuer}/device",
                }
                | self.metadata
            ).encode()
        if path == "/keys":
            return 200, json.dumps({"keys": [self.key.as_dict(private=False)]}).encode()
        if path not in ("/token", "/device"):
            return 404, b""
        if self.secret is not None:
            given = base64.b64decode(authorization.removeprefix("Basic ")).decode().partition(":")
            if (unquote(given[0]), unquote(given[2])) != ("isthmus", self.secret):
                return 401, b'{"error": "invalid_client"}'
        if path == "/device":
            return self._device(form)
        return self._for_device(form) if form["grant_type"].endswith(":device_code") else self._for_code(form)

    def _device(self, form: dict[str, str]) -> tuple[int, bytes]:
        """Begin the sign-in of a device (RFC 8628, 3.2)."""
        assert (form["client_id"], "openid" in form["scope"].split()) == ("isthmus", True)
        code = secrets.token_urlsafe(16)
        self.devices[code] = False
        answer = {"device_code": code, "user_code": "WDJB-MJHT", "verification_uri": f"{self.issuer}/enter",
                  "verification_uri_complete": f"{self.issuer}/enter?user_code=WDJB-MJHT", "expires_in": 600,
                  "interval": 5}  # fmt: skip
        return 200, json.dumps(answer | self.change).encode()

    def _for_device(self, form: dict[str, str]) -> tuple[int, bytes]:
        """Answer a device that asks whether its person has signed in (RFC 8628, 3.5); a code counts once."""
        done = self.devices.get(form["device_code"], None)
        if not done:
            return 400, json.dumps({"error": "access_denied" if done is None else "authorization_pending"}).encode()
        del self.devices[form["device_code"]]
        return self._identity({})

    def _for_code(self, form: dict[str, str]) -> tuple[int, bytes]:
        asked = self.codes.pop(form.get("code", ""), None)
        digest = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
        challenge = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        fits = asked is not None and asked["code_challenge"] == challenge and form["redirect_uri"] == self.redirect
        if asked is None or not fits or form["grant_type"] != "authorization_code":
            return 400, b'{"error": "invalid_grant"}'
        return self._identity({"nonce": asked["nonce"]})

    def _identity(self, bound: dict[str, Any]) -> tuple[int, bytes]:
        """Return an identity token with the claims of the sign-in."""
        now_s = int(self.clock())
        claims = {"iss": self.issuer, "aud": "isthmus", "iat": now_s, "exp": now_s + 300} | bound
        algorithm = "RS256" if isinstance(self.key, RSAKey) else "ES256"
        header = {"alg": algorithm, "kid": self.key.kid}
        final = {name: value for name, value in (claims | self.claims | self.change).items() if value is not None}
        token = self.token(jwt.encode(header, final, self.key))
        return 200, json.dumps({"access_token": "a", "token_type": "Bearer", "id_token": token}).encode()


@contextmanager
def running_provider(clock: Callable[[], float] = time.time) -> Iterator[StandInProvider]:
    """Yield a provider that answers on a port of loopback."""
    provider = StandInProvider(clock)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.startswith("/authorize?"):
                self._send(*provider.answer(self.path, {}, ""))
                return
            code, state = provider.sign_in(provider.issuer + self.path)
            self._send(302, b"", f"{provider.redirect}?{urlencode({'code': code, 'state': state})}")

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            form = {name: values[0] for name, values in parse_qs(body).items()}
            self._send(*provider.answer(self.path, form, self.headers.get("Authorization", "")))

        def _send(self, status: int, body: bytes, location: str = "") -> None:
            self.send_response(status)
            if status == 302:
                self.send_header("Location", location or f"{provider.issuer}/.well-known/openid-configuration")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        provider.issuer = f"http://127.0.0.1:{listener.server_address[1]}"
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield provider
        finally:
            listener.shutdown()
            thread.join()
