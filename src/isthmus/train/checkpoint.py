"""Checkpoints: what a run needs to go on, written so that there is always a whole one.

    FOLDER/step-00000100/manifest.json      step, samples, and for each file its size and checksum
    FOLDER/step-00000100/rank-00000.safetensors
    FOLDER/step-00000200.tmp/               one being written (or left behind by a crash)

Tensors bear the names they have in the whole model, so a run resumes under another cut by layers. FOLDER is
shared by all ranks. Every rank writes its file, rank 0 adds the manifest and renames the folder: a folder
without `.tmp` is complete, and its checksums tell whether it still is.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from isthmus.core.base import Count, Frozen, Index
from isthmus.core.errors import UnavailableError
from isthmus.core.worker import write_atomically

CHECKPOINT_VERSION: Literal[1] = 1
MANIFEST = "manifest.json"
DIGEST_BYTES = 40
"""SHA-256 (32 bytes) and size (8 bytes) of a file, as the ranks tell each other."""

_NAME = "step-{:08d}"
Gather = Callable[[torch.Tensor], list[torch.Tensor]]
"""Give every rank the uint8 tensors of all ranks, in the order of ranks."""


class CheckpointFile(Frozen):
    """One file of a checkpoint."""

    name: str
    num_bytes: Index
    sha256: str


class Manifest(Frozen):
    """What a checkpoint holds: the state after `step` steps and `samples` samples."""

    version: Literal[1] = CHECKPOINT_VERSION
    step: Count
    samples: Count
    files: tuple[CheckpointFile, ...]


def make_folder(folder: Path) -> None:
    """Make the folder of checkpoints; raise `UnavailableError` now rather than after the first hours."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error


def save(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    *,
    step: int,
    samples: int,
    rank: int,
    gather: Gather,
    keep: int,
) -> None:
    """Write the checkpoint after `step` steps; all ranks call it with their own `tensors`.

    Afterwards the newest `keep` checkpoints remain. Raises `UnavailableError` where the folder cannot be
    written or its disk is full: those before it are untouched, and this rank's part of the new one removed.
    """
    work = folder / (_NAME.format(step) + ".tmp")
    file = work / f"rank-{rank:05d}.safetensors"
    try:
        work.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
        _flush(file)
        _flush(work)
        digest = _digest(file)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            file.unlink(missing_ok=True)
        raise _unwritable(folder, error) from error
    digests = gather(torch.frombuffer(bytearray(digest), dtype=torch.uint8))
    if rank == 0:
        files = tuple(_described(other, bytes(one.tolist())) for other, one in enumerate(digests))
        _publish(folder, work, Manifest(step=step, samples=samples, files=files), keep)


def newest(folder: Path) -> Manifest | None:
    """Return the newest checkpoint whose files have their checksums, or None; damaged ones are skipped."""
    for place in sorted(_complete(folder), reverse=True):
        try:
            manifest = Manifest.model_validate_json((place / MANIFEST).read_bytes())
            if all(_described_file(place / one.name) == one for one in manifest.files):
                return manifest
        except (OSError, ValidationError):
            continue
    return None


def load(folder: Path, step: int, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return the tensors of the whole-model `names` (each with its kinds) from the checkpoint after `step`.

    Raises `UnavailableError` where one is missing: the checkpoint is then of another model.
    """
    wanted, found = set(names), {}
    place = folder / _NAME.format(step)
    for file in sorted(place.glob("rank-*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - not a dict
                if key.partition("/")[2] in wanted:
                    found[key] = opened.get_tensor(key)
    missing = wanted - {key.partition("/")[2] for key in found}
    if missing:
        raise UnavailableError(
            f"checkpoint {place} has no tensor '{min(missing)}'",
            hint="it is of another model; name another checkpoint folder",
        )
    return found


def read_back(folder: Path, step: int, rank: int) -> int:
    """Return the size in bytes of this rank's file of the checkpoint after `step` steps, read anew.

    Raises `UnavailableError` where it is not there, or not what its manifest says.
    """
    place = folder / _NAME.format(step)
    file = place / f"rank-{rank:05d}.safetensors"
    try:
        manifest = Manifest.model_validate_json((place / MANIFEST).read_bytes())
        _forget_cached(file)
        found = _described_file(file)
    except (OSError, ValidationError) as error:
        raise UnavailableError(f"checkpoint {place} does not read: {error}") from error
    if found not in manifest.files:
        raise UnavailableError(
            f"{file} is not what was written: its checksum differs",
            hint="look at the disk of the checkpoint folder",
        )
    return found.num_bytes


def clear_unfinished(folder: Path) -> None:
    """Remove what a crash left half written; called by rank 0 before the first step."""
    for left in folder.glob("step-*.tmp"):
        shutil.rmtree(left, ignore_errors=True)


def _complete(folder: Path) -> list[Path]:
    return [one for one in folder.glob("step-*") if one.suffix != ".tmp" and one.is_dir()]


def _publish(folder: Path, work: Path, manifest: Manifest, keep: int) -> None:
    """Add the manifest, rename, then remove all but the newest `keep` up to this one.

    Later steps that are there are damaged (the run would have begun from them), and count for nothing.
    """
    for file in manifest.files:
        if not (work / file.name).is_file():
            raise UnavailableError(
                f"{work / file.name} is not there, though its rank wrote it",
                hint="checkpoints.folder is a folder that the workers of all sites share",
            )
    place = folder / _NAME.format(manifest.step)
    try:
        write_atomically(work / MANIFEST, manifest.model_dump_json(indent=1))
        _flush(work)
        if place.exists():
            shutil.rmtree(place)
        work.rename(place)
        _flush(folder)
        for old in sorted(one for one in _complete(folder) if one.name <= place.name)[:-keep]:
            shutil.rmtree(old)
    except OSError as error:
        raise _unwritable(folder, error) from error


def _forget_cached(file: Path) -> None:
    """Have the system read `file` from the disk and not from what it still has in memory, where it can."""
    if hasattr(os, "posix_fadvise"):
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _digest(file: Path) -> bytes:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest() + file.stat().st_size.to_bytes(8, "big")


def _described(rank: int, digest: bytes) -> CheckpointFile:
    return CheckpointFile(
        name=f"rank-{rank:05d}.safetensors",
        num_bytes=int.from_bytes(digest[32:], "big"),
        sha256=digest[:32].hex(),
    )


def _described_file(file: Path) -> CheckpointFile:
    digest = _digest(file)
    return CheckpointFile(
        name=file.name, num_bytes=int.from_bytes(digest[32:], "big"), sha256=digest[:32].hex()
    )


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unwritable(folder: Path, error: Exception) -> UnavailableError:
    return UnavailableError(
        f"cannot write a checkpoint to {folder}: {error}", hint="free the disk or name another folder"
    )
