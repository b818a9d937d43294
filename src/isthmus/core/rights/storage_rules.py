"""`StorageRules`: which folders of a site each user's jobs may read and write, as its owner's policy says. Pure.

Ownership rests on the place of a folder below a root, which the owner of the site chose, and on no file in the folder,
which another user may have written.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from itertools import combinations
from typing import Annotated, Literal

from pydantic import Field, model_validator

from isthmus.core.base_model import NAME_PATTERN, FrozenModel, Name
from isthmus.core.errors import InputError

Access = Literal["read", "write"]
"""`write` includes reading."""

USER, PROJECT = "{user}", "{project}"
"""Parts of a root's path that stand for the name of the job's user, and of each of the user's projects."""

RootPath = Annotated[str, Field(pattern=r"^(/|[a-z][a-z0-9+.-]*://)", max_length=1024)]

_LOCAL_SCHEMES = ("file", "local")
"""URLs of these schemes name files of the machine, which a root names by their paths."""


class StorageRoot(FrozenModel):
    """A folder or URL that jobs may use, with everything below it.

    In `path`, the part `{user}` stands for the name of the job's user and `{project}` for each project of the user.
    `users` limits the root to those users; an empty list means all.
    """

    path: RootPath
    access: Access = "write"
    users: tuple[Name, ...] = ()

    @model_validator(mode="after")
    def _check_path(self) -> StorageRoot:
        if strange := [part for part in _parts(self.path) if set("{}") & set(part) and part not in (USER, PROJECT)]:
            raise ValueError(f"'{strange[0]}' in {self.path}: {USER}, {PROJECT} stand alone between slashes")
        if _scheme(self.path) in _LOCAL_SCHEMES or ".." in self.path.split("/"):
            raise ValueError(f"{self.path}: name a folder of the site by its absolute path")
        return self


class StorageGrant(FrozenModel):
    """User `to` may read all roots of user `owner`, or the folder `path`."""

    to: Name
    owner: Name | None = None
    path: RootPath | None = None

    @model_validator(mode="after")
    def _check_one(self) -> StorageGrant:
        if (self.owner is None) == (self.path is None):
            raise ValueError("a grant names either an owner or a path")
        return self


class AllowedRoot(FrozenModel):
    """A root as it stands for one user."""

    path: str
    access: Access


class AllowedStorage(FrozenModel):
    """What the jobs of `user` may read and write at a site; of nested roots the innermost decides."""

    user: str
    roots: tuple[AllowedRoot, ...] = ()

    def resolve(self, path: str) -> str:
        """Return a path of a job as the site sees it: a relative one lies below the user's first writable root."""
        if "://" in path or path.startswith("/"):
            return path
        home = next((root.path for root in self.roots if root.access == "write" and "://" not in root.path), "")
        return posixpath.join(home, path) if home else path

    def access_to(self, path: str) -> Access | None:
        """Return what the user may do with an absolute path or URL, by its name alone; None: nothing."""
        place = _parts(path)
        if _is_disguised(path):
            return None
        found = [root for root in self.roots if place[: len(_parts(root.path))] == _parts(root.path)]
        innermost = max((len(_parts(root.path)) for root in found), default=0)
        accesses = {root.access for root in found if len(_parts(root.path)) == innermost}
        return ("read" if "read" in accesses else "write") if accesses else None

    def problem(self, path: str, access: Access) -> str:
        """Return why the user may not access the absolute `path` so, by its name alone; "" if the user may."""
        found = self.access_to(path)
        if found is None:
            return f"lies outside the storage roots of user '{self.user}'"
        return f"may only be read by user '{self.user}'" if (access, found) == ("write", "read") else ""

    def error(self, field: str, path: str, problem: str) -> InputError:
        """Return the refusal of `path` in field `field` of a job."""
        hint = f"{self.describe()}; use a folder there, or ask the owner of the site for a grant"
        return InputError(f"{field} {path} {problem}", hint=hint)

    def describe(self) -> str:
        """Return the roots as text."""
        by_access = {
            "may write below": [root.path for root in self.roots if root.access == "write"],
            "may read below": [root.path for root in self.roots if root.access == "read"],
        }
        listed = "; ".join(f"{what} {', '.join(found)}" for what, found in by_access.items() if found)
        return f"'{self.user}' {listed or 'has no root at this site'}"

    def with_grant(self, path: str) -> AllowedStorage:
        """Return these roots, and `path` for reading unless they contain it."""
        if self.access_to(path):
            return self
        return self.model_copy(update={"roots": (*self.roots, AllowedRoot(path=path, access="read"))})


class StorageRules(FrozenModel):
    """The storage roots of a site, and which users may read the roots of others.

    `projects` lists the users of each project. Without roots the site does not limit the paths of jobs.
    """

    projects: dict[Name, tuple[Name, ...]] = Field(default_factory=dict)
    roots: tuple[StorageRoot, ...] = ()
    grants: tuple[StorageGrant, ...] = ()

    @model_validator(mode="after")
    def _check_roots(self) -> StorageRules:
        if self.grants and not self.roots:
            raise ValueError("grants need roots: without roots every job may read every path")
        for one, other in combinations(self.roots, 2):
            if _is_ambiguous(_parts(one.path), _parts(other.path)):
                raise ValueError(
                    f"{one.path} and {other.path}: a user or project of the right name would get both; "
                    "use folders such as /data/users/{user} and /data/projects/{project}"
                )
            if _is_nested(one.path, other.path) and _audience(one) != _audience(other):
                raise ValueError(
                    f"{one.path} and {other.path}: one root lies in the other, but not the same users may use them; "
                    "place them side by side"
                )
        return self

    def of_user(self, user: str) -> AllowedStorage | None:
        """Return what the jobs of `user` may use; None: anything, since there are no roots."""
        if not self.roots:
            return None
        if not re.fullmatch(NAME_PATTERN, user):
            return AllowedStorage(user=user[:64])
        found = AllowedStorage(user=user, roots=tuple(self._own_roots(user)))
        for grant in self.grants:
            if grant.to == user:
                for root in self._own_roots(grant.owner) if grant.owner else ():
                    found = found.with_grant(root.path)
                found = found.with_grant(grant.path) if grant.path else found
        return found

    def below(self, folder: str) -> StorageRules:
        """Return the rules with their paths moved below the site's own storage folder; URLs are unchanged."""

        def moved(path: str) -> str:
            return path if "://" in path else posixpath.join(folder, path.lstrip("/"))

        roots = tuple(root.model_copy(update={"path": moved(root.path)}) for root in self.roots)
        grants = (one.model_copy(update={"path": one.path and moved(one.path)}) for one in self.grants)
        return self.model_copy(update={"roots": roots, "grants": tuple(grants)})

    def owner_of(self, path: str) -> str | None:
        """Return the user below whose own root, one with `{user}`, an absolute path lies."""
        place = _parts(path)
        for root in self.roots:
            pattern = _parts(root.path)
            if USER in pattern and PROJECT not in pattern and len(place) >= len(pattern):
                name = place[pattern.index(USER)]
                if [name if part == USER else part for part in pattern] == place[: len(pattern)]:
                    return name
        return None

    def _own_roots(self, user: str) -> list[AllowedRoot]:
        mine = [name for name, users in self.projects.items() if user in users]
        return [
            AllowedRoot(path=path.replace(USER, user), access=root.access)
            for root in self.roots
            if not root.users or user in root.users
            for path in ([root.path.replace(PROJECT, name) for name in mine] if PROJECT in root.path else [root.path])
        ]


def _parts(path: str) -> list[str]:
    """Return the scheme and the normal parts of a path or URL."""
    scheme, _, rest = path.rpartition("://")
    return [scheme, *(part for part in posixpath.normpath("/" + rest).split("/") if part)]


def _scheme(path: str) -> str:
    return path.partition("://")[0] if "://" in path else ""


def _is_disguised(path: str) -> bool:
    """Return whether a name may mean another place than its parts say: a chain of URLs, a file, an encoded `..`."""
    return "://" in path and (
        "::" in path or _scheme(path).lower() in _LOCAL_SCHEMES or path.count("://") > 1 or "%2e" in path.lower()
    )


def _is_nested(one: str, other: str) -> bool:
    return all(a == b for a, b in zip(_parts(one), _parts(other), strict=False))


def _audience(root: StorageRoot) -> tuple[frozenset[str], frozenset[str]]:
    """Return what decides who may use a root: its placeholders and its users."""
    return frozenset(part for part in _parts(root.path) if part in (USER, PROJECT)), frozenset(root.users)


def _is_ambiguous(one: list[str], other: list[str]) -> bool:
    """Return whether a name in place of a placeholder can make one path lie in the other."""
    pairs: Iterable[tuple[str, str]] = list(zip(one, other, strict=False))
    free = {USER, PROJECT}
    if any(a != b and not free & {a, b} for a, b in pairs):
        return False
    return any(a != b for a, b in pairs)
