"""`with_limits`: the accounts of a pool with other limits of one of them."""

from __future__ import annotations

from pydantic import ValidationError

from isthmus.core.errors import InputError, NotFoundError
from isthmus.core.owner.accounts import NO_LIMITS, Accounts, Limits, Project, UserGroup, UserLimits


def with_limits(accounts: Accounts, account: str, limits: Limits) -> Accounts:
    """Return `accounts` with `limits` of `project:NAME`, `group:NAME` or `user:NAME` in place of those before.

    A user without limits is not listed. Raises `NotFoundError` for an unknown project or group, `InputError` for other
    text.
    """
    kind, _, name = account.partition(":")
    if kind not in ("project", "group", "user") or not name:
        raise InputError(f"'{account}' names no account", hint="write project:NAME, group:NAME or user:NAME")
    if kind == "user":
        return _with_user(accounts, name, limits)
    named: tuple[Project | UserGroup, ...] = accounts.projects if kind == "project" else accounts.groups
    if all(one.name != name for one in named):
        raise NotFoundError(f"no {kind} '{name}'", hint="isthmus quota show lists them; isthmus quota set adds one")
    changed = tuple(one.model_copy(update={"limits": limits}) if one.name == name else one for one in named)
    return accounts.model_copy(update={f"{kind}s": changed})


def _with_user(accounts: Accounts, name: str, limits: Limits) -> Accounts:
    others = tuple(one for one in accounts.users if one.name != name)
    if limits == NO_LIMITS:
        return accounts.model_copy(update={"users": others})
    try:
        return Accounts.model_validate(dict(accounts) | {"users": (*others, UserLimits(name=name, limits=limits))})
    except ValidationError as error:
        raise InputError(f"user '{name}': {error.errors()[0]['msg']}", hint="name a user as its token does") from error
