"""Write checkpoints: each rank writes its part, rank 0 publishes (layout: `checkpoint_folder.py`)."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from isthmus.core.base import Frozen
from isthmus.core.errors import UnavailableError
from isthmus.core.messages.worker_folder import write_atomically
from isthmus.core.state_folder import sync_path
from isthmus.train.checkpoint import dcp_layout
from isthmus.train.checkpoint.checkpoint_folder import (
    MANIFEST,
    CheckpointFile,
    Manifest,
    complete_folders,
    described,
    place_name,
)
from isthmus.train.checkpoint.dcp_layout import Piece


class _Part(Frozen):
    """Contents of a `.part` file: a rank's file and the layout of its shards (`dcp_layout.write_part`)."""

    file: CheckpointFile
    layout: str


def make_folder(folder: Path) -> None:
    """Create the checkpoint folder before training starts; raises `UnavailableError` if it cannot."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error


def write_part(folder: Path, pieces: Iterable[Piece], *, step: int, rank: int, writing: str) -> None:
    """Write this rank's part of the checkpoint after `step` steps; `writing` is the id of this write.

    Raises `UnavailableError` if the folder is not writable or its disk is full, and removes this rank's file;
    older checkpoints are untouched.
    """
    work = _work(folder, step, writing)
    file = work / dcp_layout.file_name(rank)
    try:
        work.mkdir(parents=True, exist_ok=True)
        layout = dcp_layout.write_part(work, rank, pieces)
        part = _Part(file=described(file), layout=layout)
        sync_path(work)
        write_atomically(work / f"{rank}.part", part.model_dump_json())  # rank 0 may publish from now on
    except OSError as error:
        with suppress(OSError):
            file.unlink(missing_ok=True)
        raise _unwritable(folder, error) from error


def publish(folder: Path, *, step: int, samples: int, num_ranks: int, writing: str, keep: int) -> bool:
    """Publish the checkpoint after `step` steps if all parts are written; return whether they are.

    Removes older checkpoints except the newest `keep`, and earlier unfinished ones. Checkpoints of later
    steps do not count towards `keep`: they are damaged, or the run would have resumed from them. Raises
    `UnavailableError` if the folder cannot be written.
    """
    # Step 1: check that all parts exist.
    work = _work(folder, step, writing)
    names = [f"{rank}.part" for rank in range(num_ranks)]
    if not all((work / name).is_file() for name in names):
        return False
    try:
        # Step 2: write `.metadata` and the manifest.
        parts = [_Part.model_validate_json((work / name).read_bytes()) for name in names]
        dcp_layout.write_metadata(work, [part.layout for part in parts])
        files = (*(part.file for part in parts), described(work / dcp_layout.METADATA))
        manifest = Manifest(step=step, samples=samples, num_ranks=num_ranks, files=files)
        write_atomically(work / MANIFEST, manifest.model_dump_json(indent=1))
        # Step 3: remove the parts and rename the folder.
        for name in names:
            (work / name).unlink()
        sync_path(work)
        place = folder / place_name(step)
        _put_in_place(work, place)
        # Step 4: remove old checkpoints and unfinished folders.
        for old in sorted(one for one in complete_folders(folder) if one.name <= place.name)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
        for left in folder.glob("step-*.tmp"):
            if _place(left) <= place:
                shutil.rmtree(left, ignore_errors=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    return True


def tell_failure(folder: Path, *, step: int, rank: int, writing: str, why: str) -> None:
    """Report to the other ranks, through the folder, that this rank's part failed; best effort."""
    with suppress(OSError):
        write_atomically(_work(folder, step, writing) / f"{rank}.failed", why)


def failure(folder: Path, step: int, writing: str) -> str | None:
    """Return the reported failure of a rank's part; None without one."""
    with suppress(OSError):  # rank 0 may rename the folder meanwhile
        for report in sorted(_work(folder, step, writing).glob("*.failed")):
            return f"rank {report.stem}: {report.read_text(encoding='utf-8')}"
    return None


def is_published(folder: Path, step: int, writing: str) -> bool:
    """Return whether the checkpoint of this write id is published; valid once this rank's part is written."""
    return (folder / place_name(step) / MANIFEST).is_file() and not _work(folder, step, writing).exists()


def clear_unfinished(folder: Path) -> None:
    """Remove unfinished checkpoints left by a crash; called by rank 0 before the first step.

    A complete one that was not yet renamed is published; if that fails, it stays for the next call.
    """
    for left in folder.glob("step-*.tmp"):
        place = _place(left)
        if (left / MANIFEST).is_file() and not (place / MANIFEST).is_file():
            with suppress(OSError):
                _put_in_place(left, place)
        else:
            shutil.rmtree(left, ignore_errors=True)


def _put_in_place(work: Path, place: Path) -> None:
    """Rename the complete `work` to `place`; remove an existing `place` before, its manifest first."""
    if place.exists():
        (place / MANIFEST).unlink(missing_ok=True)
        sync_path(place)
        shutil.rmtree(place)
    work.rename(place)
    sync_path(place.parent)


def _work(folder: Path, step: int, writing: str) -> Path:
    return folder / (place_name(step) + f".{writing}.tmp")


def _place(work: Path) -> Path:
    """Return the final folder of the checkpoint written in `work`."""
    return work.with_name(work.name.partition(".")[0])


def _unwritable(folder: Path, error: Exception) -> UnavailableError:
    return UnavailableError(
        f"cannot write a checkpoint to {folder}: {error}", hint="free disk space or use another folder"
    )
