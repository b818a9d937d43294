"""`check_owner_users`: each user of the pool is one of at most one owner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from isthmus.core.pool_parts.placed_error import PlacedError

MAX_OWNER_USERS = 4_096
"""Most users of an owner."""


def check_owner_users(owners: Iterable[tuple[str, Sequence[str]]]) -> None:
    """Raise `PlacedError` for the first user that is listed twice; `owners` are names with their users."""
    seen: dict[str, str] = {}
    for index, (owner, users) in enumerate(owners):
        for at, user in enumerate(users):
            if user in seen:
                where = f"of owner {seen[user]}" if seen[user] != owner else "in this list"
                raise PlacedError(
                    f"user '{user}' is {where} already", ("owners", index, "users", at),
                    hint="list each user once, at the owner whose chips it would use without the pool",
                )  # fmt: skip
            seen[user] = owner
