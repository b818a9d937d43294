"""Paths of a job at a site, followed through symbolic links: below the roots of its user, and in no folder of another.

The agent checks before a worker starts and hands it the places that the links led to; the worker checks again that no
link has been put there since (`check_unmoved`). Where the kernel has Landlock, it holds the worker to the same roots at
every access (`core/process/confined_start.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from isthmus.core.errors import InputError
from isthmus.core.job import Job, job_accesses, with_paths
from isthmus.core.rights.storage_rules import Access, AllowedStorage
from isthmus.core.runs.run_folder import read_claim
from isthmus.core.runs.run_identity import RunIdentity

_WILDCARDS = "*?["
MAX_ENTRIES_CHECKED = 200_000
"""Entries below a folder of a job among which links are looked for."""


def resolve_path(field: str, path: str, access: Access, user: str, allowed: AllowedStorage | None) -> str:
    """Return where `path` leads, with all links followed; URLs and the wildcards of a glob are unchanged.

    Raises `InputError` if that is outside the roots of the user, or in a folder of another user's job. Nothing outside
    the roots is looked at.
    """
    named = path if allowed is None else allowed.resolve(path)
    if allowed is not None and (problem := allowed.problem(named, access)):
        raise allowed.error(field, path, problem)
    if "://" in named:
        return named
    fixed, pattern = _split_glob(named)
    real = _real_path(field, fixed)
    if allowed is None:
        refuse_foreign(field, Path(real), access, user)
        return named
    _require_inside(field, path, real, access, allowed)
    if access == "write":
        refuse_foreign(field, Path(real), access, user)
    return f"{real}/{pattern}" if pattern else real


def resolve_job(job: Job, user: str, allowed: AllowedStorage | None) -> Job:
    """Return the job with its paths resolved; raises `InputError` like `resolve_path`.

    Without roots the paths are unchanged. Links below a folder are not looked for (`check_links_below`).
    """
    real = {
        (field, path): resolve_path(field, path, access, user, allowed) for field, path, access in job_accesses(job)
    }
    return job if allowed is None else with_paths(job, lambda field, path: real[field, path])


def check_unmoved(job: Job, user: str, allowed: AllowedStorage | None) -> None:
    """Raise `InputError` if a path of `resolve_job` leads elsewhere now, or if a link below one leads outside."""
    for field, path, access in job_accesses(job):
        if resolve_path(field, path, access, user, allowed) != path:
            raise InputError(
                f"{field} {path} has become a symbolic link since the agent checked it",
                hint="remove the link, and find out which account has made it",
            )
        if allowed is not None:
            check_links_below(field, path, allowed)


def check_links_below(field: str, place: str, allowed: AllowedStorage) -> None:
    """Raise `InputError` if a link below `place`, a resolved path that a job reads, leads out of the user's roots."""
    if "://" in place:
        return
    fixed, _ = _split_glob(place)
    for entry in _links(fixed):
        _require_inside(field, entry, _real_path(field, entry), "read", allowed)


def static_root(path: str) -> str:
    """Return a path, or the folder before the first wildcard of a glob."""
    return _split_glob(path)[0]


def refuse_foreign(field: str, place: Path, access: Access, user: str) -> None:
    """Raise `InputError` if `place` is or lies in a folder of another user's job; its readers may read it."""
    if not user:
        return
    for folder in (place, *place.parents):
        claim = _claim_of(folder, place)
        if claim is None or claim.user in ("", user) or (access == "read" and user in claim.readers):
            continue
        raise InputError(
            f"{field} {place} belongs to a job of another user than '{user}'",
            hint="use a folder of your own" if access == "write" else "its user may name you in the job's `readers`",
        )


def is_granted_by_claim(folder: Path, owner: str, user: str) -> bool:
    """Return whether `folder`, below the root of `owner`, is of a job that names `user` among its readers."""
    claim = _claim_of(folder, folder)
    return claim is not None and claim.user == owner and user in claim.readers


def _claim_of(folder: Path, place: Path) -> RunIdentity | None:
    """Return the claim of a folder; in a folder above `place`, only one that the folder's own account has made."""
    if folder == place:
        return read_claim(folder)
    try:
        claim = read_claim(folder)
        if claim is None or (folder / ".isthmus-run").lstat().st_uid != folder.stat().st_uid:
            return None
    except (InputError, OSError):
        return None
    return claim


def _real_path(field: str, path: str) -> str:
    """Return `path` with all links followed; raise `InputError` if it goes through a loop of links.

    `os.path.realpath` leaves everything after such a loop as it is, so that `loop/../link` would keep its last link.
    """
    real = os.path.realpath(path)
    if os.path.realpath(real) != real:
        raise InputError(f"{field} {path} goes through a loop of symbolic links", hint="remove the loop")
    return real


def _require_inside(field: str, path: str, real: str, access: Access, allowed: AllowedStorage) -> None:
    """Raise `InputError` unless `real`, without links, is inside the real places of the roots."""
    roots = tuple(
        root if "://" in root.path else root.model_copy(update={"path": os.path.realpath(root.path)})
        for root in allowed.roots
    )
    if problem := allowed.model_copy(update={"roots": roots}).problem(real, access):
        raise allowed.error(field, path, f"leads to {real}, which {problem}")


def _links(folder: str) -> Iterator[str]:
    """Yield the symbolic links below a folder, of its first `MAX_ENTRIES_CHECKED` entries; enter no linked folder."""
    num_left, folders = MAX_ENTRIES_CHECKED, [folder]
    while folders and num_left > 0:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                num_left -= 1
                if entry.is_symlink():
                    yield entry.path
                elif entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                if num_left <= 0:
                    return


def _split_glob(path: str) -> tuple[str, str]:
    """Return the part of a path before its first wildcard, and the rest."""
    parts = path.split("/")
    first = next((n for n, part in enumerate(parts) if any(sign in part for sign in _WILDCARDS)), len(parts))
    return "/".join(parts[:first]) or "/", "/".join(parts[first:])
