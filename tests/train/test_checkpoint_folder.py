"""Rules of checkpoints on disk: there is always a whole one, whatever happens while the next is written."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from isthmus.core.errors import ProtocolError, UnavailableError
from isthmus.core.messages.worker_folder import write_atomically
from isthmus.train.checkpoint.checkpoint_folder import (
    Manifest,
    load_shards,
    newest_valid,
    read_manifests,
    verify_rank_file,
)
from isthmus.train.checkpoint.layout.shard_files import rank_file_name
from isthmus.train.checkpoint.layout.tensor_shard import TensorShard
from isthmus.train.checkpoint.write_checkpoint import (
    clear_unfinished,
    find_failure,
    is_published,
    publish,
    report_failure,
    write_rank_part,
)


def piece(rank: int, step: int, elements: int = 4) -> TensorShard:
    """The tensor `weight/RANK`, filled with the step."""
    return TensorShard.full(f"weight/{rank}", torch.full((elements,), float(step)))


def complete(folder: Path, step: int, *, size: int = 2, keep: int = 2, writing: str = "1") -> bool:
    return publish(folder, step=step, samples=step * 8, num_ranks=size, write_id=writing, keep=keep)


def write(folder: Path, step: int, *, size: int = 2, keep: int = 2, elements: int = 4) -> None:
    """Let `size` ranks write a checkpoint; rank r holds the tensor `r` filled with the step."""
    for rank in range(size):
        assert not complete(folder, step, size=size, keep=keep)
        write_rank_part(folder, [piece(rank, step, elements)], step=step, rank=rank, write_id="1")
    assert not is_published(folder, step, "1")
    assert complete(folder, step, size=size, keep=keep)
    assert is_published(folder, step, "1")


def loaded(folder: Path, step: int, rank: int) -> list[float]:
    found = piece(rank, 0)
    load_shards(folder, step, [found])
    return [float(one) for one in found.tensor]


def found_step(folder: Path) -> int | None:
    found = newest_valid(folder)
    return None if found is None else found.step


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Let no file grow beyond `num_bytes`, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_was_written_is_found_and_loaded(tmp_path: Path) -> None:
    """The newest checkpoint says steps and samples, and gives each tensor by its name in the whole model."""
    assert newest_valid(tmp_path) is None
    write(tmp_path, 3)
    write(tmp_path, 7)
    manifest = newest_valid(tmp_path)
    assert manifest is not None
    assert (manifest.step, manifest.samples, manifest.num_ranks) == (7, 56, 2)
    assert [one.name for one in manifest.files] == [rank_file_name(0), rank_file_name(1), "layout.json"]
    assert loaded(tmp_path, 7, 1) == [7.0] * 4
    names = {one.name for one in (tmp_path / "step-00000007").iterdir()}
    assert names == {"manifest.json", *(one.name for one in manifest.files)}


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    """`keep` checkpoints remain, the newest ones, and nothing of those that were begun and given up."""
    for step in (1, 2, 10, 11):
        write_rank_part(tmp_path, [piece(0, step)], step=step, rank=0, write_id="given up")
        write(tmp_path, step, keep=2)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["step-00000010", "step-00000011"]


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "layout", "manifest", "no manifest"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, damage: str) -> None:
    """Where a file does not have its checksum, the checkpoint before is taken."""
    write(tmp_path, 1)
    write(tmp_path, 2)
    place = tmp_path / "step-00000002"
    file, manifest = place / rank_file_name(1), place / "manifest.json"
    data = file.read_bytes()
    match damage:
        case "flip":
            file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        case "cut":
            file.write_bytes(data[:-1])
        case "remove":
            file.unlink()
        case "layout":
            (place / "layout.json").write_bytes(b"")
        case "manifest":
            manifest.write_text("{")
        case _:
            manifest.unlink()
    assert found_step(tmp_path) == 1


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """A write that does not fit raises `UnavailableError` naming the folder; nothing is left in the way."""
    write(tmp_path, 1, size=1)
    with largest_file(20_000), pytest.raises(UnavailableError, match=str(tmp_path)) as caught:
        write(tmp_path, 2, size=1, elements=100_000)
    assert "free space there: a restart goes on from the newest checkpoint" in str(caught.value.hint)
    assert found_step(tmp_path) == 1
    assert not list(tmp_path.glob("*/*.part"))
    report_failure(tmp_path, step=2, rank=0, num_ranks=1, write_id="1", reason="full")
    assert [one.name for one in tmp_path.iterdir()] == ["step-00000001"], "nothing of it is left"
    clear_unfinished(tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["step-00000001"]
    write(tmp_path, 2, size=1, elements=100_000)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A file in the folder's place is answered with the folder's name."""
    (tmp_path / "taken").write_text("")
    with pytest.raises(UnavailableError, match="taken"):
        write(tmp_path / "taken", 1, size=1)


def test_a_crash_while_writing_leaves_no_checkpoint(tmp_path: Path) -> None:
    """A folder that was not renamed does not count, and is removed at the next start."""
    write(tmp_path, 1)
    write_rank_part(tmp_path, [piece(0, 2)], step=2, rank=0, write_id="1")
    assert found_step(tmp_path) == 1
    clear_unfinished(tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["step-00000001"]


def test_a_part_may_be_completed_at_once(tmp_path: Path) -> None:
    """A rank is done with its part before others can see it.

    1. Rank 0 has written, and waits for rank 1.
    2. Rank 1 writes its part; in the same moment rank 0 sees it, and moves the folder to its place.
    3. Rank 1, going on in what was the folder, has nothing left to do there.
    """
    write_rank_part(tmp_path, [piece(0, 1)], step=1, rank=0, write_id="1")

    def seen_at_once(path: Path, text: str) -> None:
        write_atomically(path, text)
        assert complete(tmp_path, 1)

    write_rank_part(tmp_path, [piece(1, 1)], step=1, rank=1, write_id="1", write=seen_at_once)
    assert found_step(tmp_path) == 1


@pytest.mark.parametrize("rest", ["nothing", "old", "manifest gone"])
def test_a_crash_before_the_last_rename_loses_nothing(rest: str, tmp_path: Path) -> None:
    """A whole checkpoint that is not in its place is put there, unless one with a manifest is there."""
    place, work = tmp_path / "step-00000001", tmp_path / "step-00000001.2.tmp"
    write(tmp_path, 1)
    shutil.copytree(place, work)
    (place / "old").touch()
    if rest == "nothing":
        shutil.rmtree(place)
    if rest == "manifest gone":
        (place / "manifest.json").unlink()
    clear_unfinished(tmp_path)
    assert found_step(tmp_path) == 1
    assert [one.name for one in tmp_path.iterdir()] == [place.name]
    assert (place / "old").exists() == (rest == "old")


def test_a_whole_checkpoint_that_cannot_be_put_in_its_place_is_kept(tmp_path: Path) -> None:
    """It may be the only one: the next start tries again."""
    place, work = tmp_path / "step-00000001", tmp_path / "step-00000001.2.tmp"
    write(tmp_path, 1)
    place.rename(work)
    place.touch()  # a file in its place
    clear_unfinished(tmp_path)
    assert found_step(tmp_path) is None
    place.unlink()
    clear_unfinished(tmp_path)
    assert found_step(tmp_path) == 1


def test_a_folder_that_is_completed_meanwhile_tells_of_no_failure(tmp_path: Path) -> None:
    """1. A rank finds the folder of one under way. 2. Rank 0 completes it. 3. The rank looks inside."""

    class Renamed(type(tmp_path)):  # type: ignore[misc]
        def glob(self, pattern: str) -> Iterator[Path]:
            raise FileNotFoundError("the folder has its name now")

    assert find_failure(Renamed(tmp_path), 4, "a") is None


def test_parts_of_another_attempt_do_not_count(tmp_path: Path) -> None:
    """What a rank wrote before a restart of all is not mixed with what another writes after."""
    write_rank_part(tmp_path, [piece(0, 2)], step=2, rank=0, write_id="1")
    write_rank_part(tmp_path, [piece(1, 2)], step=2, rank=1, write_id="2")
    assert not complete(tmp_path, 2, writing="1")
    assert not complete(tmp_path, 2, writing="2")


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    """Training that reaches a damaged checkpoint's step again writes it again."""
    write(tmp_path, 1)
    (tmp_path / "step-00000001" / rank_file_name(0)).write_bytes(b"")
    assert newest_valid(tmp_path) is None
    for rank in (0, 1):
        write_rank_part(tmp_path, [piece(rank, 1)], step=1, rank=rank, write_id="2")
    assert not is_published(tmp_path, 1, "2")
    assert complete(tmp_path, 1, writing="2")
    assert found_step(tmp_path) == 1


def test_a_damaged_later_checkpoint_does_not_push_out_whole_ones(tmp_path: Path) -> None:
    """A run that begins before a damaged checkpoint keeps what it writes, though its steps are lower."""
    write(tmp_path, 10)
    write(tmp_path, 20)
    (tmp_path / "step-00000020/manifest.json").write_text("{")
    for step in (12, 14):
        write(tmp_path, step, keep=1)
        assert found_step(tmp_path) == step
    assert sorted(one.name for one in tmp_path.iterdir()) == ["step-00000014", "step-00000020"]


def test_another_releases_layout_is_refused_and_not_passed_over(tmp_path: Path) -> None:
    """A run does not silently start from step 0 beside checkpoints that it cannot read."""
    place = tmp_path / "step-00000005"
    place.mkdir()
    (place / "manifest.json").write_text('{"version": 1, "step": 5, "samples": 40, "files": []}')
    with pytest.raises(ProtocolError, match="has layout 1, this release reads layouts 2 and 3"):
        newest_valid(tmp_path)


@pytest.mark.slow
def test_a_crash_between_any_two_file_operations_loses_no_checkpoint(tmp_path: Path) -> None:
    """Killed before each file operation in turn, the newest checkpoint reported written can be restored."""
    command = [sys.executable, "-m", "tests.train.folder_crash_points", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 60


def test_a_checkpoint_is_read_back_as_its_manifest_says(tmp_path: Path) -> None:
    """Whole: the size of the rank's file; one bit damaged, cut short or gone: an error that names it."""
    write(tmp_path, 3)
    file = tmp_path / "step-00000003" / rank_file_name(1)
    whole = file.read_bytes()
    assert verify_rank_file(tmp_path, 3, 1) == len(whole)
    for damaged in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[:-1]):
        file.write_bytes(damaged)
        with pytest.raises(UnavailableError, match="checksum differs"):
            verify_rank_file(tmp_path, 3, 1)
    file.unlink()
    with pytest.raises(UnavailableError, match="cannot read checkpoint"):
        verify_rank_file(tmp_path, 3, 1)
    assert verify_rank_file(tmp_path, 3, 0) > 0, "the other rank's is whole"
    (tmp_path / "step-00000003" / "layout.json").write_bytes(b"")
    with pytest.raises(UnavailableError, match=r"layout\.json is damaged"):
        verify_rank_file(tmp_path, 3, 0)


def test_manifests_come_newest_first(tmp_path: Path) -> None:
    """Every complete checkpoint is offered, whether or not its files are still whole."""
    write(tmp_path, 1)
    write(tmp_path, 2)
    (tmp_path / "step-00000002" / rank_file_name(0)).unlink()
    found: list[Manifest] = list(read_manifests(tmp_path))
    assert [one.step for one in found] == [2, 1]
