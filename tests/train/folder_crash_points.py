"""Write checkpoints and be cut off at one file operation after the other: run by `test_checkpoint_folder`.

`python -m tests.train.folder_crash_points FOLDER` forks a child per cut. The child writes the checkpoints of
steps 1 to 3, keeping one, and the last one again, as after a loss. It ends like a killed process just before
its n-th operation on a file of the folder. The parent then looks for what a restart would find, and lets it
go on. Prints the number of cuts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from isthmus.train.checkpoint.checkpoint_folder import load_shards, newest_valid
from isthmus.train.checkpoint.layout.tensor_shard import TensorShard
from isthmus.train.checkpoint.write_checkpoint import clear_unfinished, publish, write_rank_part

STEPS = 3
_BY_PATH = {"open", "os.mkdir", "os.rename"}
_ANYWHERE = {"os.remove", "os.rmdir"}
"""Removals may name a file relative to an open folder."""


def write(folder: Path, step: int, writing: str = "1") -> None:
    """Write the checkpoint of one step, of two ranks one after the other."""
    for rank in (0, 1):
        piece = TensorShard.full(f"weight/{rank}", torch.full((8,), float(step)))
        write_rank_part(folder, [piece], step=step, rank=rank, write_id=writing)
    assert publish(folder, step=step, samples=step * 2, num_ranks=2, write_id=writing, keep=1)


def write_all(folder: Path) -> None:
    """Write the checkpoints of all steps, and after each the step that is done."""
    for step in range(1, STEPS + 1):
        write(folder, step)
        (folder / "done").write_text(str(step))
    write(folder, STEPS, writing="2")


def cut_off(folder: Path, before: int, work: Callable[[], None]) -> bool:
    """Do `work` in a child that dies before its operation `before` on `folder`; return whether it did."""
    child = os.fork()
    if child == 0:
        seen = 0

        def watch(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal seen
            here = any(str(folder) in str(one) for one in arguments[:2])
            if event in _ANYWHERE or (event in _BY_PATH and here):
                seen += 1
                if seen == before:
                    os._exit(9)

        sys.addaudithook(watch)
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def check(folder: Path) -> None:
    """A restart finds the last checkpoint that was reported written (or a later one), whole, and goes on."""
    done = folder / "done"
    reported = int(done.read_text() or 0) if done.exists() else 0
    clear_unfinished(folder)
    manifest = newest_valid(folder)
    step = manifest.step if manifest else 0
    assert reported <= step <= reported + 2, (reported, step)
    if manifest:
        for rank in (0, 1):
            found = TensorShard.full(f"weight/{rank}", torch.zeros(8))
            load_shards(folder, step, [found])
            assert found.tensor.tolist() == [float(step)] * 8
    write(folder, step + 1)
    after = newest_valid(folder)
    assert after is not None
    assert after.step == step + 1
    assert not list(folder.glob("*.tmp"))


def main(folder: Path) -> int:
    """Cut at every operation until the child reaches its end; return how many cuts there were."""
    torch.set_num_threads(1)
    for before in range(1, 10_000):
        place = folder / f"{before:04d}"
        place.mkdir()
        died = cut_off(place, before, partial(write_all, place))
        check(place)
        if not died:
            return before - 1
    return 10_000


if __name__ == "__main__":
    print(main(Path(sys.argv[1])))
