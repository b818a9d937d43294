"""`SiteStorage`: the paths of jobs as they are at this site, held to the storage roots of their users."""

from __future__ import annotations

import os
from pathlib import Path

from isthmus.agent.files.file_transfer import storage_path
from isthmus.agent.files.version_cache import VersionCache
from isthmus.core.catalogue import CatalogueName, CopyKey, is_catalogue_name
from isthmus.core.errors import InputError
from isthmus.core.job import Job, job_accesses, with_own_folders, with_paths
from isthmus.core.rights.storage_rules import Access, AllowedStorage, StorageRules
from isthmus.core.runs.storage_access import (
    check_links_below,
    is_granted_by_claim,
    resolve_job,
    resolve_path,
    static_root,
)


class SiteStorage:
    """The storage of a site: the owner's `rules`, and the site's own storage folder `root` if it has one.

    Entries of the catalogue lie in `cache`; a job reaches the versions that it names, and nothing else in there.
    """

    def __init__(
        self, rules: StorageRules | None = None, root: Path | None = None, cache: VersionCache | None = None
    ) -> None:
        self._pool_rules, self.root, self._cache = rules or StorageRules(), root, cache
        self._rules = self._pool_rules if root is None else self._pool_rules.below(str(root))

    def allowed(self, user: str) -> AllowedStorage | None:
        """Return what the jobs of `user` may use, as paths of this site; None: any path."""
        return self._rules.of_user(user)

    def may_read(self, path: str, user: str) -> bool:
        """Return whether jobs of `user` may read a path of the pool, by its name alone."""
        allowed = self._pool_rules.of_user(user)
        return allowed is None or allowed.access_to(path) is not None

    def local(self, path: str, user: str = "") -> str:
        """Return the place of a path of a job of `user` at this site, by its name."""
        allowed = self._pool_rules.of_user(user)
        named = path if allowed is None else allowed.resolve(path)
        return named if self.root is None or "://" in named else str(storage_path(self.root, named))

    def resolve(self, field: str, path: str, access: Access, user: str) -> str:
        """Return where a path of a job leads; raises `InputError` if `user` may not access it so."""
        place = self.local(path, user)
        allowed = self._with_claim_grant(field, place, user)
        real = resolve_path(field, place, access, user, allowed)
        if allowed is not None:
            check_links_below(field, real, allowed)
        self._refuse_cache(field, path, real)
        return real

    def resolve_job(self, job_id: str, job: Job, user: str) -> tuple[Job, AllowedStorage | None]:
        """Return the job with the places that its paths lead to, and what it may use; raises `InputError`.

        Without roots only the site's storage folder changes its paths.
        """
        own = with_own_folders(job, job_id)
        allowed = self._pool_rules.of_user(user)
        copies = {path: self._copy(path) for _, path, _ in job_accesses(own) if is_catalogue_name(path)}

        def placed(_: str, path: str) -> str:
            if path in copies:
                return copies[path]
            named = path if allowed is None else allowed.resolve(path)
            return named if self.root is None or "://" in named else str(storage_path(self.root, named))

        here = with_paths(own, placed)
        limits = self._with_claim_grant("resume", here.resume_folder or "", user)
        for folder in copies.values():
            limits = limits.with_grant(folder) if limits is not None else None
        real = resolve_job(here, user, limits)
        for (field, path, _), (_, place, _) in zip(job_accesses(own), job_accesses(real), strict=True):
            if path not in copies:
                self._refuse_cache(field, path, place)
        return real, limits

    def _copy(self, name: str) -> str:
        """Return the folder of a version at this site, by its full name; raise `InputError` for any other name."""
        given = CatalogueName.parse(name)
        if self._cache is None or given.owner is None or not given.is_pinned:
            raise InputError(f"{name} is not brought by this site", hint="use the same release of agent and server")
        return str(self._cache.place(CopyKey(owner=given.owner, version=given.version or "")))

    def _refuse_cache(self, field: str, path: str, place: str) -> None:
        """Raise `InputError` if a path of a job leads into the site's copies of the catalogue, or contains them."""
        if self._cache is not None and "://" not in place and self._cache.holds(static_root(place)):
            raise InputError(
                f"{field} {path} is, or contains, where this site keeps its copies of the catalogue",
                hint="name the entry: catalogue:NAME; or a folder beside it",
            )

    def _with_claim_grant(self, field: str, place: str, user: str) -> AllowedStorage | None:
        """Return what `user` may use, with a folder to resume from whose job names the user among its readers.

        The claim of that folder counts, because only jobs of its user may write below the root in which it lies.
        """
        allowed = self.allowed(user)
        if allowed is None or field != "resume" or not place or allowed.access_to(place):
            return allowed
        owner = self._rules.owner_of(place)
        theirs = self._rules.of_user(owner) if owner else None
        if owner is None or theirs is None:
            return allowed
        try:
            real = resolve_path(field, place, "write", owner, theirs)
        except InputError:
            return allowed
        if os.path.normpath(place) != real or not is_granted_by_claim(Path(real), owner, user):
            return allowed
        return allowed.with_grant(real)
