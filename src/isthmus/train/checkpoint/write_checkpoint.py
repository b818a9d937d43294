"""Write checkpoints: each rank writes its part, rank 0 publishes (layout: `checkpoint_folder.py`)."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import Field

from isthmus.core.base_model import FrozenModel
from isthmus.core.errors import ProtocolError, UnavailableError
from isthmus.core.messages.worker_folder import write_atomically
from isthmus.core.process.state_folder_lock import fsync_path
from isthmus.core.runs.run_folder import claimed_job, complete_folders
from isthmus.train.checkpoint.checkpoint_folder import (
    MANIFEST_FILE,
    CheckpointFile,
    Manifest,
    checkpoint_name,
    describe_file,
    read_manifest,
)
from isthmus.train.checkpoint.layout.checkpoint_layout import (
    LAYOUT_FILE,
    MAX_LAYOUT_BYTES,
    MAX_SHARDS,
    CheckpointLayout,
    StoredShard,
    check_layout,
    merge_layouts,
    parse_bounded,
    read_bounded,
    refused,
)
from isthmus.train.checkpoint.layout.shard_files import rank_file_prefix, write_shards
from isthmus.train.checkpoint.layout.tensor_shard import TensorShard
from isthmus.train.checkpoint.publish_wait import PublishProgress

MAX_RANK_FILES = 1000
_UNFINISHED = re.compile(r"step-(\d{8,12})\.([0-9a-z]{1,32})\.tmp")


class RankPart(FrozenModel):
    """Contents of a `.part` file: a rank's files and the positions of its shards in them."""

    files: Annotated[tuple[CheckpointFile, ...], Field(min_length=1, max_length=MAX_RANK_FILES)]
    shards: Annotated[tuple[StoredShard, ...], Field(max_length=MAX_SHARDS)]


def write_rank_part(
    folder: Path,
    shards: Iterable[TensorShard],
    *,
    step: int,
    rank: int,
    write_id: str,
    write: Callable[[Path, str], None] = write_atomically,
) -> None:
    """Write this rank's part of the checkpoint after `step` steps; `write_id` is the id of this write.

    Raises `UnavailableError` if the folder is not writable or its disk is full, and removes this rank's file;
    older checkpoints are untouched.
    """
    work = work_folder(folder, step, write_id)
    try:
        work.mkdir(parents=True, exist_ok=True)
        written = write_shards(work, rank, shards)
        files = tuple(CheckpointFile(name=one.name, num_bytes=one.num_bytes, sha256=one.sha256) for one in written)
        part = RankPart.model_construct(files=files, shards=tuple(shard for one in written for shard in one.shards))
        fsync_path(work)
        write(work / f"{rank}.part", part.model_dump_json())  # rank 0 may publish from now on
    except OSError as error:
        with suppress(OSError):
            _remove_rank_files(work, rank)
        raise write_error(folder, error) from error


def read_rank_part(work: Path, rank: int) -> RankPart:
    """Return the checked part of a rank.

    Raises `OSError` if it is missing, and `UnavailableError` if it is malformed or names files of another rank.
    """
    file = work / f"{rank}.part"
    part = parse_bounded(RankPart, read_bounded(file, MAX_LAYOUT_BYTES), file)
    check_rank_part(part, rank, file)
    for one in part.files:
        if (work / one.name).stat().st_size != one.num_bytes:
            raise refused(file, f"{one.name} does not have {one.num_bytes} bytes")
    return part


def check_rank_part(part: RankPart, rank: int, source: object) -> None:
    """Raise `UnavailableError` if the part of `rank` names files of another rank."""
    for one in part.files:
        if not one.name.startswith(rank_file_prefix(rank)):
            raise refused(source, f"rank {rank} has written no {one.name}")


def publish(folder: Path, *, step: int, samples: int, num_ranks: int, write_id: str, keep: int) -> bool:
    """Publish the checkpoint after `step` steps if all parts are written; return whether they are.

    Removes older checkpoints of the same job except the newest `keep`, and earlier unfinished ones. Checkpoints of
    later steps do not count towards `keep`: they are damaged, or the run would have resumed from them. Raises
    `UnavailableError` if the folder cannot be written, or if the parts do not form a complete model.
    """
    # Step 1: check that all parts exist.
    work = work_folder(folder, step, write_id)
    names = [f"{rank}.part" for rank in range(num_ranks)]
    if not all((work / name).is_file() for name in names):
        return False
    try:
        # Step 2: write the layout and the manifest.
        parts = [read_rank_part(work, rank) for rank in range(num_ranks)]
        layout = write_layout(work, parts)
        files = (*(file for part in parts for file in part.files), layout)
        run = claimed_job(folder)
        manifest = Manifest(step=step, samples=samples, num_ranks=num_ranks, files=files, run=run)
        write_atomically(work / MANIFEST_FILE, manifest.model_dump_json(indent=1))
        # Step 3: remove the parts and rename the folder.
        for name in names:
            (work / name).unlink()
        fsync_path(work)
        _move_into_place(work, folder / checkpoint_name(step), run)
        # Step 4: remove the job's old checkpoints and unfinished folders.
        remove_older(folder, step, keep)
    except OSError as error:
        raise write_error(folder, error) from error
    return True


def publish_at_site(folder: Path, step: int, write_id: str, manifest: bytes, layout: bytes) -> None:
    """Publish what this site keeps of a checkpoint of several sites; raises `OSError`.

    All files are durable everywhere before any site publishes, so a crash between two sites loses nothing: the next
    start publishes at the other sites as well.
    """
    work = work_folder(folder, step, write_id)
    work.mkdir(parents=True, exist_ok=True)
    write_atomically(work / LAYOUT_FILE, layout)
    for part in work.glob("*.part"):
        part.unlink()
    write_atomically(work / MANIFEST_FILE, manifest)
    fsync_path(work)
    _move_into_place(work, folder / checkpoint_name(step), claimed_job(folder))


def remove_older(folder: Path, step: int, keep: int) -> None:
    """Remove the job's checkpoints up to `step` but the newest `keep`, and unfinished ones up to it."""
    place, run = folder / checkpoint_name(step), claimed_job(folder)
    own = sorted(one for one in complete_folders(folder) if one.name <= place.name and _job_of(one) == run)
    for old in own[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    for left in folder.glob("step-*.tmp"):
        if _final_folder(left) <= place and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)


def unfinished_writes(folder: Path) -> list[tuple[int, str]]:
    """Return step and write id of the checkpoints in `folder` that were begun and not published."""
    found = (_UNFINISHED.fullmatch(one.name) for one in folder.glob("step-*.tmp"))
    return [(int(one[1]), one[2]) for one in found if one]


def write_layout(work: Path, parts: Iterable[RankPart]) -> CheckpointFile:
    """Write the layout of all `parts` and return its file; raise `UnavailableError` if they form no complete model."""
    write_atomically(work / LAYOUT_FILE, merged_layout(tuple(parts), work))
    return describe_file(work / LAYOUT_FILE)


def merged_layout(parts: Sequence[RankPart], source: object) -> bytes:
    """Return the layout of all `parts` as JSON; raise `UnavailableError` if they do not form a complete model."""
    layout: CheckpointLayout = merge_layouts(part.shards for part in parts)
    check_layout(layout, {file.name: file.num_bytes for part in parts for file in part.files}, source)
    return layout.model_dump_json().encode()


def report_failure(folder: Path, *, step: int, rank: int, num_ranks: int, write_id: str, reason: str) -> None:
    """Report to the other ranks, through the folder, that the checkpoint failed here; best effort.

    Removes this rank's files first, which frees their space for the report. The last rank to report removes the
    folder, so that nothing of the checkpoint is left.
    """
    work = work_folder(folder, step, write_id)
    with suppress(OSError):
        (work / f"{rank}.part").unlink(missing_ok=True)
        _remove_rank_files(work, rank)
    with suppress(OSError):
        write_atomically(work / f"{rank}.failed", reason)
    if all((work / f"{one}.failed").is_file() for one in range(num_ranks)):
        shutil.rmtree(work, ignore_errors=True)


def find_failure(folder: Path, step: int, write_id: str) -> str | None:
    """Return the reported failure of a rank's part; None without one."""
    with suppress(OSError):  # rank 0 may rename the folder meanwhile
        for report in sorted(work_folder(folder, step, write_id).glob("*.failed")):
            return f"rank {report.stem}: {report.read_text(encoding='utf-8')}"
    return None


def is_published(folder: Path, step: int, write_id: str) -> bool:
    """Return whether the checkpoint of this write id is published; valid once this rank's part is written."""
    return (folder / checkpoint_name(step) / MANIFEST_FILE).is_file() and not work_folder(
        folder, step, write_id
    ).exists()


def read_progress(folder: Path, *, step: int, num_ranks: int, write_id: str) -> PublishProgress:
    """Return how much of this checkpoint is visible here: the ranks without a part, and the bytes so far."""
    work = work_folder(folder, step, write_id)
    missing = tuple(rank for rank in range(num_ranks) if not (work / f"{rank}.part").is_file())
    num_bytes = 0
    with suppress(OSError):  # rank 0 may rename the folder meanwhile
        num_bytes = sum(file.stat().st_size for file in work.iterdir())
    return PublishProgress(missing_ranks=missing, num_bytes=num_bytes)


def clear_unfinished(folder: Path) -> None:
    """Remove unfinished checkpoints left by a crash; called by rank 0 before the first step.

    A complete one that was not yet renamed is published; if that fails, it stays for the next call.
    """
    run = claimed_job(folder)
    for left in folder.glob("step-*.tmp"):
        if left.is_symlink():
            continue
        place = _final_folder(left)
        if (left / MANIFEST_FILE).is_file() and not (place / MANIFEST_FILE).is_file():
            with suppress(OSError):
                _move_into_place(left, place, run)
        else:
            shutil.rmtree(left, ignore_errors=True)


def _remove_rank_files(work: Path, rank: int) -> None:
    """Remove a rank's files with shards."""
    for file in work.glob(f"{rank_file_prefix(rank)}*"):
        file.unlink(missing_ok=True)


def _job_of(place: Path) -> str | None:
    """Return the job that has written the checkpoint in `place`; None if its manifest does not say."""
    with suppress(OSError, UnavailableError, ProtocolError):
        return read_manifest(place).run
    return None


def _move_into_place(work: Path, place: Path, run: str) -> None:
    """Rename the complete `work` to `place`; remove an existing `place` of job `run` before, its manifest first.

    Raises `FileExistsError` if that is a link, which may lead to another job's, or a checkpoint of another job.
    """
    if place.is_symlink() or _job_of(place) not in (None, "", run):
        raise FileExistsError(errno.EEXIST, f"{place.name} there is a link or a checkpoint of another job")
    if place.exists():
        (place / MANIFEST_FILE).unlink(missing_ok=True)
        fsync_path(place)
        shutil.rmtree(place)
    work.rename(place)
    fsync_path(place.parent)


def work_folder(folder: Path, step: int, write_id: str) -> Path:
    """Return the folder in which the checkpoint after `step` steps is written."""
    return folder / (checkpoint_name(step) + f".{write_id}.tmp")


def _final_folder(work: Path) -> Path:
    """Return the final folder of the checkpoint written in `work`."""
    return work.with_name(work.name.partition(".")[0])


def write_error(folder: Path, error: Exception) -> UnavailableError:
    """Return the error for a checkpoint that cannot be written to `folder`."""
    reason = (isinstance(error, OSError) and error.strerror) or error
    return UnavailableError(
        f"cannot write a checkpoint to {folder}: {reason}",
        hint="free space there: a restart goes on from the newest checkpoint in it; if the job has failed, submit it "
        "again with `resume:` and this folder",
    )
