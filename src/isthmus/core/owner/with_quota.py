"""`with_quota`: the accounts of a pool with another quota of one of them; `QuotaChange` is that quota."""

from __future__ import annotations

from pydantic import ValidationError

from isthmus.core.errors import InputError, NotFoundError
from isthmus.core.owner.accounts import NO_LIMITS, Accounts, Limits, PlacedChips, Project, UserGroup, UserLimits


class QuotaChange(Limits):
    """The limits of one account, in place of those before, and what a project is guaranteed at clusters.

    Without `guaranteed_at` the guarantee stays as it is.
    """

    guaranteed_at: PlacedChips | None = None

    @property
    def limits(self) -> Limits:
        """The limits alone."""
        return Limits(**{name: getattr(self, name) for name in Limits.model_fields})


def with_quota(accounts: Accounts, account: str, change: QuotaChange) -> Accounts:
    """Return `accounts` with another quota of `project:NAME`, `group:NAME` or `user:NAME`.

    A user without limits is not listed. Raises `NotFoundError` for an unknown project or group, `InputError` for other
    text and for a guarantee of a user or group.
    """
    kind, _, name = account.partition(":")
    if kind not in ("project", "group", "user") or not name:
        raise InputError(f"'{account}' names no account", hint="write project:NAME, group:NAME or user:NAME")
    if change.guaranteed_at is not None and kind != "project":
        raise InputError(f"guaranteed_at: a {kind} has no guarantee", hint="guarantee chips to a project of it")
    if kind == "user":
        return _with_user(accounts, name, change.limits)
    named: tuple[Project | UserGroup, ...] = accounts.projects if kind == "project" else accounts.groups
    if all(one.name != name for one in named):
        raise NotFoundError(f"no {kind} '{name}'", hint="isthmus quota show lists them; isthmus quota set adds one")
    given: dict[str, object] = {"limits": change.limits}
    if change.guaranteed_at is not None:
        given["guaranteed_at"] = change.guaranteed_at
    changed = tuple(one.model_copy(update=given) if one.name == name else one for one in named)
    return accounts.model_copy(update={f"{kind}s": changed})


def _with_user(accounts: Accounts, name: str, limits: Limits) -> Accounts:
    others = tuple(one for one in accounts.users if one.name != name)
    if limits == NO_LIMITS:
        return accounts.model_copy(update={"users": others})
    try:
        return Accounts.model_validate(dict(accounts) | {"users": (*others, UserLimits(name=name, limits=limits))})
    except ValidationError as error:
        raise InputError(f"user '{name}': {error.errors()[0]['msg']}", hint="name a user as its token does") from error
