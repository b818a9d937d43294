"""`check_accounts`: refuses names that occur twice or that nothing has, cycles, and guarantees that cannot hold."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Sequence

from isthmus.core.base_model import NAME_PATTERN
from isthmus.core.errors import FieldError
from isthmus.core.owner.accounts import GROUP_PREFIX, MAX_DEPTH, Accounts, Project


def check_accounts(accounts: Accounts) -> None:
    """Raise `FieldError` for the first field that contradicts another one."""
    for kind, named in (("projects", accounts.projects), ("groups", accounts.groups), ("users", accounts.users)):
        _check_unique(kind, [one.name for one in named])
    groups = {one.name for one in accounts.groups}
    for index, project in enumerate(accounts.projects):
        _check_members(index, project, groups)
    _check_tree(accounts)
    _check_guarantees(accounts)


def _check_unique(kind: str, names: Sequence[str]) -> None:
    seen: dict[str, int] = {}
    for index, name in enumerate(names):
        if name in seen:
            raise FieldError(
                f"'{name}' is entry {seen[name] + 1} already", place=(kind, str(index), "name"),
                hint="give each a name of its own",
            )  # fmt: skip
        seen[name] = index


def _check_members(index: int, project: Project, groups: Collection[str]) -> None:
    for place, member in enumerate(project.members):
        where = ("projects", str(index), "members", str(place))
        name = member.removeprefix(GROUP_PREFIX)
        if member.startswith(GROUP_PREFIX) and name not in groups:
            raise FieldError(f"there is no group '{name}'", place=where, hint=_nearest(name, groups, "groups"))
        if not re.fullmatch(NAME_PATTERN, name):
            raise FieldError(f"'{member}' is no name of a user", place=where, hint="write a user, or group:NAME")


def _check_tree(accounts: Accounts) -> None:
    parents = {one.name: one.parent for one in accounts.projects}
    for index, project in enumerate(accounts.projects):
        where = ("projects", str(index), "parent")
        if project.parent is not None and project.parent not in parents:
            hint = _nearest(project.parent, parents, "projects")
            raise FieldError(f"there is no project '{project.parent}'", place=where, hint=hint)
        above, at = [project.name], project.parent
        while at is not None and at in parents:
            if at in above:
                chain = " > ".join([*above, at])
                raise FieldError(f"the project is above itself: {chain}", place=where, hint="remove one parent")
            above.append(at)
            if len(above) > MAX_DEPTH:
                raise FieldError(f"the tree is deeper than {MAX_DEPTH} projects", place=where, hint="make it flatter")
            at = parents[at]


def _check_guarantees(accounts: Accounts) -> None:
    """A guarantee is at most the limit of each project on the way up, and those below one add up to at most its own."""
    projects = {one.name: one for one in accounts.projects}
    promised: dict[str, int] = {}
    for index, project in enumerate(accounts.projects):
        where = ("projects", str(index), "guaranteed_chips")
        at: Project | None = project
        while at is not None:
            limit = at.limits.chips
            if limit is not None and project.guaranteed_chips > limit:
                raise FieldError(
                    f"{project.guaranteed_chips} chips are guaranteed, but project {at.name} may hold {limit} at once",
                    place=where, hint="lower the guarantee, or raise the limit",
                )  # fmt: skip
            at = projects[at.parent] if at.parent else None
        parent = projects[project.parent] if project.parent else None
        if parent is None:
            continue
        promised[parent.name] = promised.get(parent.name, 0) + project.guaranteed_chips
        if promised[parent.name] > parent.guaranteed_chips:
            raise FieldError(
                f"the projects below {parent.name} are guaranteed {promised[parent.name]} chips, "
                f"{parent.name} itself {parent.guaranteed_chips}",
                place=where, hint=f"raise guaranteed_chips of {parent.name}, or lower this one",
            )  # fmt: skip


def _nearest(name: str, known: Iterable[str], kind: str) -> str:
    found = difflib.get_close_matches(name, list(known), 1)
    return f"nearest: {found[0]}" if found else f"add it to `{kind}`"
