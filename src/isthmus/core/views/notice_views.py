"""Notices: what a person is notified of, where to, and the bodies of webhooks and of the REST interface."""

from __future__ import annotations

import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from isthmus.core.base_model import FrozenModel, Name, NonNegativeInt

NoticeTopic = Literal["state", "faults", "sites", "budgets"]
"""`state`: a job starts, ends, is preempted; `faults`: lost workers and attempts; `sites`: sites away or back;
`budgets`: a limit of a month or a job's `max_price` has passed 80 or 100 %."""
NoticeChannel = Literal["webhook", "email"]
Role = Literal["admin", "owner", "user"]

MAX_URL_CHARS = 500
MAX_EMAIL_CHARS = 200
MAX_NOTICE_CHARS = 500
"""Longest text of a notice; longer ones are cut."""
_EMAIL = re.compile(r"[A-Za-z0-9._%+-]{1,64}@(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)*[A-Za-z0-9-]{1,63}")


class Subscription(FrozenModel):
    """Where the notices of a user, an owner or an admin go, and about what; "" for a channel that is not used."""

    webhook: Annotated[str, Field(max_length=MAX_URL_CHARS)] = ""
    email: Annotated[str, Field(max_length=MAX_EMAIL_CHARS)] = ""
    topics: tuple[NoticeTopic, ...] = ("state", "faults", "sites", "budgets")

    @field_validator("webhook")
    @classmethod
    def _check_webhook(cls, value: str) -> str:
        if value:
            check_webhook(value)
        return value

    @field_validator("email")
    @classmethod
    def _check_email(cls, value: str) -> str:
        if value and not _EMAIL.fullmatch(value):
            raise ValueError("is no e-mail address, such as alice@example.org")
        return value

    @property
    def channels(self) -> tuple[NoticeChannel, ...]:
        """The channels that are used."""
        found: list[NoticeChannel] = (["webhook"] if self.webhook else []) + (["email"] if self.email else [])  # type: ignore[assignment]
        return tuple(found)


class SubscriptionView(FrozenModel):
    """A subscription; `secret` signs its webhooks, and is in the answer to setting it alone."""

    subscription: Subscription | None
    secret: Annotated[str, Field(repr=False)] = ""


class PoolNotice(FrozenModel):
    """One thing that happened: `kind` is that of the job's history, or `site-away`, `site-back`, `site-gone`,
    `budget-80`, `budget-100`."""

    kind: Name
    at_s: float
    job: str = ""
    site: str = ""
    text: Annotated[str, Field(max_length=MAX_NOTICE_CHARS)] = ""


class NoticeMessage(FrozenModel):
    """The body of a webhook: notices in order. `id` is its idempotency key: a message that is repeated has the same.

    `dropped` counts older notices that did not wait, since the receiver was away for too long.
    """

    type: Literal["isthmus.notices"] = "isthmus.notices"
    id: str
    role: Role
    name: Name
    notices: tuple[PoolNotice, ...]
    dropped: NonNegativeInt = 0


def check_webhook(url: str) -> None:
    """Raise `ValueError` for a URL that no webhook may have; its address is checked when it is dialled."""
    if not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        raise ValueError("has characters that no URL has")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("is no URL of a webhook, such as https://hooks.example.org/isthmus")
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise ValueError("has a user, a password or a fragment: a webhook proves itself by its signature")
    if parts.port == 0:  # `port` raises for one above 65535
        raise ValueError("has no port")
