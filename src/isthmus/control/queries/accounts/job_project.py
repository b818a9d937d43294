"""`job_project`: the project that a job belongs to."""

from __future__ import annotations

from isthmus.control.accounts.account_tree import AccountTree
from isthmus.core.errors import AuthError, InputError, NotFoundError
from isthmus.core.owner.accounts import Project


def job_project(tree: AccountTree, user: str, named: str | None) -> Project | None:
    """Return the project that a job names, or the only one of its user; None if it belongs to none.

    Raises `NotFoundError` for a project that does not exist or is not the user's (the same to a stranger), and
    `InputError` or `AuthError` if the job must name one.
    """
    own = tree.projects_of(user)
    if named is not None:
        if not tree.may_use(user, named):
            raise NotFoundError(
                f"project: user '{user}' has no project '{named}'",
                hint=f"its projects: {', '.join(own) or 'none; the operator names members'}",
            )
        return tree.projects[named]
    if len(own) == 1:
        return tree.projects[own[0]]
    if not tree.accounts.require_project:
        return None
    if not own:
        raise AuthError(
            f"user '{user}' is a member of no project, and jobs of this pool belong to one",
            hint="ask the operator of the pool: isthmus quota set",
        )
    raise InputError("project: the job must name one", hint=f"projects of {user}: {', '.join(own)}")
