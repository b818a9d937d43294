"""`OidcFile`: the OpenID Connect provider by which persons sign in to the console, written as `oidc.yaml`."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from isthmus.core.base_model import FrozenModel, Name

MAX_URL_CHARS, MAX_TEXT_CHARS, MAX_RULES = 1024, 255, 256
OidcRole = Literal["admin", "owner", "user"]


def is_safe_url(url: str) -> bool:
    """Return whether an address is https, or http on this machine's own loopback, without a user, query or fragment."""
    found = urlsplit(url)
    if found.username or found.password or found.query or found.fragment or not found.hostname:
        return False
    return found.scheme == "https" or (found.scheme == "http" and _is_loopback(found.hostname))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_url(url: str) -> str:
    if not is_safe_url(url):
        raise ValueError(f"'{url[:80]}' is no https address without user, query and fragment")
    return url


OidcUrl = Annotated[str, Field(max_length=MAX_URL_CHARS), AfterValidator(_check_url)]
Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT_CHARS)]


class OidcRule(FrozenModel):
    """Persons whose `claim` is `value`, or a list with it, sign in with this role; owners by the owner's `name`."""

    claim: Text
    value: Text
    role: OidcRole
    name: Name | None = None

    @model_validator(mode="after")
    def _check_name(self) -> OidcRule:
        if (self.role == "owner") != (self.name is not None):
            raise ValueError("role: owner needs the `name` of the owner, other roles have none")
        return self


class OidcFile(FrozenModel):
    """A provider. `issuer` is its address as in its tokens; `redirect_url` that of this server's console.

    `user_claim` names users: choose one that a person cannot change at the provider. The first of the `rules` that fits
    decides the role; one that none fits is refused.
    """

    version: Literal[1] = 1
    issuer: OidcUrl
    client_id: Text
    client_secret_file: Path | None = None
    redirect_url: OidcUrl
    scopes: Annotated[tuple[Text, ...], Field(max_length=16)] = ("openid", "profile")
    user_claim: Text = "preferred_username"
    rules: Annotated[tuple[OidcRule, ...], Field(min_length=1, max_length=MAX_RULES)]

    @model_validator(mode="after")
    def _check_redirect(self) -> OidcFile:
        if urlsplit(self.redirect_url).path != "/console/":
            raise ValueError(
                "redirect_url ends with /console/, the page of this server that the provider sends back to"
            )
        if "openid" not in self.scopes:
            raise ValueError("scopes contain openid")
        return self
