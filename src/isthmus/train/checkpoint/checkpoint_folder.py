"""Checkpoints on disk: their layout, and reading them (`write_checkpoint.py` writes them).

    FOLDER/step-00000100/manifest.json      step, samples, and for each file its size and checksum
    FOLDER/step-00000100/.metadata          the layout of torch's distributed checkpoints (DCP)
    FOLDER/step-00000100/__0_0.distcp       what rank 0 wrote
    FOLDER/step-00000200.7f.tmp/            one being written (or left behind by a crash)
    FOLDER/step-00000200.7f.tmp/0.part      what rank 0 has written there, and its file's checksum

Tensors bear the names they have in the whole model, so a run resumes under another cut. FOLDER is shared by
all ranks, who need no other way to tell each other: every rank writes its file and then its part; rank 0,
once all parts are there, adds manifest and metadata and renames the folder. One without `.tmp` is complete,
and its checksums tell whether it still is.
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

from isthmus.core.base import Count, Frozen, Index
from isthmus.core.errors import ProtocolError, UnavailableError
from isthmus.train.checkpoint import dcp_layout
from isthmus.train.checkpoint.dcp_layout import Piece

CHECKPOINT_VERSION: Literal[2] = 2
MANIFEST = "manifest.json"


def place_name(step: int) -> str:
    """Return the name of the folder of the checkpoint after `step` steps."""
    return f"step-{step:08d}"


class CheckpointFile(Frozen):
    """One file of a checkpoint."""

    name: str
    num_bytes: Index
    sha256: str


class Manifest(Frozen):
    """What a checkpoint holds: the state after `step` steps and `samples` samples."""

    version: Literal[2] = CHECKPOINT_VERSION
    step: Count
    samples: Count
    num_ranks: Count
    files: tuple[CheckpointFile, ...]


def manifests(folder: Path) -> Iterator[Manifest]:
    """Yield the manifests of complete checkpoints, the newest first; those that do not read are skipped.

    Raises `ProtocolError` at one of another release's layout.
    """
    for place in sorted(complete_folders(folder), reverse=True):
        with suppress(OSError, ValidationError):
            text = (place / MANIFEST).read_bytes()
            _check_version(place, text)
            yield Manifest.model_validate_json(text)


def is_whole(folder: Path, manifest: Manifest, files: Sequence[CheckpointFile]) -> bool:
    """Tell whether these of a checkpoint's files are still what was written."""
    place = folder / place_name(manifest.step)
    try:
        return all(described(place / one.name) == one for one in files)
    except OSError:
        return False


def newest(folder: Path) -> Manifest | None:
    """Return the newest checkpoint whose files have their checksums, or None; damaged ones are skipped."""
    return next((one for one in manifests(folder) if is_whole(folder, one, one.files)), None)


def load(folder: Path, step: int, pieces: Sequence[Piece]) -> None:
    """Fill the tensors of `pieces` from the checkpoint after `step` steps.

    Raises `UnavailableError` where one is missing or of another shape: the checkpoint is of another model.
    """
    dcp_layout.read_into(folder / place_name(step), pieces)


def read_back(folder: Path, step: int, rank: int) -> int:
    """Return the size in bytes of this rank's file of the checkpoint after `step` steps, read anew.

    Rank 0 looks at the metadata too. Raises `UnavailableError` where a file is not there, or not what its
    manifest says.
    """
    place = folder / place_name(step)
    files = [place / dcp_layout.file_name(rank), *([place / dcp_layout.METADATA] if rank == 0 else [])]
    try:
        manifest = Manifest.model_validate_json((place / MANIFEST).read_bytes())
        for file in files:
            _forget_cached(file)
        found = [described(file) for file in files]
    except (OSError, ValidationError) as error:
        raise UnavailableError(f"checkpoint {place} does not read: {error}") from error
    for file, one in zip(files, found, strict=True):
        if one not in manifest.files:
            raise UnavailableError(
                f"{file} is not what was written: its checksum differs",
                hint="look at the disk of the checkpoint folder",
            )
    return found[0].num_bytes


def complete_folders(folder: Path) -> list[Path]:
    """Return where checkpoints are that bear their name, in no order."""
    return [one for one in folder.glob("step-*") if one.suffix != ".tmp" and one.is_dir()]


def _check_version(place: Path, text: bytes) -> None:
    """Raise `ProtocolError` for a manifest that reads and is of another version."""
    with suppress(ValueError, AttributeError):
        version = json.loads(text).get("version", CHECKPOINT_VERSION)
        if version != CHECKPOINT_VERSION:
            raise ProtocolError(
                f"checkpoint {place} has layout {version}, this release reads layout {CHECKPOINT_VERSION}",
                hint="go on with the release that wrote it, or name another checkpoint folder",
            )


def _forget_cached(file: Path) -> None:
    """Have the system read `file` from the disk and not from what it still has in memory, where it can."""
    if hasattr(os, "posix_fadvise"):
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def described(file: Path) -> CheckpointFile:
    """Return what a manifest says of `file`, as it is now."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return CheckpointFile(name=file.name, num_bytes=file.stat().st_size, sha256=digest)
