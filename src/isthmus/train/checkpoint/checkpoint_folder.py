"""Layout of checkpoints on disk, and functions that read them (`write_checkpoint.py` writes them).

    FOLDER/.isthmus-run/run.json            the job that the folder belongs to (`core/runs/run_folder.py`)
    FOLDER/step-00000100/manifest.json      step, samples, and the size and checksum of each file
    FOLDER/step-00000100/.metadata          metadata of torch's distributed checkpoint format (DCP)
    FOLDER/step-00000100/__0_0.distcp       the shards of rank 0
    FOLDER/step-00000200.7f.tmp/            a checkpoint in progress, or left by a crash
    FOLDER/step-00000200.7f.tmp/0.part      checksum of the file of rank 0 and the layout of its shards

Tensors have their full-model names, so a run can resume with different parallel degrees. All ranks share
FOLDER and coordinate through it alone: each rank writes its file and then its `.part`; once all parts exist,
rank 0 adds metadata and manifest and renames the folder. A folder without `.tmp` is complete; its checksums
detect later damage.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from isthmus.core.base_model import FrozenModel, NonNegativeInt, PositiveInt
from isthmus.core.errors import ProtocolError, UnavailableError
from isthmus.core.runs.run_folder import claimed_job, complete_folders
from isthmus.train.checkpoint import dcp_layout
from isthmus.train.checkpoint.dcp_layout import TensorShard

CHECKPOINT_VERSION: Literal[2] = 2
MANIFEST_FILE = "manifest.json"


def checkpoint_name(step: int) -> str:
    """Return the folder name of the checkpoint after `step` steps."""
    return f"step-{step:08d}"


class CheckpointFile(FrozenModel):
    """One file of a checkpoint."""

    name: str
    num_bytes: NonNegativeInt
    sha256: str


class Manifest(FrozenModel):
    """Contents of a checkpoint: the state after `step` steps and `samples` samples."""

    version: Literal[2] = CHECKPOINT_VERSION
    step: PositiveInt
    # Training samples consumed so far.
    samples: PositiveInt
    # Ranks that wrote it; a run with a different number can still load it.
    num_ranks: PositiveInt
    # One file per rank, by rank, then `.metadata`.
    files: tuple[CheckpointFile, ...]
    # The job that wrote it; empty: a job of an earlier release, or in a folder without a claim.
    run: str = ""


def read_manifests(folder: Path) -> Iterator[Manifest]:
    """Yield the manifests of complete checkpoints, newest first; skip unreadable ones and those of other jobs.

    Raises `ProtocolError` if a manifest has another layout version.
    """
    owner = claimed_job(folder)
    for place in sorted(complete_folders(folder), reverse=True):
        manifest = read_manifest(place)
        if manifest is not None and (not owner or manifest.run in ("", owner)):
            yield manifest


def read_manifest(place: Path) -> Manifest | None:
    """Return the manifest of the checkpoint in `place`, None if it is unreadable; raises `ProtocolError`."""
    with suppress(OSError, ValidationError):
        text = (place / MANIFEST_FILE).read_bytes()
        _check_version(place, text)
        return Manifest.model_validate_json(text)
    return None


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

    Raises `UnavailableError` if a tensor is missing or has another shape (a checkpoint of another model).
    """
    dcp_layout.read_shards(folder / checkpoint_name(step), shards)


def verify_rank_file(folder: Path, step: int, rank: int) -> int:
    """Verify this rank's file of the checkpoint after `step` steps from disk; return its size in bytes.

    Rank 0 also verifies `.metadata`. Raises `UnavailableError` if a file is missing or its checksum differs.
    """
    place = folder / checkpoint_name(step)
    files = [
        place / dcp_layout.rank_file_name(rank),
        *([place / dcp_layout.METADATA_FILE] if rank == 0 else []),
    ]
    try:
        manifest = Manifest.model_validate_json((place / MANIFEST_FILE).read_bytes())
        for file in files:
            _drop_page_cache(file)
        found = [describe_file(file) for file in files]
    except (OSError, ValidationError) as error:
        raise UnavailableError(f"cannot read checkpoint {place}: {error}") from error
    for file, one in zip(files, found, strict=True):
        if one not in manifest.files:
            raise UnavailableError(
                f"{file} is damaged: its checksum differs from the manifest",
                hint="check the disk of the checkpoint folder",
            )
    return found[0].num_bytes


def _check_version(place: Path, text: bytes) -> None:
    """Raise `ProtocolError` if the manifest is readable JSON of another layout version."""
    with suppress(ValueError, AttributeError):
        version = json.loads(text).get("version", CHECKPOINT_VERSION)
        if version != CHECKPOINT_VERSION:
            raise ProtocolError(
                f"checkpoint {place} has layout {version}, this release reads layout {CHECKPOINT_VERSION}",
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
