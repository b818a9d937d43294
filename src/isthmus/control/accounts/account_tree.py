"""`AccountTree`: looks up the accounts that a job counts to, their limits, and the projects that a user may use.

An account is named `user:NAME`, `group:NAME` or `project:NAME`.
"""

from __future__ import annotations

from collections.abc import Iterable

from isthmus.core.owner.accounts import GROUP_PREFIX, NO_LIMITS, Accounts, Limits, Project

USER_PREFIX, PROJECT_PREFIX = "user:", "project:"


class AccountTree:
    """Lookups in `accounts`, which never change."""

    def __init__(self, accounts: Accounts) -> None:
        self.accounts = accounts
        self.projects: dict[str, Project] = {one.name: one for one in accounts.projects}
        self._groups_of: dict[str, list[str]] = {}
        for group in accounts.groups:
            for user in dict.fromkeys(group.members):
                self._groups_of.setdefault(user, []).append(group.name)
        self._limits: dict[str, Limits] = {
            **{USER_PREFIX + one.name: one.limits for one in accounts.users},
            **{GROUP_PREFIX + one.name: one.limits for one in accounts.groups},
            **{PROJECT_PREFIX + one.name: one.limits for one in accounts.projects},
        }
        self._chains = {name: self._chain_of(name) for name in self.projects}
        self._named = self._projects_by_member()
        self.has_limits = any(one != NO_LIMITS for one in self._limits.values())
        self.has_monthly_limits = any(one.is_monthly for one in self._limits.values())
        self.guarantees = {one.name: one.guarantees for one in accounts.projects if one.guarantees}
        self.has_places = any(one.chips_at for one in self._limits.values()) or any(
            one.guaranteed_at for one in accounts.projects
        )

    def limits(self, account: str) -> Limits:
        """Return the limits of an account; none for one that the accounts do not name."""
        return self._limits.get(account, NO_LIMITS)

    def limited(self) -> Iterable[tuple[str, Limits]]:
        """Return every account that has limits, with them."""
        return ((name, limits) for name, limits in self._limits.items() if limits != NO_LIMITS)

    def chain(self, project: str) -> tuple[str, ...]:
        """Return a project and those above it, the lowest first; empty for "" and a project that is gone."""
        return self._chains.get(project, ())

    def accounts_of(self, user: str, project: str) -> tuple[str, ...]:
        """Return the accounts that a job counts to: its user, the groups of it, its project and those above."""
        groups = (GROUP_PREFIX + name for name in self._groups_of.get(user, ()))
        return (USER_PREFIX + user, *groups, *(PROJECT_PREFIX + name for name in self.chain(project)))

    def projects_of(self, user: str) -> tuple[str, ...]:
        """Return the projects that name a user as a member, itself or through a group."""
        members = (user, *(GROUP_PREFIX + name for name in self._groups_of.get(user, ())))
        return tuple(dict.fromkeys(name for member in members for name in self._named.get(member, ())))

    def may_use(self, user: str, project: str) -> bool:
        """Return whether a user is a member of a project or of one above it."""
        named = self.projects_of(user)
        return any(name in named for name in self.chain(project))

    def below(self, project: str) -> frozenset[str]:
        """Return a project with all projects below it."""
        return frozenset(name for name, chain in self._chains.items() if project in chain)

    def paths(self) -> dict[str, tuple[str, ...]]:
        """Return by account of a project those of the projects above it and its own, the highest first.

        Behind that of a project with others below it is "", for its own jobs: they share with these.
        """
        parents = {project.parent for project in self.projects.values()}
        return {
            PROJECT_PREFIX + name: (
                *(PROJECT_PREFIX + one for one in reversed(chain)),
                *([""] if name in parents else []),
            )
            for name, chain in self._chains.items()
        }

    def shares(self) -> dict[str, float]:
        """Return the weight of each project's own jobs among all, by account (Slurm's normalised shares).

        A project at the top has its weight. It is divided among the projects right below it by theirs, and its own
        jobs, which count as one more of weight 1; so the shares below a project sum to its weight.
        """
        below: dict[str, float] = {}
        for project in self.projects.values():
            if project.parent in self.projects:
                below[project.parent or ""] = below.get(project.parent or "", 0.0) + project.weight
        found: dict[str, float] = {}
        for name, chain in self._chains.items():
            share = self.projects[chain[-1]].weight
            for parent, child in zip(chain[:0:-1], chain[-2::-1], strict=True):
                share *= self.projects[child].weight / (1 + below[parent])
            found[PROJECT_PREFIX + name] = share / (1 + below[name]) if name in below else share
        return found

    def _chain_of(self, name: str) -> tuple[str, ...]:
        found, at = list[str](), self.projects.get(name)
        while at is not None:
            found.append(at.name)
            at = self.projects.get(at.parent) if at.parent else None
        return tuple(found)

    def _projects_by_member(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for project in self.accounts.projects:
            for member in dict.fromkeys(project.members):
                found.setdefault(member, []).append(project.name)
        return found
