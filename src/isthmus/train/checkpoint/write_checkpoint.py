"""Writing a checkpoint: each rank its part; rank 0 completes it (layout: `checkpoint_folder.py`)."""

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
        part = _Part(file=described(file), layout=layout)
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
        files = (*(part.file for part in parts), described(work / dcp_layout.METADATA))
        manifest = Manifest(step=step, samples=samples, num_ranks=num_ranks, files=files)
        write_atomically(work / MANIFEST, manifest.model_dump_json(indent=1))
        for name in names:
            (work / name).unlink()
        sync_path(work)
        place = folder / place_name(step)
        _put_in_place(work, place)
        for old in sorted(one for one in complete_folders(folder) if one.name <= place.name)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
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
    with suppress(OSError):  # the folder gets its name while we look, once all parts have come
        for told in sorted(_work(folder, step, writing).glob("*.failed")):
            return f"rank {told.stem}: {told.read_text(encoding='utf-8')}"
    return None


def is_published(folder: Path, step: int, writing: str) -> bool:
    """Tell whether a rank's part of this writing is part of a complete checkpoint."""
    return (folder / place_name(step) / MANIFEST).is_file() and not _work(folder, step, writing).exists()


def clear_unfinished(folder: Path) -> None:
    """Remove what a crash left half written; called by rank 0 before the first step.

    What was whole, and only not in its place yet, is put there; where that fails it stays for the next time.
    """
    for left in folder.glob("step-*.tmp"):
        place = _place(left)
        if (left / MANIFEST).is_file() and not (place / MANIFEST).is_file():
            with suppress(OSError):
                _put_in_place(left, place)
        else:
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
    return folder / (place_name(step) + f".{writing}.tmp")


def _place(work: Path) -> Path:
    """Return where a checkpoint that is written in `work` belongs."""
    return work.with_name(work.name.partition(".")[0])


def _unwritable(folder: Path, error: Exception) -> UnavailableError:
    return UnavailableError(
        f"cannot write a checkpoint to {folder}: {error}", hint="free the disk or name another folder"
    )
