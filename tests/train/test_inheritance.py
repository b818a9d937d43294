"""Rules of what an attempt takes over from the memory that the one before has left."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.errors import PeerError
from isthmus.core.messages.worker_folder import WorkerSpec
from isthmus.train.checkpoint.memory_checkpoint import MemoryCheckpoint, shared_memory_folder
from isthmus.train.checkpoint.memory_lease import MemoryLease, compatibility_digest, orphaned_runs
from isthmus.train.checkpoint.memory_slot import MemorySlot
from isthmus.train.communication.communicator import Communicator
from isthmus.train.recovery.restore_from_memory import choose_senders, restore_from_memory
from tests.train.worker_jobs import LIMIT_S, Workers, make_job, make_plan, run_job, started

places = st.lists(st.dictionaries(st.integers(0, 2), st.lists(st.integers(0, 5), max_size=2)), min_size=3, max_size=3)


@settings(deadline=None)
@given(told=places, after=st.integers(-1, 5), may_send=st.booleans())
def test_the_newest_state_that_all_ranks_have_somewhere(
    told: list[dict[int, list[int]]], after: int, may_send: bool
) -> None:
    """Each giver has what it gives, a rank that has its own gives it itself, and no newer step would do."""

    def seen(rank: int, step: int) -> list[int]:
        return [one for one in range(3) if step in told[one].get(rank, ()) and (may_send or one == rank)]

    found = choose_senders(told, after, can_transfer=may_send)
    possible = [step for step in range(after + 1, 6) if all(seen(rank, step) for rank in range(3))]
    assert (found is None) == (not possible)
    if found is not None:
        step, givers = found
        assert step == max(possible)
        for rank, giver in enumerate(givers):
            assert giver in seen(rank, step)
            assert giver == rank or rank not in seen(rank, step)


def spec_of(folder: Path) -> WorkerSpec:
    job = make_job(folder)
    return WorkerSpec(run="job-1", attempt=1, rank=0, job=job, plan=make_plan(job, [4]))


def test_a_lease_is_left_only_where_it_is_said_so(tmp_path: Path) -> None:
    """What was left is found by the same run and layout of state alone, and only once no process holds it."""
    spec, shared = spec_of(tmp_path), tmp_path / "shm"
    shared.mkdir()
    with MemoryLease(spec, shared):
        assert list(orphaned_runs(compatibility_digest(spec), shared)) == []
    assert list(shared.iterdir()) == []
    with MemoryLease(spec, shared) as lease:
        lease.keep_for_next_attempt()
    assert list(orphaned_runs(compatibility_digest(spec), shared)) == [lease.run]
    checkpoints = spec.job.checkpoints.model_copy(update={"folder": "/elsewhere"})
    for other in (
        {"job": spec.job.model_copy(update={"checkpoints": checkpoints})},
        {"plan": spec.plan.model_copy(update={"optimizer_on_host": True})},
        {"plan": spec.plan.model_copy(update={"zero": 1})},
    ):
        assert list(orphaned_runs(compatibility_digest(spec.model_copy(update=other)), shared)) == []


def test_what_was_left_and_not_taken_up_is_removed(tmp_path: Path) -> None:
    """The next lease on the machine removes it, once the time for another attempt is over."""
    spec, shared = spec_of(tmp_path), tmp_path / "shm"
    shared.mkdir()
    with MemoryLease(spec, shared) as lease:
        lease.keep_for_next_attempt()
    with MemoryLease(spec, shared):
        assert list(orphaned_runs(compatibility_digest(spec), shared)) == [lease.run]
    for file in (shared / f"isthmus-{lease.run}").iterdir():
        os.utime(file, (0, 0))
    with MemoryLease(spec, shared):
        assert list(orphaned_runs(compatibility_digest(spec), shared)) == []
    assert list(shared.iterdir()) == []


class Alone(Communicator):
    """The exchange of a rank without peers."""

    def __init__(self) -> None:
        super().__init__("a", 0)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]

    def barrier(self) -> None:
        """Return at once: there is no other rank."""


@pytest.mark.parametrize("has_room", [True, False])
def test_what_was_left_is_taken_over_where_there_is_room(has_room: bool, tmp_path: Path) -> None:
    """Without room the attempt does not end: it begins from the disk. What was left is removed anyway."""
    spec, shared = spec_of(tmp_path), tmp_path / "shm"
    shared.mkdir()
    with MemoryLease(spec, shared) as left:
        before = MemoryCheckpoint(left.run, 0, shared)
        before.begin_snapshot(7, 56, {"weight": torch.arange(9.0)}).result()
        left.keep_for_next_attempt()
    with MemoryLease(spec, shared) as lease:
        memory = MemoryCheckpoint(lease.run, 0, shared)
        if not has_room:
            (shared / f"isthmus-{lease.run}/rank-00000.0.data").mkdir()
        restore_from_memory(spec, memory, Alone(), None, after_step=4)
        assert memory.steps() == ((7,) if has_room else ())
        assert [one.name for one in shared.iterdir()] == [f"isthmus-{lease.run}"]


@pytest.mark.slow
def test_a_rank_that_begins_elsewhere_gets_its_state_back(tmp_path: Path) -> None:
    """A machine is lost; the next attempt goes on from memory, with the bits of an undisturbed run.

    1. Three ranks on three machines of a cluster, no checkpoint on disk. 2. Once another machine holds a copy
    of it, one is gone, its memory too: the others end, and leave theirs. 3. The next attempt begins after a
    step that all had done.
    """
    job = make_job(tmp_path, steps=40)
    plan = make_plan(job, [1, 3, 4], "aaa")
    straight_job = job.model_copy(
        update={"checkpoints": job.checkpoints.model_copy(update={"folder": str(tmp_path / "straight")})}
    )
    straight = run_job(tmp_path / "straight", straight_job, plan)
    hosts = [f"127.0.0.{number}" for number in (1, 2, 3)]
    program, pauses = "supervisor", {"forward_s": 0.005, "backward_s": 0.01}
    with started(tmp_path, job, plan, program=program, hosts=hosts, stage_time=pauses) as first:
        spec = first.folders[1].read_spec()
        wait_until(lambda: max(steps_of(1, memory_of(spec, holder=2)), default=0) >= 3, first)
        os.killpg(first.processes[1].pid, signal.SIGKILL)
        wait_until(lambda: bool(left_by(spec)), first)  # the kernel takes its time to end what is killed
        for run in left_by(spec):
            shutil.rmtree(shared_memory_folder() / f"isthmus-{run}")
        assert first.wait() == [PeerError.exit_code, -signal.SIGKILL, PeerError.exit_code]
    second = run_job(tmp_path, job, plan, attempt=2, program=program, hosts=hosts)
    begun = 40 - len(second.losses())
    assert begun >= 3
    assert "the last attempt left the state after step" in second.log(1)
    assert second.losses() == straight.losses()[begun:]
    assert left_by(second.folders[0].read_spec()) == []


def wait_until(condition: Callable[[], bool], workers: Workers) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s, [workers.log(rank) for rank in range(3)]
        time.sleep(0.01)


def memory_of(spec: WorkerSpec, holder: int) -> list[Path]:
    """The folders in shared memory of rank `holder` of a spec's attempt."""
    begin = f"isthmus-{spec.run}-{spec.attempt}-{holder}-"
    folders = [one.parent for one in shared_memory_folder().glob(f"{begin}*/lease")]
    return [one for one in folders if (one / "lease").read_text(encoding="utf-8") == compatibility_digest(spec)]


def steps_of(rank: int, folders: list[Path]) -> list[int]:
    """The steps of a rank's snapshots that are whole there."""
    slots = [MemorySlot(one / f"rank-{rank:05d}.{number}") for one in folders for number in (0, 1)]
    return [found.step for slot in slots if (found := slot.read()) is not None]


def left_by(spec: WorkerSpec) -> list[str]:
    """The leases that a rank of a spec's attempt has left."""
    begin = f"{spec.run}-{spec.attempt}-{spec.rank}-"
    return [run for run in orphaned_runs(compatibility_digest(spec)) if run.startswith(begin)]
