"""`check_identity_token`: the person of an identity token; every claim that binds it to this sign-in is checked.

OpenID Connect Core 1.0, section 3.1.3.7; RFC 8725 (best practice for JSON Web Tokens): algorithms are a fixed list of
asymmetric ones, and no key or address in the token's header is used.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet

from isthmus.core.base_model import NAME_PATTERN
from isthmus.core.errors import AuthError
from isthmus.core.owner.oidc_file import MAX_TEXT_CHARS, OidcFile, OidcRole, OidcRule
from isthmus.core.text.printable import printable

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519")
MAX_TOKEN_CHARS = 32_768
LEEWAY_S, MAX_AGE_S = 60.0, 600.0
"""Tolerated difference of clocks, and the oldest token that a sign-in may bring."""
MAX_VALUES = 1_000
"""Most values of a claim that rules are compared with."""


class Identity(NamedTuple):
    """A person that has signed in: the provider's unchangeable id of the person, its name and role in the pool."""

    subject: str
    role: OidcRole
    name: str


def check_identity_token(
    token: str, file: OidcFile, nonce: str | None, now_s: float, keys: Callable[[bool], KeySet]
) -> Identity:
    """Return whose token it is; raise `AuthError` if it is not meant for this sign-in, or no rule admits the person.

    `nonce` is that of the sign-in; None for a command's, which has none. `keys` returns the provider's keys; with True,
    asked again, since it may have new ones.
    """
    if len(token) > MAX_TOKEN_CHARS:
        raise _refused("it is too long")
    claims = _verified(token, keys)
    _check_binding(claims, file, nonce)
    _check_times(claims, now_s)
    subject = claims.get("sub")
    if not isinstance(subject, str) or not 0 < len(subject) <= MAX_TEXT_CHARS:
        raise _refused("it names no person")
    rule = next((one for one in file.rules if _fits(one, claims)), None)
    if rule is None:
        raise AuthError(
            "you are signed in at the provider, but this pool admits none of your groups",
            hint="ask the operator of the pool: isthmus serve --oidc names who may sign in",
        )
    name = rule.name or claims.get(file.user_claim)
    if not isinstance(name, str) or not re.fullmatch(NAME_PATTERN, name):
        raise AuthError(
            f"the claim '{printable(file.user_claim, max_chars=60)}' of the identity token is no name of a user",
            hint="at most 63 letters, digits, '.', '_' and '-'; the operator sets user_claim in oidc.yaml",
        )
    return Identity(subject=subject, role=rule.role, name=name)


def _verified(token: str, keys: Callable[[bool], KeySet]) -> Mapping[str, Any]:
    """Return the claims of a token whose signature holds by a key of the provider, asked again once."""
    for fresh in (False, True):
        try:
            found = jwt.decode(token, keys(fresh), algorithms=list(ALGORITHMS))
        except (JoseError, ValueError, TypeError, KeyError, RecursionError) as error:
            if fresh:
                raise _refused("its signature does not hold") from error
            continue
        if isinstance(found.claims, dict):
            return found.claims
        raise _refused("it has no claims")
    raise _refused("its signature does not hold")


def _check_binding(claims: Mapping[str, Any], file: OidcFile, nonce: str | None) -> None:
    """Raise unless the token is of this provider, for this client, and for this sign-in."""
    if claims.get("iss") != file.issuer:
        raise _refused("it is of another issuer")
    given = claims.get("aud")
    audience = given if isinstance(given, list) else [given]
    if file.client_id not in audience:
        raise _refused("it is for another client")
    if (len(audience) > 1 or "azp" in claims) and claims.get("azp") != file.client_id:
        raise _refused("it was given to another client")
    said = claims.get("nonce")
    if nonce is None and said is None:
        return
    if nonce is None or not isinstance(said, str) or not hmac.compare_digest(said.encode(), nonce.encode()):
        raise _refused("it is of another sign-in")


def _check_times(claims: Mapping[str, Any], now_s: float) -> None:
    times = {name: claims.get(name) for name in ("exp", "iat")}
    if not all(isinstance(one, int | float) and not isinstance(one, bool) for one in times.values()):
        raise _refused("it does not say when it was made and when it ends")
    made_s, ends_s = float(times["iat"] or 0), float(times["exp"] or 0)
    begins_s = claims.get("nbf", made_s)
    if not isinstance(begins_s, int | float) or isinstance(begins_s, bool):
        raise _refused("it does not say from when it counts")
    if not now_s < ends_s + LEEWAY_S:
        raise _refused("it has expired")
    if not max(made_s, float(begins_s)) <= now_s + LEEWAY_S or not now_s - made_s <= MAX_AGE_S + LEEWAY_S:
        raise _refused("it was not made for a sign-in of now; compare the clocks of server and provider")


def _fits(rule: OidcRule, claims: Mapping[str, Any]) -> bool:
    given = claims.get(rule.claim)
    return given == rule.value or (isinstance(given, list) and rule.value in given[:MAX_VALUES])


def _refused(problem: str) -> AuthError:
    return AuthError(f"the identity token is refused: {problem}", hint="sign in again")
