"""Rules of checkpoints: there is always a whole one, whatever happens while the next is written."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier

import pytest
import torch

from isthmus.core.errors import UnavailableError
from isthmus.train.checkpoint import clear_unfinished, load, make_folder, newest, read_back, save


def write(folder: Path, step: int, *, size: int = 2, keep: int = 2, elements: int = 4) -> None:
    """Let `size` ranks write a checkpoint; rank r holds the tensor `r` filled with the step."""
    parts: dict[int, torch.Tensor] = {}
    met = Barrier(size, timeout=20)

    def run(rank: int) -> None:
        def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
            parts[rank] = tensor
            met.wait()
            return [parts[other] for other in range(size)]

        tensors = {f"weight/{rank}": torch.full((elements,), float(step))}
        try:
            save(folder, tensors, step=step, samples=step * 8, rank=rank, gather=gather, keep=keep)
        except UnavailableError:
            met.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        for one in [pool.submit(run, rank) for rank in range(size)]:
            one.result(20)


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
    assert newest(tmp_path) is None
    write(tmp_path, 3)
    write(tmp_path, 7)
    manifest = newest(tmp_path)
    assert manifest is not None
    assert (manifest.step, manifest.samples, len(manifest.files)) == (7, 56, 2)
    assert load(tmp_path, 7, ["1"])["weight/1"].tolist() == [7.0] * 4
    assert set(load(tmp_path, 7, ["0", "1"])) == {"weight/0", "weight/1"}


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    """`keep` checkpoints remain, the newest ones."""
    for step in (1, 2, 10, 11):
        write(tmp_path, step, keep=2)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["step-00000010", "step-00000011"]


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "manifest", "no manifest"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, damage: str) -> None:
    """Where a file does not have its checksum, the checkpoint before is taken."""
    write(tmp_path, 1)
    write(tmp_path, 2)
    place = tmp_path / "step-00000002"
    file, manifest = place / "rank-00001.safetensors", place / "manifest.json"
    data = file.read_bytes()
    match damage:
        case "flip":
            file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        case "cut":
            file.write_bytes(data[:-1])
        case "remove":
            file.unlink()
        case "manifest":
            manifest.write_text("{")
        case _:
            manifest.unlink()
    found = newest(tmp_path)
    assert found is not None
    assert found.step == 1


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """A write that does not fit raises `UnavailableError` naming the folder; nothing is left in the way."""
    write(tmp_path, 1, size=1)
    with largest_file(20_000), pytest.raises(UnavailableError, match=str(tmp_path)):
        write(tmp_path, 2, size=1, elements=100_000)
    found = newest(tmp_path)
    assert found is not None
    assert found.step == 1
    assert not list(tmp_path.glob("*/*00000.safetensors.tmp"))
    clear_unfinished(tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["step-00000001"]
    write(tmp_path, 2, size=1, elements=100_000)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A file in the folder's place is answered with the folder's name."""
    (tmp_path / "taken").write_text("")
    with pytest.raises(UnavailableError, match="taken"):
        write(tmp_path / "taken", 1, size=1)
    with pytest.raises(UnavailableError, match="taken"):
        make_folder(tmp_path / "taken")


def test_a_crash_while_writing_leaves_no_checkpoint(tmp_path: Path) -> None:
    """A folder that was not renamed does not count, and is removed at the next start."""
    write(tmp_path, 1)
    (tmp_path / "step-00000002.tmp").mkdir()
    (tmp_path / "step-00000002.tmp/rank-00000.safetensors").write_bytes(b"half")
    found = newest(tmp_path)
    assert found is not None
    assert found.step == 1
    clear_unfinished(tmp_path)
    assert not (tmp_path / "step-00000002.tmp").exists()


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    """Training that comes by a damaged checkpoint's step again writes it anew."""
    write(tmp_path, 1)
    (tmp_path / "step-00000001/rank-00000.safetensors").write_bytes(b"")
    assert newest(tmp_path) is None
    write(tmp_path, 1)
    assert newest(tmp_path) is not None


def test_another_model_is_refused(tmp_path: Path) -> None:
    """A tensor that the checkpoint lacks is named."""
    write(tmp_path, 1)
    with pytest.raises(UnavailableError, match=r"has no tensor 'model\.norm'"):
        load(tmp_path, 1, ["0", "model.norm"])


def test_a_folder_that_is_not_shared_is_noticed(tmp_path: Path) -> None:
    """Where rank 0 does not see the file that another rank wrote, it says what the folder must be."""

    def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor, tensor]

    with pytest.raises(UnavailableError, match="share"):
        save(tmp_path, {"weight/a": torch.ones(1)}, step=1, samples=1, rank=0, gather=gather, keep=1)
    assert newest(tmp_path) is None


def test_a_damaged_later_checkpoint_does_not_push_out_whole_ones(tmp_path: Path) -> None:
    """A run that begins before a damaged checkpoint keeps what it writes, though its steps are lower."""
    write(tmp_path, 10)
    write(tmp_path, 20)
    (tmp_path / "step-00000020/manifest.json").write_text("{")
    for step in (12, 14):
        write(tmp_path, step, keep=1)
        found = newest(tmp_path)
        assert found is not None
        assert found.step == step
    assert sorted(one.name for one in tmp_path.iterdir()) == ["step-00000014", "step-00000020"]


@pytest.mark.slow
def test_a_crash_between_any_two_file_operations_loses_no_checkpoint(tmp_path: Path) -> None:
    """Killed before each file operation in turn, the newest checkpoint reported written can be restored."""
    command = [sys.executable, "-m", "tests.train.crash_points", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 40


def test_a_checkpoint_is_read_back_as_its_manifest_says(tmp_path: Path) -> None:
    """Whole: the size of the rank's file; one bit damaged, cut short or gone: an error that names it."""
    write(tmp_path, 3)
    file = tmp_path / "step-00000003" / "rank-00001.safetensors"
    whole = file.read_bytes()
    assert read_back(tmp_path, 3, 1) == len(whole)
    for damaged in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[:-1]):
        file.write_bytes(damaged)
        with pytest.raises(UnavailableError, match="checksum differs"):
            read_back(tmp_path, 3, 1)
    file.unlink()
    with pytest.raises(UnavailableError, match="does not read"):
        read_back(tmp_path, 3, 1)
    assert read_back(tmp_path, 3, 0) > 0, "the other rank's is whole"
