"""Rules of writing checkpoints while training goes on: all ranks' or none, and no rank waits for the disk."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import pytest
import torch

from isthmus.core.errors import PeerError, UnavailableError
from isthmus.train.checkpoint.async_checkpoint_writer import AsyncCheckpointWriter
from isthmus.train.checkpoint.checkpoint_folder import load_shards, newest_valid
from isthmus.train.checkpoint.find_valid_checkpoint import find_valid_checkpoint
from isthmus.train.checkpoint.layout.shard_files import rank_file_name
from isthmus.train.checkpoint.layout.tensor_shard import TensorShard
from isthmus.train.checkpoint.write_checkpoint import publish
from tests.train.devices import on_devices


def writers(folder: Path, size: int = 2, writing: str = "1", **options: Any) -> list[AsyncCheckpointWriter]:
    return [
        AsyncCheckpointWriter(folder, rank=rank, num_ranks=size, write_id=writing, keep=2, **options)
        for rank in range(size)
    ]


def piece(rank: int, step: float) -> TensorShard:
    return TensorShard.full(f"weight/{rank}", torch.full((1000,), step))


def nothing() -> None:
    """Called when a checkpoint is complete."""


def test_a_checkpoint_is_complete_at_all_ranks_at_once(tmp_path: Path) -> None:
    """Once it is complete each rank is notified; before, none is, however long ago it wrote its part."""
    first, second = writers(tmp_path)
    told = [Event(), Event()]
    first.begin(1, 8, [piece(0, 1)], told[0].set)
    first.wait_copied()
    assert newest_valid(tmp_path) is None
    second.begin(1, 8, [piece(1, 1)], told[1].set)
    for one, event in zip((first, second), told, strict=True):
        one.wait()
        assert event.is_set()
    found = newest_valid(tmp_path)
    assert found is not None
    assert (found.step, found.samples, found.num_ranks) == (1, 8, 2)


@on_devices
def test_tensors_may_change_once_they_are_copied(device: str, tmp_path: Path) -> None:
    """What is changed after `settle` is not in the checkpoint."""
    (only,) = writers(tmp_path, 1)
    mine = replace(piece(0, 1), tensor=piece(0, 1).tensor.to(device))
    only.begin(1, 8, [mine], nothing)
    only.wait_copied()
    mine.tensor.zero_()
    only.wait()
    found = piece(0, 0)
    load_shards(tmp_path, 1, [found])
    assert bool((found.tensor == 1).all())


def test_the_next_checkpoint_waits_for_the_one_before(tmp_path: Path) -> None:
    """Two are never written at once: a disk that does not keep up holds training up."""
    (only,) = writers(tmp_path, 1)
    for step in (1, 2, 3):
        only.begin(step, 8 * step, [piece(0, step)], nothing)
        assert step == 1 or (newest_valid(tmp_path) or pytest.fail("none")).step >= step - 1
    only.wait()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_a_rank_that_cannot_write_fails_the_checkpoint_everywhere(tmp_path: Path) -> None:
    """The others get the reason, and do not wait without end."""
    first, second = writers(tmp_path)
    first.begin(1, 8, [piece(0, 1)], nothing)
    work = tmp_path / "step-00000001.1.tmp"
    work.mkdir(exist_ok=True)
    (work / rank_file_name(1)).mkdir()
    second.begin(1, 8, [piece(1, 1)], nothing)
    with pytest.raises(UnavailableError, match="cannot write a checkpoint"):
        second.wait()
    with pytest.raises(UnavailableError, match="after step 1 failed: rank 1: cannot write"):
        first.wait()
    assert newest_valid(tmp_path) is None
    assert list(tmp_path.iterdir()) == [], "the last rank to report has removed the unfinished checkpoint"


def test_a_failure_is_raised_before_the_next_update(tmp_path: Path) -> None:
    """Training does not go on for hours without its checkpoints."""
    (tmp_path / "taken").write_text("")
    (only,) = writers(tmp_path / "taken", 1)
    only.begin(1, 8, [piece(0, 1)], nothing)
    with pytest.raises(UnavailableError, match="taken"):  # noqa: PT012 - the second time at the latest
        only.wait_copied()
        only.wait()


def test_a_lost_rank_ends_the_wait(tmp_path: Path) -> None:
    """A rank that waits for the parts of others gets an error if one is gone."""
    loss = PeerError("peer 1 is lost")
    first = AsyncCheckpointWriter(tmp_path, rank=0, num_ranks=2, write_id="1", keep=1, find_loss=lambda: loss)
    first.begin(1, 8, [piece(0, 1)], nothing)
    with pytest.raises(PeerError, match="peer 1 is lost"):
        first.wait()
    first.close()


def test_ranks_that_meet_anew_write_anew(tmp_path: Path) -> None:
    """What was under way is given up, and is not mixed with what is written after."""
    first, second = writers(tmp_path)
    first.begin(1, 8, [piece(0, 1)], nothing)
    first.wait_copied()
    for one in (first, second):
        one.close()
    for rank, one in enumerate(again := writers(tmp_path, writing="2")):
        one.begin(1, 8, [piece(rank, 7)], nothing)
    for one in again:
        one.wait()
    found = piece(0, 0)
    load_shards(tmp_path, 1, [found])
    assert bool((found.tensor == 7).all())


def test_who_gives_up_waits_for_a_checkpoint_that_is_being_completed(tmp_path: Path) -> None:
    """Else its folder could be cleared in the midst, with those before it already removed.

    1. All parts are there: rank 0 begins to complete the checkpoint.
    2. A rank is lost: what is under way is given up, before the folder is cleared.
    3. The checkpoint is completed; only then may the folder be cleared.
    """
    completing, go, order = Event(), Event(), list[str]()

    def slowly(*given: Any, **named: Any) -> bool:
        completing.set()
        assert go.wait(10)
        order.append("completed")
        return publish(*given, **named)

    (only,) = writers(tmp_path, 1, publish=slowly)
    only.begin(1, 8, [piece(0, 1)], nothing)
    assert completing.wait(10)
    with ThreadPoolExecutor(1) as pool:
        given_up = pool.submit(only.close)
        given_up.add_done_callback(lambda _: order.append("given up"))
        assert not wait([given_up], 0.02).done
        go.set()
    assert order == ["completed", "given up"]
    assert newest_valid(tmp_path) is not None


@pytest.mark.parametrize("damaged", [None, rank_file_name(0), rank_file_name(1), "layout.json", "manifest.json"])
def test_ranks_find_the_newest_whole_checkpoint_together(tmp_path: Path, damaged: str | None) -> None:
    """Each reads its share of the files, and all begin from the same one."""
    for step in (1, 2):
        for rank, one in enumerate(both := writers(tmp_path)):
            one.begin(step, 8 * step, [piece(rank, step)], nothing)
        for one in both:
            one.wait()
    if damaged is not None:
        (tmp_path / "step-00000002" / damaged).write_bytes(b"{")
    met = Barrier(2, timeout=20)
    slots: dict[int, object] = {}

    def find(rank: int) -> int:
        def exchanged(mine: object) -> list[object]:
            met.wait()
            slots[rank] = mine
            met.wait()
            return [slots[0], slots[1]]

        def from_first(numbers: Sequence[int]) -> list[int]:
            return list(exchanged(numbers)[0])  # type: ignore[call-overload, no-any-return]

        found = find_valid_checkpoint(tmp_path, rank, 2, from_first, exchanged)  # type: ignore[arg-type]
        assert found is not None
        return found.step

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(find, (0, 1))) == [1 if damaged else 2] * 2
