"""`check_accounts`: refuses names that occur twice or that nothing has, cycles, and guarantees that cannot hold."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from isthmus.core.base_model import NAME_PATTERN
from isthmus.core.errors import FieldError
from isthmus.core.owner.accounts import GROUP_PREFIX, MAX_DEPTH, Accounts, Project
from isthmus.core.owner.chip_scope import ChipScope, within_scopes


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
    """A guarantee is at most the limit of each project on the way up, and those below one add up to at most its own.

    Both hold for all chips, and for those of each cluster and node group that is named.
    """
    projects = {one.name: one for one in accounts.projects}
    within = {one.name: within_scopes(one.guarantees) for one in accounts.projects}
    promised: Counter[tuple[str, ChipScope]] = Counter()
    for index, project in enumerate(accounts.projects):
        own = within[project.name]
        at: Project | None = project
        while at is not None:
            for scope, limit in at.limits.on_chips.items():
                if own.get(scope, 0) > limit:
                    raise FieldError(
                        f"{own[scope]} chips{scope.of_text} are guaranteed, but project {at.name} may hold {limit} at "
                        "once",
                        place=_guarantee_field(index, scope), hint="lower the guarantee, or raise the limit",
                    )  # fmt: skip
            at = projects[at.parent] if at.parent else None
        if project.parent is None:
            continue
        for scope, chips in own.items():
            promised[project.parent, scope] += chips
            below, most = promised[project.parent, scope], within[project.parent].get(scope, 0)
            if below > most:
                field = _guarantee_field(index, scope)
                raise FieldError(
                    f"the projects below {project.parent} are guaranteed {below} chips{scope.of_text}, "
                    f"{project.parent} itself {most}",
                    place=field, hint=f"raise {field[-1]} of {project.parent}, or lower this one",
                )  # fmt: skip


def _guarantee_field(index: int, scope: ChipScope) -> tuple[str, ...]:
    return "projects", str(index), "guaranteed_at" if scope.cluster else "guaranteed_chips"


def _nearest(name: str, known: Iterable[str], kind: str) -> str:
    found = difflib.get_close_matches(name, list(known), 1)
    return f"nearest: {found[0]}" if found else f"add it to `{kind}`"
