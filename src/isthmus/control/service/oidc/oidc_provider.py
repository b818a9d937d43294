"""`OidcProvider`: requests to an OpenID Connect provider: its description, its keys, and a code for an identity token.

The provider is the operator's choice; what it answers is bounded in size and time all the same, and never followed to
another address. OpenID Connect Discovery 1.0, sections 3 and 4; RFC 6749, section 4.1.3; RFC 7636; RFC 8628.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import httpx
from joserfc.errors import JoseError
from joserfc.jwk import KeySet

from isthmus.core.errors import AuthError, NotFoundError, UnavailableError
from isthmus.core.owner.oidc_file import OidcFile, is_safe_url

TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 1 << 18
"""Largest answer of the provider."""
METADATA_KEPT_S = 3600.0
KEYS_ASKED_S = 30.0
"""Least time between two requests for the provider's keys."""
MAX_AT_ONCE = 8
"""Requests to the provider at one time."""
DISCOVERY_PATH = "/.well-known/openid-configuration"


_DEVICE_GRANT = "urn:ietf:params:oauth:grant-type:device_code"
_PENDING = ("authorization_pending", "slow_down")


class PendingSignInError(AuthError):
    """The person has not finished at the provider yet; `slow_down`: it was asked too often."""

    def __init__(self, *, slow_down: bool) -> None:
        super().__init__("the person has not signed in yet", hint="ask again")
        self.slow_down = slow_down


class OidcProvider:
    """A provider, asked over `transport` (None: the network); thread-safe. `monotonic` is the clock of what is kept."""

    def __init__(
        self,
        file: OidcFile,
        client_secret: str | None = None,
        *,
        transport: httpx.BaseTransport | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.file, self._secret, self._monotonic = file, client_secret, monotonic
        self._client = httpx.Client(transport=transport, timeout=TIMEOUT_S, follow_redirects=False, trust_env=False)
        self._lock, self._slots = threading.Lock(), threading.BoundedSemaphore(MAX_AT_ONCE)
        self._metadata: tuple[float, dict[str, str]] | None = None
        self._keys: tuple[float, KeySet] | None = None

    def authorization_endpoint(self) -> str:
        """Return where the provider asks persons to sign in."""
        return self._described()["authorization_endpoint"]

    def exchange(self, code: str, verifier: str) -> str:
        """Return the identity token for a code; raise `AuthError` if the provider refuses it."""
        fields = {
            "grant_type": "authorization_code", "code": code, "redirect_uri": self.file.redirect_url,
            "client_id": self.file.client_id, "code_verifier": verifier,
        }  # fmt: skip
        return self._identity_token(fields)

    def begin_device(self) -> dict[str, Any]:
        """Return the provider's answer to a device authorization request (RFC 8628, 3.1 and 3.2), unchecked."""
        endpoint = self._described().get("device_authorization_endpoint")
        if endpoint is None:
            raise NotFoundError("the provider of sign-ins admits no commands", hint="sign in with a token")
        fields = {"client_id": self.file.client_id, "scope": " ".join(self.file.scopes)}
        return self._ask("POST", endpoint, fields, self._auth())

    def exchange_device(self, device_code: str) -> str:
        """Return the identity token for a device code (RFC 8628, 3.4); raise `PendingSignInError` until there is."""
        return self._identity_token(
            {"grant_type": _DEVICE_GRANT, "device_code": device_code, "client_id": self.file.client_id}
        )

    def _identity_token(self, fields: dict[str, str]) -> str:
        found = self._ask("POST", self._described()["token_endpoint"], fields, self._auth())
        token = found.get("id_token")
        if not isinstance(token, str):
            raise AuthError("the provider gave no identity token", hint="its client must be allowed the scope openid")
        return token

    def _auth(self) -> httpx.Auth | None:
        """Return the client's secret, each half as a form has it (RFC 6749, section 2.3.1)."""
        if self._secret is None:
            return None
        return httpx.BasicAuth(quote(self.file.client_id, safe=""), quote(self._secret, safe=""))

    def keys(self, *, fresh: bool = False) -> KeySet:
        """Return the provider's public keys; with `fresh` asked again, if that was not done just before."""
        now_s = self._monotonic()
        with self._lock:
            kept = self._keys
        if kept is not None and (not fresh or now_s - kept[0] < KEYS_ASKED_S):
            return kept[1]
        given = self._ask("GET", self._described()["jwks_uri"]).get("keys")
        usable = [one for one in given if _is_for_signatures(one)] if isinstance(given, list) else []
        if not usable:
            raise _broken("it has no keys for signatures")
        try:
            keys = KeySet.import_key_set({"keys": usable})
        except (JoseError, ValueError, TypeError, KeyError) as error:
            raise _broken(f"its keys cannot be read: {type(error).__name__}") from error
        with self._lock:
            self._keys = now_s, keys
        return keys

    def _described(self) -> dict[str, str]:
        now_s = self._monotonic()
        with self._lock:
            kept = self._metadata
        if kept is not None and now_s - kept[0] < METADATA_KEPT_S:
            return kept[1]
        found = self._ask("GET", self.file.issuer.rstrip("/") + DISCOVERY_PATH)
        if found.get("issuer") != self.file.issuer:
            raise _broken(f"it describes itself as another issuer than {self.file.issuer}")
        described = dict[str, str]()
        for name in ("authorization_endpoint", "token_endpoint", "jwks_uri"):
            url = found.get(name)
            if not isinstance(url, str) or not is_safe_url(url):
                raise _broken(f"its {name} is no https address")
            described[name] = url
        device_url = found.get("device_authorization_endpoint")
        if isinstance(device_url, str) and is_safe_url(device_url):
            described["device_authorization_endpoint"] = device_url
        with self._lock:
            self._metadata = now_s, described
        return described

    def _ask(
        self, method: str, url: str, fields: dict[str, str] | None = None, auth: httpx.Auth | None = None
    ) -> dict[str, Any]:
        """Return the JSON object of an answer; raise `AuthError` for 400 and 401, `UnavailableError` for others."""
        if not self._slots.acquire(timeout=TIMEOUT_S):
            raise UnavailableError("too many persons sign in at once", hint="try again")
        try:
            headers = {"Accept": "application/json"}
            with self._client.stream(method, url, data=fields, auth=auth, headers=headers) as answer:
                body = bytearray()
                for chunk in answer.iter_bytes():
                    body += chunk
                    if len(body) > MAX_ANSWER_BYTES:
                        raise _broken(f"its answer is longer than {MAX_ANSWER_BYTES:,} bytes")
            status = answer.status_code
            refused = method == "POST" and status in (400, 401)
            if status != httpx.codes.OK and not refused:
                raise _broken(f"it answers {status}")
            found = httpx.Response(status, content=bytes(body)).json()
        except httpx.HTTPError as error:
            raise _broken(f"it does not answer: {type(error).__name__}") from error
        except (ValueError, RecursionError) as error:
            if refused:
                raise _refusal() from error
            raise _broken("it answers what is no JSON") from error
        finally:
            self._slots.release()
        if refused:
            code = found.get("error") if isinstance(found, dict) else None
            raise PendingSignInError(slow_down=code == "slow_down") if code in _PENDING else _refusal()
        if not isinstance(found, dict):
            raise _broken("it answers what is no JSON object")
        return found


def _is_for_signatures(key: object) -> bool:
    """Return whether a key is a public one for signatures; symmetric keys are none."""
    return isinstance(key, dict) and key.get("kty") in ("RSA", "EC", "OKP") and key.get("use", "sig") == "sig"


def _refusal() -> AuthError:
    return AuthError("the provider refuses the sign-in", hint="sign in again; a code counts once")


def _broken(problem: str) -> UnavailableError:
    return UnavailableError(
        f"the provider of sign-ins fails: {problem}", hint="sign in with a token, or try again later"
    )
