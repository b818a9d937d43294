"""Rules of going on after a loss: from a state that all ranks have, or not at all, and in no more memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from isthmus.core.errors import PeerError, UnavailableError
from isthmus.core.messages.worker_folder import WorkerFolder, WorkerSpec
from isthmus.train.checkpoint.memory_checkpoint import MemoryCheckpoint
from isthmus.train.checkpoint.memory_slot import Snapshot
from isthmus.train.communication.communicator import Communicator
from isthmus.train.liveness.heartbeat import Heartbeat
from isthmus.train.liveness.worker_events import EventLog
from isthmus.train.recovery.group_membership import GroupMembership
from isthmus.train.recovery.rank_recovery import RankRecovery
from tests.train.alive import alive, no_collector
from tests.train.worker_jobs import make_job, whole


@pytest.fixture(autouse=True, scope="module")
def modules_are_frozen() -> Iterator[None]:
    """As in a process that a supervisor has started: the collector has only what came since."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Patient(GroupMembership):
    """A membership whose ranks always meet again."""

    def __init__(self) -> None:
        self.rejoined = 0

    def rejoin(self, error: PeerError, drain: Callable[[], None]) -> None:
        self.rejoined += 1

    def leave(self, reason: str = "") -> None:
        assert not reason


class Alone(Communicator):
    """The exchange of a rank without peers."""

    def __init__(self) -> None:
        super().__init__("a", 0)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor]


class Activations(list["Activations"]):
    """What a step holds in memory."""


def recovery_of(folder: Path, membership: GroupMembership, **options: int) -> RankRecovery:
    """Return that of one rank, whose snapshots are in `folder`, where there is room for them."""
    job = make_job(folder)
    spec = WorkerSpec(run="r", attempt=1, rank=0, job=job, plan=whole(job))
    memory = MemoryCheckpoint("r", 0, folder / "memory")
    return RankRecovery(spec, membership, memory, Heartbeat(), EventLog(WorkerFolder(folder), 0), **options)


def test_a_loss_holds_no_memory_once_the_ranks_have_met_anew(tmp_path: Path) -> None:
    """What the frames of the error held, cycles too, is free before the next attempt needs the room."""
    membership, found = Patient(), list[int]()

    def attempt() -> None:
        found.append(alive(Activations))
        held = Activations()
        held.append(held)
        if len(found) < 3:
            raise PeerError("rank 1 is lost")

    with no_collector():
        recovery_of(tmp_path, membership).run_with_recovery(attempt, lambda: None)
    assert (found, membership.rejoined) == ([0, 0, 0], 2)


def test_losses_that_let_no_step_be_done_end_the_attempt(tmp_path: Path) -> None:
    """A loss that repeats at once would repeat without end; one step in between restarts the count."""
    membership = Patient()
    recovery = recovery_of(tmp_path, membership, max_losses=4)

    def attempt() -> None:
        if membership.rejoined == 3:
            recovery.end_step(0.1)
        raise PeerError("rank 1 sent something odd")

    with pytest.raises(PeerError, match=r"4 losses in a row .* rank 1 sent something odd"):
        recovery.run_with_recovery(attempt, lambda: None)
    assert membership.rejoined == 3 + 4


@pytest.mark.parametrize("has_room", [True, False])
def test_weights_that_have_changed_are_not_taken_for_those_of_the_start(has_room: bool, tmp_path: Path) -> None:
    """A loss late in the first step: back to the snapshot of the start, or, where none fits, an end."""
    if not has_room:
        (tmp_path / "memory").write_text("no folder")
    recovery, restored = recovery_of(tmp_path, Patient()), list[int]()

    def restore(snapshot: Snapshot) -> None:
        restored.append(snapshot.step)

    def agree() -> int:
        return recovery.restore_common_state(Alone(), restore, lambda: 0, 0)

    assert agree() == 0
    recovery.take_snapshot(0, 0, {"weight": torch.ones(3)})
    recovery.begin_step(0)
    assert (agree(), restored) == (0, [0] if has_room else [])
    recovery.wait_for_snapshot()
    if has_room:
        assert (agree(), restored) == (0, [0, 0])
    else:
        with pytest.raises(UnavailableError, match="lost its snapshots, and there is no checkpoint"):
            agree()
