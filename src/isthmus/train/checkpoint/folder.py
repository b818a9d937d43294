"""Checkpoints on disk: what a run needs to go on, written so that there is always a whole one.

    FOLDER/step-00000100/manifest.json      step, samples, and for each file its size and checksum
    FOLDER/step-00000100/.metadata          the layout of torch's distributed checkpoints (DCP)
    FOLDER/step-00000100/__0_0.distcp       what rank 0 wrote
    FOLDER/step-00000200.7f.tmp/            one being written (or left behind by a crash)
    FOLDER/step-00000200.7f.tmp/0.part      what rank 0 has written there, and its file's checksum

Tensors bear the names they have in the whole model, so a run resumes under another cut. FOLDER is shared by
all ranks, who need no other way to tell each other: every rank writes its file and then its part; whoever
finds all parts adds manifest and metadata and renames the folder. One without `.tmp` is complete, and its
checksums tell whether it still is.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from isthmus.core.base import Count, Frozen, Index
from isthmus.core.errors import ProtocolError, UnavailableError
from isthmus.core.state_folder import sync_path
from isthmus.core.worker import write_atomically
from isthmus.train.checkpoint import dcp_layout
from isthmus.train.checkpoint.dcp_layout import Piece

CHECKPOINT_VERSION: Literal[2] = 2
MANIFEST = "manifest.json"

_NAME = "step-{:08d}"


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


class _Part(Frozen):
    """What one rank has written: its file, and where its tensors lie (`dcp_layout.write_part`)."""

    file: CheckpointFile
    layout: str


def make_folder(folder: Path) -> None:
    """Make the folder of checkpoints; raise `UnavailableError` now rather than after the first hours."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error


def write_part(folder: Path, pieces: Iterable[Piece], *, step: int, rank: int, writing: str) -> None:
    """Write this rank's part of the checkpoint after `step` steps; `writing` names this attempt to write it.

    Raises `UnavailableError` where the folder cannot be written or its disk is full: checkpoints before it
    are untouched, and this rank's file of the new one removed.
    """
    work = _work(folder, step, writing)
    file = work / dcp_layout.file_name(rank)
    try:
        work.mkdir(parents=True, exist_ok=True)
        layout = dcp_layout.write_part(work, rank, pieces)
        part = _Part(file=_described(file), layout=layout)
        sync_path(work)
        write_atomically(work / f"{rank}.part", part.model_dump_json())  # the folder may be moved from now on
    except OSError as error:
        with suppress(OSError):
            file.unlink(missing_ok=True)
        raise _unwritable(folder, error) from error


def publish(folder: Path, *, step: int, samples: int, num_ranks: int, writing: str, keep: int) -> bool:
    """Complete the checkpoint after `step` steps if all ranks have written their parts; tell whether.

    Then all but the newest `keep` up to this one are removed, and what was begun before it and given up.
    Later steps that are there are damaged (the run would have begun from them), and count for nothing. Raises
    `UnavailableError` where it cannot.
    """
    work = _work(folder, step, writing)
    names = [f"{rank}.part" for rank in range(num_ranks)]
    if not all((work / name).is_file() for name in names):
        return False
    try:
        parts = [_Part.model_validate_json((work / name).read_bytes()) for name in names]
        dcp_layout.write_metadata(work, [part.layout for part in parts])
        files = (*(part.file for part in parts), _described(work / dcp_layout.METADATA))
        manifest = Manifest(step=step, samples=samples, num_ranks=num_ranks, files=files)
        write_atomically(work / MANIFEST, manifest.model_dump_json(indent=1))
        for name in names:
            (work / name).unlink()
        sync_path(work)
        place = folder / _NAME.format(step)
        _put_in_place(work, place)
        for old in sorted(one for one in _complete(folder) if one.name <= place.name)[:-keep]:
            shutil.rmtree(old)
        for left in folder.glob("step-*.tmp"):
            if _place(left) <= place:
                shutil.rmtree(left, ignore_errors=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    return True


def tell_failure(folder: Path, *, step: int, rank: int, writing: str, why: str) -> None:
    """Tell the other ranks that this one's part will not come, if the disk takes so much."""
    with suppress(OSError):
        write_atomically(_work(folder, step, writing) / f"{rank}.failed", why)


def failure(folder: Path, step: int, writing: str) -> str | None:
    """Return why a rank's part will not come, None as far as is known."""
    for told in sorted(_work(folder, step, writing).glob("*.failed")):
        with suppress(OSError):
            return f"rank {told.stem}: {told.read_text(encoding='utf-8')}"
    return None


def is_published(folder: Path, step: int, writing: str) -> bool:
    """Tell whether a rank's part of this writing is part of a complete checkpoint."""
    return (folder / _NAME.format(step) / MANIFEST).is_file() and not _work(folder, step, writing).exists()


def manifests(folder: Path) -> Iterator[Manifest]:
    """Yield the manifests of complete checkpoints, the newest first; those that do not read are skipped.

    Raises `ProtocolError` at one of another release's layout.
    """
    for place in sorted(_complete(folder), reverse=True):
        with suppress(OSError, ValidationError):
            text = (place / MANIFEST).read_bytes()
            _check_version(place, text)
            yield Manifest.model_validate_json(text)


def is_whole(folder: Path, manifest: Manifest, files: Sequence[CheckpointFile]) -> bool:
    """Tell whether these of a checkpoint's files are still what was written."""
    place = folder / _NAME.format(manifest.step)
    try:
        return all(_described(place / one.name) == one for one in files)
    except OSError:
        return False


def newest(folder: Path) -> Manifest | None:
    """Return the newest checkpoint whose files have their checksums, or None; damaged ones are skipped."""
    return next((one for one in manifests(folder) if is_whole(folder, one, one.files)), None)


def load(folder: Path, step: int, pieces: Sequence[Piece]) -> None:
    """Fill the tensors of `pieces` from the checkpoint after `step` steps.

    Raises `UnavailableError` where one is missing or of another shape: the checkpoint is of another model.
    """
    dcp_layout.read_into(folder / _NAME.format(step), pieces)


def read_back(folder: Path, step: int, rank: int) -> int:
    """Return the size in bytes of this rank's file of the checkpoint after `step` steps, read anew.

    Rank 0 looks at the metadata too. Raises `UnavailableError` where a file is not there, or not what its
    manifest says.
    """
    place = folder / _NAME.format(step)
    files = [place / dcp_layout.file_name(rank), *([place / dcp_layout.METADATA] if rank == 0 else [])]
    try:
        manifest = Manifest.model_validate_json((place / MANIFEST).read_bytes())
        for file in files:
            _forget_cached(file)
        found = [_described(file) for file in files]
    except (OSError, ValidationError) as error:
        raise UnavailableError(f"checkpoint {place} does not read: {error}") from error
    for file, one in zip(files, found, strict=True):
        if one not in manifest.files:
            raise UnavailableError(
                f"{file} is not what was written: its checksum differs",
                hint="look at the disk of the checkpoint folder",
            )
    return found[0].num_bytes


def clear_unfinished(folder: Path) -> None:
    """Remove what a crash left half written; called by rank 0 before the first step.

    What was whole, and only not in its place yet, is put there.
    """
    for left in folder.glob("step-*.tmp"):
        place = _place(left)
        if (left / MANIFEST).is_file() and not (place / MANIFEST).is_file():
            with suppress(OSError):
                _put_in_place(left, place)
        shutil.rmtree(left, ignore_errors=True)


def _put_in_place(work: Path, place: Path) -> None:
    """Let `work`, which is whole, be the checkpoint `place`; one that is there goes, its manifest first."""
    if place.exists():
        (place / MANIFEST).unlink(missing_ok=True)
        sync_path(place)
        shutil.rmtree(place)
    work.rename(place)
    sync_path(place.parent)


def _work(folder: Path, step: int, writing: str) -> Path:
    return folder / (_NAME.format(step) + f".{writing}.tmp")


def _place(work: Path) -> Path:
    """Return where a checkpoint that is written in `work` belongs."""
    return work.with_name(work.name.partition(".")[0])


def _complete(folder: Path) -> list[Path]:
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


def _described(file: Path) -> CheckpointFile:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return CheckpointFile(name=file.name, num_bytes=file.stat().st_size, sha256=digest)


def _unwritable(folder: Path, error: Exception) -> UnavailableError:
    return UnavailableError(
        f"cannot write a checkpoint to {folder}: {error}", hint="free the disk or name another folder"
    )
