"""`NotifySettings`: the operator's settings of notices, written as `notify.yaml`; `load_notify_settings` reads them."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from isthmus.core.base_model import FrozenModel
from isthmus.core.bounded_file import read_within
from isthmus.core.errors import FileError, InputError
from isthmus.core.files.user_files import load_model_file
from isthmus.core.views.notice_views import MAX_EMAIL_CHARS

MAX_PASSWORD_BYTES = 1024
SMTP_PORTS = {"tls": 465, "starttls": 587, "none": 25}


class SmtpSettings(FrozenModel):
    """The mail server that takes the operator's e-mail. Port: 465 for `tls`, 587 for `starttls`, 25 for `none`.

    The password is the first line of `password_file`, and goes only through an encrypted connection.
    """

    host: Annotated[str, Field(min_length=1, max_length=253)]
    port: Annotated[int | None, Field(ge=1, le=65535)] = None
    security: Literal["tls", "starttls", "none"] = "starttls"
    sender: Annotated[str, Field(max_length=MAX_EMAIL_CHARS, pattern=r"^[^@\s<>\"]+@[^@\s<>\"]+$")]
    user: Annotated[str, Field(max_length=200)] = ""
    password_file: Path | None = None

    @property
    def used_port(self) -> int:
        """The port, or that of the kind of security."""
        return self.port or SMTP_PORTS[self.security]


class NotifySettings(FrozenModel):
    """What the operator allows notices: a mail server, domains of e-mail addresses, networks of webhooks.

    Without `smtp` there is no e-mail, without `email_domains` any domain counts. Webhooks go to public addresses by
    `https`; in `networks` (CIDR) also to private ones and by `http`. `webhooks: false` turns them off.
    """

    version: Literal[1] = 1
    webhooks: bool = True
    networks: Annotated[tuple[str, ...], Field(max_length=100)] = ()
    smtp: SmtpSettings | None = None
    email_domains: Annotated[tuple[str, ...], Field(max_length=1000)] = ()

    @field_validator("networks")
    @classmethod
    def _check_networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for network in value:
            ipaddress.ip_network(network)
        return value

    def check_email(self, address: str) -> None:
        """Raise `InputError` for an address that gets no e-mail from this server."""
        if self.smtp is None:
            raise InputError("this server sends no e-mail", hint="use a webhook, or ask the operator for a mail server")
        domain = address.rpartition("@")[2].lower()
        if self.email_domains and domain not in {one.lower() for one in self.email_domains}:
            allowed = ", ".join(self.email_domains[:5])
            raise InputError(
                f"no e-mail is sent to '{domain}'", hint=f"the operator allows addresses of {allowed} (email_domains)"
            )


def load_notify_settings(path: Path) -> NotifySettings:
    """Read `notify.yaml`; raise `FileError` with file, line and field."""
    settings = load_model_file(path, NotifySettings)
    if settings.smtp is not None and settings.smtp.user and settings.smtp.security == "none":
        raise FileError("a password would go through an open connection: smtp.security 'none'", file=str(path),
                        hint="use starttls or tls, or remove smtp.user")  # fmt: skip
    return settings


def read_password(file: Path | None) -> str:
    """Return the first line of a password file, "" without one; raise `FileError` if it cannot be read."""
    if file is None:
        return ""
    try:
        return read_within(file, MAX_PASSWORD_BYTES).decode().partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"the password cannot be read: {error}", file=str(file)) from error
