"""Transitions of the catalogue: a user adds and removes versions of its entries, and grants them to others.

Entries belong to users, so an event names the owner, and nothing of another user's entry decides about it.
"""

from __future__ import annotations

from isthmus.control.queries.catalogue.catalogue_versions import require_entry, require_version
from isthmus.control.state.catalogue_records import EntryKey, EntryRecord, VersionRecord
from isthmus.control.state.events import EntryGranted, VersionAdded, VersionRemoved
from isthmus.control.state.job_records import PoolState
from isthmus.core.errors import ConflictError

MAX_GRANTS = 256
"""Most users with a grant of one entry."""
_TOKENIZER_FILE = "tokenizer.json"


def admit_version(state: PoolState, event: VersionAdded) -> bool:
    """Return whether the version is not the newest one of its entry already, from the same source."""
    entry = state.catalogue.get(_key(event))
    if entry is None:
        return True
    newest = entry.newest
    return (newest.version, newest.source) != (event.manifest.version, event.source)


def add_version(state: PoolState, event: VersionAdded) -> None:
    """Add the newest version of an entry; one that is there already gets the new source."""
    key, manifest = _key(event), event.manifest
    entry = state.catalogue.setdefault(key, EntryRecord(kind=key[0], owner=key[1], name=key[2]))
    known = entry.versions.pop(manifest.version, None)
    _count(state, event.owner, manifest.version, 0 if known else 1)
    entry.versions[manifest.version] = VersionRecord(
        version=manifest.version,
        source=event.source,
        num_files=len(manifest.files),
        num_bytes=manifest.num_bytes,
        added_s=event.now_s,
        manifest_json=manifest.canonical,
        has_tokenizer=manifest.has(_TOKENIZER_FILE),
        model_json=event.model.model_dump_json(by_alias=True) if event.model else "",
    )


def admit_grant(state: PoolState, event: EntryGranted) -> bool:
    """Return whether the grant changes; raise `NotFoundError` without the entry, `ConflictError` for too many."""
    entry = require_entry(state, event.owner, *_key(event))
    if event.granted and event.user not in entry.grants and len(entry.grants) >= MAX_GRANTS:
        raise ConflictError(f"{event.owner}/{event.name} is granted to {MAX_GRANTS} users already, the most there are")
    return event.user != event.owner and (event.user in entry.grants) != event.granted


def change_grant(state: PoolState, event: EntryGranted) -> None:
    """Grant an entry to a user, or take the grant back; jobs that were submitted before keep their versions."""
    grants = state.catalogue[_key(event)].grants
    (grants.add if event.granted else grants.discard)(event.user)


def admit_removal(state: PoolState, event: VersionRemoved) -> bool:
    """Return True; raise `NotFoundError` without the version, `ConflictError` while a live job uses it."""
    entry = require_entry(state, event.owner, *_key(event))
    if event.version is not None:
        require_version(entry, event.version)
    for job in state.live_jobs.values():
        for one in job.versions:
            if one.key == _key(event) and event.version in (None, one.version):
                whose = f"job {job.id}" if job.user == event.owner else "a job of a user with a grant"
                raise ConflictError(
                    f"{one} is used by {whose}", hint="wait until the job has ended, or have it cancelled"
                )
    return True


def remove_version(state: PoolState, event: VersionRemoved) -> None:
    """Remove a version, and the entry with its last one; sites drop their copies."""
    entry = state.catalogue[_key(event)]
    for version in [event.version] if event.version is not None else list(entry.versions):
        del entry.versions[version]
        _count(state, event.owner, version, -1)
    if not entry.versions:
        del state.catalogue[_key(event)]


def _count(state: PoolState, owner: str, version: str, change: int) -> None:
    """Count the entries of an owner that have a version."""
    number = state.num_entries.get((owner, version), 0) + change
    if number > 0:
        state.num_entries[owner, version] = number
    else:
        state.num_entries.pop((owner, version), None)


def _key(event: VersionAdded | EntryGranted | VersionRemoved) -> EntryKey:
    return event.entry_kind, event.owner, event.name
