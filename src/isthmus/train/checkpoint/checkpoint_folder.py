"""Layout of checkpoints on disk, and functions that read them (`write_checkpoint.py` writes them).

    FOLDER/.isthmus-run/run.json            the job that the folder belongs to (`core/runs/run_folder.py`)
    FOLDER/step-00000100/manifest.json      step, samples, and the size and checksum of each file
    FOLDER/step-00000100/layout.json        where each shard of each tensor is (`checkpoint_layout.py`)
    FOLDER/step-00000100/shard-00001-model-00001-of-00001.safetensors    the shards of rank 0
    FOLDER/step-00000200.7f.tmp/            a checkpoint in progress, or left by a crash
    FOLDER/step-00000200.7f.tmp/0.part      checksums of the files of rank 0 and the positions of its shards

Checkpoints of layout 2 have torch's `.metadata` and `__0_0.distcp` instead; they are still read (`dcp_layout.py`).

Tensors have their full-model names, so a run can resume with different parallel degrees. All ranks share
FOLDER and coordinate through it alone: each rank writes its file and then its `.part`; once all parts exist,
rank 0 adds layout and manifest and renames the folder. A folder without `.tmp` is complete; its checksums
detect later damage.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from isthmus.core.base_model import FrozenModel, Name, NonNegativeInt, PositiveInt
from isthmus.core.errors import ProtocolError, UnavailableError
from isthmus.core.runs.run_folder import claimed_job, complete_folders
from isthmus.train.checkpoint.layout.checkpoint_layout import (
    LAYOUT_FILE,
    MAX_LAYOUT_BYTES,
    CheckpointLayout,
    FileName,
    check_layout,
    parse_bounded,
    read_bounded,
)
from isthmus.train.checkpoint.layout.dcp_layout import METADATA_FILE, read_dcp_layout
from isthmus.train.checkpoint.layout.shard_files import rank_file_prefix, read_shards
from isthmus.train.checkpoint.layout.tensor_shard import TensorShard

CHECKPOINT_VERSION: Literal[3] = 3
_READ_VERSIONS = (2, CHECKPOINT_VERSION)
MANIFEST_FILE = "manifest.json"
MAX_MANIFEST_BYTES = 64 << 20
MAX_FILES = 200_000


def checkpoint_name(step: int) -> str:
    """Return the folder name of the checkpoint after `step` steps."""
    return f"step-{step:08d}"


class CheckpointFile(FrozenModel):
    """One file of a checkpoint."""

    name: FileName | Literal["layout.json", ".metadata"]
    num_bytes: NonNegativeInt
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class SiteCopy(FrozenModel):
    """The ranks whose files a site keeps, in checkpoints of sites that share no folder."""

    site: Name
    ranks: tuple[NonNegativeInt, ...]


class Manifest(FrozenModel):
    """Contents of a checkpoint: the state after `step` steps and `samples` samples."""

    version: Literal[2, 3] = CHECKPOINT_VERSION
    step: PositiveInt
    # Training samples consumed so far.
    samples: PositiveInt
    # Ranks that wrote it; a run with a different number can still load it.
    num_ranks: PositiveInt
    # The files with shards, by rank, then the layout.
    files: Annotated[tuple[CheckpointFile, ...], Field(max_length=MAX_FILES)]
    # The id of this write; two checkpoints of one step and different ids are different states.
    write_id: Annotated[str, Field(pattern=r"^[0-9a-f]{0,32}$")] = ""
    # Where the files are, if the sites share no folder; empty if all files are in this one.
    sites: Annotated[tuple[SiteCopy, ...], Field(max_length=MAX_FILES)] = ()
    # Whether the job's object store has a copy of every file.
    in_object_store: bool = False
    # The job that wrote it; empty: a job of an earlier release, or in a folder without a claim.
    run: str = ""


def read_manifests(folder: Path) -> Iterator[Manifest]:
    """Yield the manifests of complete checkpoints, newest first; skip unreadable ones and those of other jobs.

    Raises `ProtocolError` if a manifest has another layout version.
    """
    owner = claimed_job(folder)
    for place in sorted(complete_folders(folder), reverse=True):
        with suppress(OSError, UnavailableError):
            manifest = read_manifest(place)
            if checkpoint_name(manifest.step) == place.name and (not owner or manifest.run in ("", owner)):
                yield manifest


def read_manifest(place: Path) -> Manifest:
    """Return the manifest in the checkpoint folder `place`.

    Raises `OSError` if it is missing, `UnavailableError` if it is malformed, `ProtocolError` if it has another version.
    """
    text = read_bounded(place / MANIFEST_FILE, MAX_MANIFEST_BYTES)
    _check_version(place, text)
    return parse_bounded(Manifest, text, place / MANIFEST_FILE, MAX_MANIFEST_BYTES)


def files_are_valid(folder: Path, manifest: Manifest, files: Sequence[CheckpointFile]) -> bool:
    """Return whether `files` of the checkpoint still match their sizes and checksums."""
    place = folder / checkpoint_name(manifest.step)
    try:
        return all(describe_file(place / one.name) == one for one in files)
    except OSError:
        return False


def newest_valid(folder: Path) -> Manifest | None:
    """Return the newest checkpoint whose checksums match; None if there is none."""
    return next((one for one in read_manifests(folder) if files_are_valid(folder, one, one.files)), None)


def load_shards(folder: Path, step: int, shards: Sequence[TensorShard]) -> None:
    """Fill the tensors of `shards` from the checkpoint after `step` steps.

    Raises `UnavailableError` if a tensor is missing or has another shape (a checkpoint of another model), and if the
    checkpoint is damaged or forged.
    """
    place = folder / checkpoint_name(step)
    try:
        manifest = read_manifest(place)
        layout = read_layout(place, manifest)
    except OSError as error:
        raise UnavailableError(f"cannot read checkpoint {place}: {error}") from error
    read_shards(place, layout, shards)


def read_layout(place: Path, manifest: Manifest) -> CheckpointLayout:
    """Return the checked layout of the checkpoint in `place`.

    Raises `OSError` if a file is missing, and `UnavailableError` if the layout is malformed.
    """
    if manifest.version == CHECKPOINT_VERSION:
        file = place / LAYOUT_FILE
        layout = parse_bounded(CheckpointLayout, read_bounded(file, MAX_LAYOUT_BYTES), file)
    else:
        layout = read_dcp_layout(place)
    check_layout(layout, {one.name: one.num_bytes for one in manifest.files}, place)
    return layout


def verify_rank_file(folder: Path, step: int, rank: int) -> int:
    """Verify this rank's files of the checkpoint after `step` steps from disk; return their size in bytes.

    Rank 0 also verifies the layout. Raises `UnavailableError` if a file is missing or its checksum differs.
    """
    place = folder / checkpoint_name(step)
    try:
        files = read_manifest(place).files
        own = [one for one in files if one.name.startswith(rank_file_prefix(rank))]
        if not own:
            raise UnavailableError(f"cannot read checkpoint {place}: it has no file of rank {rank}")
        checked = own + ([one for one in files if one.name in (LAYOUT_FILE, METADATA_FILE)] if rank == 0 else [])
        for one in checked:
            _drop_page_cache(place / one.name)
        found = [describe_file(place / one.name) for one in checked]
    except OSError as error:
        raise UnavailableError(f"cannot read checkpoint {place}: {error}") from error
    for expected, one in zip(checked, found, strict=True):
        if one != expected:
            raise UnavailableError(
                f"{place / one.name} is damaged: its checksum differs from the manifest",
                hint="check the disk of the checkpoint folder",
            )
    return sum(one.num_bytes for one in own)


def _check_version(place: Path, text: bytes) -> None:
    """Raise `ProtocolError` if the manifest is readable JSON of another layout version."""
    with suppress(ValueError, AttributeError, RecursionError):
        version = json.loads(text).get("version", CHECKPOINT_VERSION)
        if version not in _READ_VERSIONS:
            raise ProtocolError(
                f"checkpoint {place} has layout {str(version)[:20]}, this release reads layouts "
                f"{' and '.join(map(str, _READ_VERSIONS))}",
                hint="resume with the release that wrote it, or use another checkpoint folder",
            )


def _drop_page_cache(file: Path) -> None:
    """Drop `file` from the page cache where the system supports it, so that it is read from disk."""
    if hasattr(os, "posix_fadvise"):
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def describe_file(file: Path) -> CheckpointFile:
    """Return the manifest entry of `file` as it is on disk now."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return CheckpointFile(name=file.name, num_bytes=file.stat().st_size, sha256=digest)
