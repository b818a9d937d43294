"""Bodies of the REST interface for tokens and the audit log, shared by server and command line."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from isthmus.core.base_model import FrozenModel, Name, NonNegativeFloat, NonNegativeInt, PositiveInt

MAX_TEXT_CHARS = 200
"""Longest subject of an audit record, and longest name of its actor."""
MAX_DETAIL_CHARS = 500
"""Longest detail of an audit record."""


class TokenInfo(FrozenModel):
    """A token without the token itself. `state` says whether it still counts; times in seconds since the epoch.

    A `joiner` is the code of an invitation; `site` is the cluster whose agent has the token as its key; `session_of` is
    the id of the token that signed in to the console, for a session of it.
    """

    id: str
    role: Literal["admin", "owner", "user", "joiner"]
    name: Name
    state: Literal["valid", "expired", "revoked"]
    created_s: float
    created_by: str = ""
    expires_s: float | None = None
    revoked_s: float | None = None
    high: bool = False
    site: str = ""
    session_of: str = ""


class OidcView(FrozenModel):
    """The provider by which persons sign in to the console; None: they sign in with tokens only."""

    issuer: str | None = None


class OidcBegun(FrozenModel):
    """A sign-in that has begun: the address at the provider that the browser opens."""

    url: str


class OidcAnswer(FrozenModel):
    """What the provider sent back to the console: its code, and the state of the sign-in."""

    code: Annotated[str, Field(min_length=1, max_length=4096)]
    state: Annotated[str, Field(min_length=1, max_length=200)]


class DeviceBegun(FrozenModel):
    """A sign-in of a command (RFC 8628, 3.2): a person opens `url` anywhere and enters `user_code` there.

    With `device_code`, its secret, the command asks for its token every `interval_s`, for `expires_in_s`.
    `complete_url` has the code in it, if the provider gives one.
    """

    device_code: Annotated[str, Field(min_length=1, max_length=4096, repr=False)]
    user_code: Annotated[str, Field(min_length=1, max_length=64)]
    url: Annotated[str, Field(max_length=1024)]
    complete_url: Annotated[str, Field(max_length=2048)] | None = None
    expires_in_s: Annotated[PositiveInt, Field(le=1800)]
    interval_s: Annotated[PositiveInt, Field(le=60)] = 5


class DeviceCode(FrozenModel):
    """The secret of a command that has begun to sign in."""

    device_code: Annotated[str, Field(min_length=1, max_length=4096, repr=False)]


class DeviceAnswer(FrozenModel):
    """The token of a person that has signed in for a command; None: not yet, ask again after `interval_s` more.

    `expires_s` is in seconds since the epoch.
    """

    token: Annotated[str | None, Field(repr=False)] = None
    role: Literal["admin", "owner", "user"] | None = None
    name: Name | None = None
    expires_s: float | None = None
    slow_down: bool = False


class SessionView(FrozenModel):
    """A session of the console. Its `key` is in the answer to signing in alone; it counts together with the cookie.

    Without a session: the caller's token. `expires_s` is in seconds since the epoch, None for a token without an end.
    """

    id: str
    role: Literal["admin", "owner", "user"]
    name: Name
    expires_s: float | None = None
    key: Annotated[str, Field(repr=False)] = ""


class LimitUse(FrozenModel):
    """What a user has of its limits: jobs that have not ended, and bytes of all its jobs."""

    user: Name
    live_jobs: NonNegativeInt
    stored_bytes: NonNegativeInt


class LimitsView(FrozenModel):
    """The operator's limits for each user and owner (`isthmus serve`), and the users that have most of them in use."""

    limits: dict[str, NonNegativeInt]
    high_priority_users: tuple[Name, ...]
    users: tuple[LimitUse, ...]


class TokenGrant(FrozenModel):
    """Whether jobs that are submitted with a token may have priority `high`, which may preempt others."""

    high: bool


class TokenRotation(FrozenModel):
    """How a token is replaced: the old one counts for `grace_s` more, the new one as long as the old one did."""

    grace_s: Annotated[NonNegativeFloat, Field(le=30 * 86400.0)] = 3600.0


class AuditRecord(FrozenModel):
    """One record of the audit log: `actor` (with `role` and the id of its `token`, at `address`) did `action`.

    `subject` is what it was done to: a job, a token, a cluster. `number` is 0 and `hash` (SHA-256 over the line and the
    hash before, hexadecimal) is empty until the record is stored.
    """

    number: NonNegativeInt = 0
    at_s: float
    action: Name
    actor: Annotated[str, Field(max_length=MAX_TEXT_CHARS)] = ""
    role: Annotated[str, Field(max_length=20)] = ""
    token: Annotated[str, Field(max_length=20)] = ""
    address: Annotated[str, Field(max_length=64)] = ""
    subject: Annotated[str, Field(max_length=MAX_TEXT_CHARS)] = ""
    detail: Annotated[str, Field(max_length=MAX_DETAIL_CHARS)] = ""
    hash: Annotated[str, Field(max_length=64)] = ""


class AuditFilter(FrozenModel):
    """Which audit records are wanted: those since a time (seconds since the epoch), of an actor or about it."""

    since_s: NonNegativeFloat | None = None
    user: Annotated[str, Field(max_length=MAX_TEXT_CHARS)] | None = None


class AuditPage(FrozenModel):
    """Records of the audit log in order; request the next page with `after=next`.

    The first hash of the chain follows from the identity of the `store`.
    """

    records: tuple[AuditRecord, ...]
    next: NonNegativeInt
    store: str = ""
