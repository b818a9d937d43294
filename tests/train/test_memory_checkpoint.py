"""Rules of snapshots in shared memory: one is whole at any time, and outlives the process that wrote it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.errors import UnavailableError
from isthmus.train.checkpoint.memory_checkpoint import MemoryCheckpoint
from isthmus.train.checkpoint.memory_slot import MemorySlot
from tests.train.devices import needs_gpu

Tensors = dict[str, torch.Tensor]


def state(step: int, elements: int = 1000) -> Tensors:
    """Tensors of several types and shapes, all filled by the step."""
    return {
        "weight/a": torch.full((elements,), float(step)),
        "weight/b": torch.full((3, 5), step, dtype=torch.bfloat16),
        "weight/across": torch.full((4, 6), float(step)).t(),
        "step/a": torch.tensor(float(step)),
        "rng/rank-00000": torch.full((17,), step, dtype=torch.uint8),
        "empty": torch.empty(0, 4),
    }


def files(folder: Path, kind: str) -> list[Path]:
    return sorted(folder.glob(f"*/*.{kind}"))


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[MemoryCheckpoint]:
    one = MemoryCheckpoint("job-1", 0, tmp_path)
    yield one
    one.clear()


def assert_is(tensors: Tensors, expected: Tensors) -> None:
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor), name


def test_the_last_two_states_are_there(memory: MemoryCheckpoint) -> None:
    """Each snapshot replaces the older of two; what is loaded is what was taken, and when."""
    assert memory.newest() is None
    for step in (3, 4, 5):
        memory.begin_snapshot(step, step * 8, state(step))
    assert memory.steps() == (4, 5)
    found = memory.load(4)
    assert (found.step, found.samples) == (4, 32)
    assert_is(found.tensors, state(4))
    newest = memory.newest()
    assert newest is not None
    assert_is(newest.tensors, state(5))
    with pytest.raises(UnavailableError, match="step 3"):
        memory.load(3)


def test_tensors_may_change_once_waited_for(memory: MemoryCheckpoint) -> None:
    """What is changed after `wait` is not in the snapshot."""
    tensors = state(1)
    memory.begin_snapshot(1, 8, tensors)
    memory.wait()
    for tensor in tensors.values():
        tensor.zero_()
    assert_is(memory.load(1).tensors, state(1))


def test_a_killed_process_leaves_its_snapshots(tmp_path: Path) -> None:
    """Killed with SIGKILL right after a snapshot, its successor finds both states and replaces the older."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        one = MemoryCheckpoint("job-1", 3, tmp_path)
        for step in (1, 2):
            one.begin_snapshot(step, step, state(step))
            one.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    successor = MemoryCheckpoint("job-1", 3, tmp_path)
    assert successor.steps() == (1, 2)
    assert_is(successor.load(2).tensors, state(2))
    successor.begin_snapshot(3, 3, state(3))
    assert successor.steps() == (2, 3)
    successor.clear()


@pytest.mark.parametrize("damage", ["data", "short", "index", "no index", "no data"])
def test_damage_is_noticed(tmp_path: Path, damage: str) -> None:
    """A slot that is not what was written does not count, at a start and in a process that wrote it."""
    writer = MemoryCheckpoint("job-1", 0, tmp_path)
    for step in (1, 2):
        writer.begin_snapshot(step, step, state(step))
    writer.wait()
    data, index = files(tmp_path, "data")[1], files(tmp_path, "index")[1]
    match damage:
        case "data":
            with data.open("r+b") as file:
                file.seek(100)
                file.write(b"\1")
        case "short":
            os.truncate(data, 100)
        case "index":
            index.write_text(index.read_text().replace('"step":2', '"step":7'))
        case "no index":
            index.unlink()
        case _:
            data.unlink()
    with pytest.raises(UnavailableError):
        writer.load(2)
    assert writer.steps() == (1,)
    successor = MemoryCheckpoint("job-1", 0, tmp_path)
    assert successor.steps() == (1,)
    successor.begin_snapshot(2, 2, state(2))
    assert successor.steps() == (1, 2)
    successor.clear()


@settings(max_examples=25, deadline=None)
@given(
    cut=st.integers(0, 3000),
    at=st.integers(0, 10**9),
    mask=st.integers(1, 255),
    kind=st.sampled_from(["data", "index"]),
)
def test_any_damaged_byte_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, cut: int, at: int, mask: int, kind: str
) -> None:
    """Whichever byte of data or index changes, the slot is not whole."""
    slot_folder = tmp_path_factory.mktemp("slot")
    one = MemoryCheckpoint("job-1", 0, slot_folder)
    tensors = {"a": torch.arange(cut + 1)}
    one.begin_snapshot(1, 1, tensors)
    one.wait()
    file = files(slot_folder, kind)[0]
    last = (cut + 1) * 8 if kind == "data" else file.stat().st_size
    with file.open("r+b") as stream:
        stream.seek(at % last)
        byte = stream.read(1)[0]
        stream.seek(at % last)
        stream.write(bytes([byte ^ mask]))
    assert one.newest() is None
    one.clear()


@settings(max_examples=25, deadline=None)
@given(killed_at=st.integers(0, 40))
def test_half_a_copy_does_not_count(tmp_path_factory: pytest.TempPathFactory, killed_at: int) -> None:
    """However much of the data was written before the end, the snapshot before it is what is found."""
    folder = tmp_path_factory.mktemp("half")
    one = MemoryCheckpoint("job-1", 0, folder)
    for step in (1, 2):
        one.begin_snapshot(step, step, state(step, 10))
    one.wait()
    slot = MemorySlot(folder / "isthmus-job-1" / "rank-00000.0")
    slot.open_for_write(1000)[:killed_at] = 9
    assert MemoryCheckpoint("job-1", 0, folder).steps() == (2,)
    one.clear()


def test_ranks_and_runs_do_not_meet(tmp_path: Path) -> None:
    """Snapshots of other ranks and runs are others', and a clean end removes one's own alone."""
    ones = [MemoryCheckpoint(run, rank, tmp_path) for run in ("job-1", "job-2") for rank in (0, 1)]
    for number, one in enumerate(ones):
        one.begin_snapshot(number + 1, 1, state(number + 1))
    assert [one.steps() for one in ones] == [(1,), (2,), (3,), (4,)]
    ones[0].clear()
    assert ones[1].steps() == (2,)
    for one in ones[1:]:
        one.clear()
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_another_size_takes_the_place(memory: MemoryCheckpoint, tmp_path: Path) -> None:
    """Slots grow and shrink with what is put into them; more is not kept."""
    memory.begin_snapshot(1, 1, state(1))
    memory.begin_snapshot(2, 2, state(2, 100_000))
    memory.begin_snapshot(3, 3, state(3, 10))
    assert memory.steps() == (2, 3)
    assert_is(memory.load(3).tensors, state(3, 10))
    memory.begin_snapshot(4, 4, state(4, 10))
    memory.wait()
    assert sum(file.stat().st_size for file in files(tmp_path, "data")) < 20_000


def test_what_does_not_fit_is_refused_at_once(memory: MemoryCheckpoint) -> None:
    """Two states that the file system has no room for are named, with what there is; the run may go on."""
    huge = torch.empty(1).expand(10**15)
    with pytest.raises(UnavailableError, match=r"two snapshots of .* need .* has"):
        memory.begin_snapshot(1, 1, {"weight/a": huge})
    memory.begin_snapshot(1, 1, state(1))
    assert memory.steps() == (1,)


def test_what_goes_wrong_in_the_background_is_raised_by_wait(memory: MemoryCheckpoint, tmp_path: Path) -> None:
    """A folder that vanished is no snapshot, and said so."""
    memory.begin_snapshot(1, 1, state(1))
    memory.wait()
    (tmp_path / "isthmus-job-1" / "rank-00000.1.data").mkdir()
    memory.begin_snapshot(2, 2, state(2))
    with pytest.raises(UnavailableError, match="cannot keep"):
        memory.wait()
    assert memory.steps() == (1,)


def test_what_lies_beyond_the_step_resumed_from_is_dropped(memory: MemoryCheckpoint, tmp_path: Path) -> None:
    """A run that goes on from an older step does not find its former future later."""
    for step in (4, 5):
        memory.begin_snapshot(step, step, state(step))
    memory.drop_after(4)
    assert memory.steps() == (4,)
    assert MemoryCheckpoint("job-1", 0, tmp_path).steps() == (4,)


@pytest.mark.gpu
@needs_gpu
def test_tensors_of_a_device_are_kept(memory: MemoryCheckpoint) -> None:
    """A device's tensors come back as they were when the snapshot began."""
    tensors = {name: tensor.cuda() for name, tensor in state(1, 10_000_000).items()}
    memory.begin_snapshot(1, 1, tensors)
    memory.wait()
    for tensor in tensors.values():
        tensor.zero_()
    assert_is(memory.load(1).tensors, state(1, 10_000_000))
