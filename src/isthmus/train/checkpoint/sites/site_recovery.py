"""Find a checkpoint that lies at several sites, and complete one that a crash left half published.

All ranks call each function of this module. A checkpoint counts if every file of its manifest is whole at some site
of this attempt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated

from pydantic import Field

from isthmus.core.base_model import FrozenModel, NonNegativeInt, PositiveInt
from isthmus.core.errors import UnavailableError
from isthmus.core.units import format_bytes
from isthmus.train.checkpoint.checkpoint_folder import (
    MAX_FILES,
    CheckpointFile,
    Manifest,
    checkpoint_name,
    describe_file,
    read_manifest,
    read_manifests,
)
from isthmus.train.checkpoint.layout.checkpoint_layout import (
    LAYOUT_FILE,
    MAX_LAYOUT_BYTES,
    CheckpointLayout,
    check_layout,
    parse_bounded,
    read_bounded,
    refused,
)
from isthmus.train.checkpoint.layout.dcp_layout import rank_of_dcp_file
from isthmus.train.checkpoint.layout.shard_files import rank_file_prefix
from isthmus.train.checkpoint.objects.object_copies import ObjectCopies, WriteKey
from isthmus.train.checkpoint.sites.site_stores import SiteStores
from isthmus.train.checkpoint.write_checkpoint import clear_unfinished, publish_at_site, unfinished_writes
from isthmus.train.communication.communicator import Communicator

MAX_CANDIDATES = 8
"""Newest checkpoints that a site offers."""

_WriteId = Annotated[str, Field(max_length=32)]


class _Inventory(FrozenModel):
    """What a store has: step and write id of complete and of unfinished checkpoints."""

    complete: tuple[tuple[PositiveInt, _WriteId], ...] = ()
    unfinished: tuple[tuple[NonNegativeInt, _WriteId], ...] = ()


class _Published(FrozenModel):
    """A complete checkpoint for a site that has its files but not the manifest."""

    manifest: Manifest
    layout: CheckpointLayout


class _Offer(FrozenModel):
    """The newest manifests of a store."""

    manifests: Annotated[tuple[Manifest, ...], Field(max_length=MAX_CANDIDATES)] = ()


class _Whole(FrozenModel):
    """Names of files that a rank found whole."""

    names: Annotated[tuple[str, ...], Field(max_length=MAX_FILES)] = ()


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint that can be restored: its layout, and the stores that hold each file."""

    manifest: Manifest
    layout: CheckpointLayout
    holders: Mapping[str, tuple[int, ...]]
    """The stores in which each file is whole; none for one that only the object store has."""


def complete_unfinished(
    folder: Path, rank: int, stores: SiteStores, communicator: Communicator, objects: ObjectCopies | None = None
) -> None:
    """Publish what a crash left unpublished at some sites, and remove what is complete at none.

    A manifest exists only once all files are durable at all sites of the checkpoint, and in `objects`. Raises
    `UnavailableError` if the object store cannot be asked.
    """
    leads = stores.of_rank[rank] == rank
    mine = _Inventory()
    if leads:
        complete = tuple((one.step, one.write_id) for one in islice(read_manifests(folder), MAX_CANDIDATES))
        mine = _Inventory(complete=complete, unfinished=tuple(unfinished_writes(folder)))
    found = _gather(mine, communicator)
    known = {key for one in found for key in one.complete}
    stored = set(_find_stored(found, known, rank, objects, communicator))
    wanted = sorted({key for one in found for key in one.unfinished if key in known | stored})
    for step, write_id in wanted:
        sender = next((number for number, one in enumerate(found) if (step, write_id) in one.complete), 0)
        data = b""
        if rank == sender:
            source = objects if (step, write_id) in stored else None
            data = _published(folder / checkpoint_name(step), (step, write_id), source).model_dump_json().encode()
        sent = communicator.all_gather_bytes(data)[sender]
        if leads and (step, write_id) in mine.unfinished:
            published = parse_bounded(_Published, sent, f"rank {sender}")
            with suppress(OSError):  # stays for the next start
                publish_at_site(
                    folder,
                    step,
                    write_id,
                    published.manifest.model_dump_json(indent=1).encode(),
                    published.layout.model_dump_json().encode(),
                )
    if leads:
        clear_unfinished(folder)
    if objects is not None and rank == 0:
        objects.remove_unfinished(known)
    communicator.barrier()


def _find_stored(
    found: Sequence[_Inventory],
    known: set[WriteKey],
    rank: int,
    objects: ObjectCopies | None,
    communicator: Communicator,
) -> tuple[WriteKey, ...]:
    """Return which unfinished checkpoints are complete in the object store but at no site; rank 0 asks it."""
    if objects is None:
        return ()
    asked = sorted({key for one in found for key in one.unfinished} - known) if rank == 0 else []
    mine = _Inventory(complete=tuple(key for key in asked if objects.read_manifest(key) is not None))
    complete: tuple[WriteKey, ...] = _gather(mine, communicator)[0].complete
    return complete


def _published(place: Path, written: WriteKey, objects: ObjectCopies | None) -> _Published:
    """Return manifest and layout of a complete checkpoint, from `place` or from the object store."""
    manifest = objects.read_manifest(written) if objects is not None else read_manifest(place)
    if manifest is None:
        raise UnavailableError(f"the manifest of step {written[0]} is gone", hint="the job restarts automatically")
    data = objects.read_layout(manifest) if objects is not None else (place / LAYOUT_FILE).read_bytes()
    return _Published(manifest=manifest, layout=parse_bounded(CheckpointLayout, data, place))


def find_checkpoint(
    folder: Path, rank: int, stores: SiteStores, communicator: Communicator, objects: ObjectCopies | None = None
) -> FoundCheckpoint | None:
    """Return the newest checkpoint of all sites and `objects` of which every file is whole; None without any.

    A file in the object store counts by its size; its contents are verified as they are read. Raises `UnavailableError`
    if there are checkpoints, but files of each are at sites that are not part of this attempt, or damaged.
    """
    offer = _Offer()
    if stores.of_rank[rank] == rank:
        offer = _Offer(manifests=tuple(islice(read_manifests(folder), MAX_CANDIDATES)))
    offers = [one.manifests for one in _gather(offer, communicator)]
    if objects is not None:
        offers.append(_stored_manifests(offers, rank, objects, communicator))
    candidates = order_candidates(offers)
    problem = ""
    for manifest in candidates:
        holders = _find_holders(folder, manifest, rank, stores, communicator)
        missing = [one for one in manifest.files if not holders.get(one.name)]
        if missing and objects is not None and manifest.in_object_store:
            missing = _missing_in_store(manifest, missing, rank, len(stores.of_rank), objects, communicator)
        if not missing:
            layout = _share_layout(folder, manifest, holders, rank, communicator, objects)
            return FoundCheckpoint(manifest, layout, holders)
        problem = problem or describe_missing(manifest, missing, {stores.site(one) for one in stores.leaders})
    if problem:
        raise UnavailableError(
            f"no checkpoint in {folder} can be restored: {problem}",
            hint="let the named site take part in the job again, or start the job with another checkpoints.folder",
        )
    return None


def _stored_manifests(
    offers: Sequence[Sequence[Manifest]], rank: int, objects: ObjectCopies, communicator: Communicator
) -> tuple[Manifest, ...]:
    """Return the newest manifests of the object store that no site offers; rank 0 reads them."""
    mine = _Offer()
    if rank == 0:
        known = {(one.step, one.write_id) for offer in offers for one in offer}
        newest = [one for one in objects.checkpoints() if one not in known][:MAX_CANDIDATES]
        mine = _Offer(manifests=tuple(one for key in newest if (one := objects.read_manifest(key)) is not None))
    found: tuple[Manifest, ...] = _gather(mine, communicator)[0].manifests
    return found


def _missing_in_store(
    manifest: Manifest,
    files: Sequence[CheckpointFile],
    rank: int,
    size: int,
    objects: ObjectCopies,
    communicator: Communicator,
) -> list[CheckpointFile]:
    """Return which of `files` the object store lacks; the ranks share the work."""
    mine = _Whole(names=tuple(one.name for one in files[rank::size] if objects.has(manifest, one)))
    there = {name for one in _gather(mine, communicator) for name in one.names}
    return [one for one in files if one.name not in there]


def order_candidates(offers: Iterable[Sequence[Manifest]]) -> list[Manifest]:
    """Return the distinct manifests, newest first; of one step, the one that more sites offer."""
    count: dict[str, tuple[int, Manifest]] = {}
    for offer in offers:
        for one in offer:
            key = one.model_dump_json()
            count[key] = (count.get(key, (0, one))[0] + 1, one)
    ordered = sorted(count.items(), key=lambda item: (-item[1][1].step, -item[1][0], item[0]))
    return [manifest for _, (_, manifest) in ordered]


def describe_missing(manifest: Manifest, missing: Sequence[CheckpointFile], present: set[str]) -> str:
    """Return which bytes of a checkpoint are missing, and which sites keep them; `present` are those taking part."""
    ranks = {rank for one in missing if (rank := _writer(one.name)) is not None}
    sites = {one.site for one in manifest.sites if ranks & set(one.ranks)}
    num_bytes = format_bytes(sum(one.num_bytes for one in missing))
    absent = sorted(sites - present)
    if absent:
        keep = f"site {absent[0]} keeps" if len(absent) == 1 else f"sites {', '.join(absent)} keep"
        where = f"{keep} them and takes no part" if len(absent) == 1 else f"{keep} them and take no part"
    else:
        where = f"missing or damaged at {', '.join(sorted(sites)) or 'the sites of this job'}"
    named = ", ".join(map(str, sorted(ranks)[:4])) + (" and more" if len(ranks) > 4 else "")
    return f"of the newest, after step {manifest.step}, {num_bytes} of ranks {named} are not here: {where}"


def _find_holders(
    folder: Path, manifest: Manifest, rank: int, stores: SiteStores, communicator: Communicator
) -> dict[str, tuple[int, ...]]:
    """Return the stores in which each file of a checkpoint is whole; the ranks of a store share the work."""
    store = stores.of_rank[rank]
    peers = stores.ranks_of(store)
    place = folder / checkpoint_name(manifest.step)
    whole = []
    if _has_manifest(place, manifest):
        for one in manifest.files[peers.index(rank) :: len(peers)]:
            with suppress(OSError):
                if describe_file(place / one.name) == one:
                    whole.append(one.name)
    known = {one.name for one in manifest.files}
    holders: dict[str, list[int]] = {}
    for other, found in enumerate(_gather(_Whole(names=tuple(whole)), communicator)):
        for name in known.intersection(found.names):
            holders.setdefault(name, []).append(stores.of_rank[other])
    return {name: tuple(sorted(set(one))) for name, one in holders.items()}


def _has_manifest(place: Path, manifest: Manifest) -> bool:
    try:
        return read_manifest(place) == manifest
    except (OSError, UnavailableError):
        return False


def _share_layout(
    folder: Path,
    manifest: Manifest,
    holders: Mapping[str, tuple[int, ...]],
    rank: int,
    communicator: Communicator,
    objects: ObjectCopies | None,
) -> CheckpointLayout:
    """Return the checked layout, which one store sends to all, or rank 0 from the object store."""
    described = next((one for one in manifest.files if one.name == LAYOUT_FILE), None)
    place = folder / checkpoint_name(manifest.step)
    if described is None:
        raise refused(place, f"it has no {LAYOUT_FILE}; sites without a shared folder read no earlier layout")
    here = holders.get(LAYOUT_FILE, ())
    sender, data = here[0] if here else 0, b""
    if rank == sender and here:
        data = read_bounded(place / LAYOUT_FILE, MAX_LAYOUT_BYTES)
    elif rank == sender and objects is not None:
        data = objects.read_layout(manifest)
    layout = parse_bounded(CheckpointLayout, communicator.all_gather_bytes(data)[sender], f"rank {sender}")
    check_layout(layout, {one.name: one.num_bytes for one in manifest.files}, f"rank {sender}")
    return layout


def _gather(mine: FrozenModel, communicator: Communicator) -> list:  # type: ignore[type-arg]
    """Return the messages of all ranks, by rank, each checked as one of the kind of `mine`."""
    sent = communicator.all_gather_bytes(mine.model_dump_json().encode())
    return [parse_bounded(type(mine), data, f"rank {rank}") for rank, data in enumerate(sent)]


def _writer(name: str) -> int | None:
    """Return the rank that wrote a file with shards."""
    old = rank_of_dcp_file(name)
    if old is not None:
        return old
    number = name.removeprefix("shard-").partition("-")[0]
    return int(number) - 1 if number.isdigit() and name.startswith(rank_file_prefix(int(number) - 1)) else None
