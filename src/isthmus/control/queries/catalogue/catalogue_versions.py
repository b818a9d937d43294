"""Queries on the catalogue: entries as their users may see them, and versions by their names. Read only.

What a user may not see does not exist for it: entries of others without a grant are reported as not found.
"""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.control.state.catalogue_records import EntryRecord, VersionRecord, kind_of_field, may_name_entries
from isthmus.control.state.job_records import JobRecord, PoolState
from isthmus.core.catalogue import (
    SHORT_VERSION_CHARS,
    CatalogueName,
    CopyKey,
    EntryKind,
    HeldCopy,
    NeededVersion,
    is_catalogue_name,
)
from isthmus.core.errors import InputError, NotFoundError
from isthmus.core.job import Job, job_accesses, with_paths
from isthmus.core.views.catalogue_views import CopyView, EntryView, VersionView


def require_entry(state: PoolState, user: str | None, kind: EntryKind, owner: str, name: str) -> EntryRecord:
    """Return an entry that `user` (None: an operator) may use; raise `NotFoundError` otherwise."""
    entry = state.catalogue.get((kind, owner, name))
    if entry is None or not entry.admits(user):
        raise no_entry(kind, owner, name)
    return entry


def no_entry(kind: EntryKind, owner: str, name: str) -> NotFoundError:
    """Return the error for an entry that does not exist, or that the caller may not see."""
    listing = "models" if kind == "model" else kind
    return NotFoundError(f"no {kind} '{owner}/{name}' in the catalogue", hint=f"`isthmus {listing} list` lists them")


def require_version(entry: EntryRecord, version: str | None) -> VersionRecord:
    """Return the version of an entry with these first digits (None: the newest); raise `NotFoundError` if not one."""
    if version is None:
        return entry.newest
    found = [one for one in entry.versions.values() if one.version.startswith(version)]
    if len(found) != 1:
        known = ", ".join(one[:SHORT_VERSION_CHARS] for one in list(entry.versions)[-5:])
        what = "has no version" if not found else f"has {len(found)} versions"
        raise NotFoundError(f"{entry.owner}/{entry.name} {what} '{version}'", hint=f"its newest versions: {known}")
    return found[0]


def list_entries(state: PoolState, user: str | None, kind: EntryKind) -> tuple[EntryView, ...]:
    """Return the entries of a kind that `user` (None: an operator) may use, in the order of owner and name."""
    found = [one for key, one in state.catalogue.items() if key[0] == kind and one.admits(user)]
    return tuple(entry_view(state, one, user) for one in sorted(found, key=lambda one: (one.owner, one.name)))


def entry_view(state: PoolState, entry: EntryRecord, user: str | None) -> EntryView:
    """Return an entry with its versions and copies; only its owner and an operator see the grants."""
    return EntryView(
        kind=entry.kind,
        owner=entry.owner,
        name=entry.name,
        grants=tuple(sorted(entry.grants)) if user in (None, entry.owner) else (),
        own=user == entry.owner,
        versions=tuple(version_view(state, entry, one) for one in entry.versions.values()),
    )


def version_view(state: PoolState, entry: EntryRecord, record: VersionRecord) -> VersionView:
    """Return a version with the sites that have copies of it."""
    return VersionView(
        version=record.version,
        source=record.source,
        num_files=record.num_files,
        num_bytes=record.num_bytes,
        added_s=record.added_s,
        has_tokenizer=record.has_tokenizer,
        model=record.model,
        copies=tuple(_copies(state, entry.owner, record.version)),
    )


def _copies(state: PoolState, owner: str, version: str) -> Iterator[CopyView]:
    for name, cluster in state.clusters.items():
        held = copy_at(state, name, owner, version)
        if held is not None and (held.num_bytes or held.problem):
            yield CopyView(
                cluster=name,
                connected=cluster.connected,
                num_bytes=held.num_bytes,
                complete=held.complete,
                problem=held.problem,
            )


def copy_at(state: PoolState, cluster: str, owner: str, version: str) -> HeldCopy | None:
    """Return a site's copy of a version as last reported, None if it has none."""
    record = state.clusters.get(cluster)
    return record.copies.get((owner, version)) if record is not None and record.copies else None


def pin_versions(state: PoolState, user: str, job: Job) -> Job:
    """Return `job` with the names of the catalogue that it reads made full: owner and version.

    Raises `NotFoundError` for an entry that `user` may not use, and `InputError` for one as a place to write.
    """
    if not may_name_entries(job) or not any(is_catalogue_name(path) for _, path, _ in job_accesses(job)):
        return job

    def pinned(field: str, path: str) -> str:
        if not is_catalogue_name(path):
            return path
        if field not in ("model", "data.paths", "data.tokenizer"):
            raise InputError(f"{field}: {path} is an entry of the catalogue", hint="name a folder of the sites")
        given = CatalogueName.parse(path)
        owner = given.owner or user
        entry = require_entry(state, user, kind_of_field(field), owner, given.name)
        version = require_version(entry, given.version)
        if field == "data.tokenizer" and not version.has_tokenizer:
            raise InputError(f"{field}: {path} has no tokenizer.json", hint="name a model that has one, or 'bytes'")
        return str(CatalogueName(owner=owner, name=given.name, version=version.version))

    return with_paths(job, pinned)


def with_pins_of(stored: Job, job: Job, user: str) -> Job:
    """Return `job` of `user` with its names as `stored` has them, where those are full forms of the same names."""
    pairs = zip(job_accesses(stored), job_accesses(job), strict=False)
    full = {
        (field, here): there
        for (_, there, _), (field, here, _) in pairs
        if is_catalogue_name(here) and is_catalogue_name(there) and _is_full_form(there, here, user)
    }
    return with_paths(job, lambda field, path: full.get((field, path), path)) if full else job


def _is_full_form(there: str, here: str, user: str) -> bool:
    full, given = CatalogueName.parse(there), CatalogueName.parse(here)
    same_entry = (full.owner, full.name) == (given.owner or user, given.name)
    return same_entry and (full.version or "").startswith(given.version or "")


def needed_versions(state: PoolState, job: JobRecord, cluster: str) -> tuple[NeededVersion, ...]:
    """Return the versions that the part of the job's plan at `cluster` needs there."""
    if not job.versions or job.plan is None:
        return ()
    reads = job.plan.reads_data(cluster)
    found = []
    for one in job.versions:
        entry = state.catalogue.get(one.key)
        record = entry.versions.get(one.version) if entry else None
        if record is not None and (one.everywhere or reads):
            found.append(
                NeededVersion(
                    owner=one.owner,
                    version=one.version,
                    kind=one.kind,
                    name=one.name,
                    source=record.source,
                    num_bytes=record.num_bytes,
                )
            )
    return tuple(found)


def missing_versions(state: PoolState, job: JobRecord) -> dict[str, tuple[NeededVersion, ...]]:
    """Return what the sites of the job's plan must still bring before it can start, by cluster."""
    found = {}
    for cluster in job.plan.clusters if job.plan is not None and job.versions else ():
        lacking = tuple(
            one
            for one in needed_versions(state, job, cluster)
            if not ((held := copy_at(state, cluster, one.owner, one.version)) and held.complete)
        )
        if lacking:
            found[cluster] = lacking
    return found


def orphaned_copies(state: PoolState, cluster: str) -> tuple[CopyKey, ...]:
    """Return the copies that a site has reported of versions that the catalogue no longer has."""
    record = state.clusters.get(cluster)
    if record is None or not record.copies:
        return ()
    gone = (key for key in record.copies if key not in state.num_entries)
    return tuple(CopyKey(owner=owner, version=version) for owner, version in gone)


def ordered_version(state: PoolState, cluster: str, key: CopyKey) -> VersionRecord:
    """Return a version that a part at `cluster` needs; raise `NotFoundError` for any other."""
    record = state.clusters.get(cluster)
    for part in record.parts.values() if record is not None else ():
        job = state.jobs[part.job]
        for one in job.versions if part.desired != "released" else ():
            if (one.owner, one.version) == (key.owner, key.version):
                entry = state.catalogue.get(one.key)
                if entry is not None and one.version in entry.versions:
                    return entry.versions[one.version]
    raise NotFoundError(f"no part at '{cluster}' needs version {key}")
