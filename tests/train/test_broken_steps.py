"""Rules of a step that a loss breaks off: nothing of it stays, and done again it is the usual one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.core.errors import PeerError
from isthmus.core.worker import WorkerFolder, WorkerSpec
from isthmus.schedule import Schedule, overlapped, zero_bubble
from isthmus.train.checkpoint.memory import MemoryCheckpoint
from isthmus.train.exchange import Exchange, Message
from isthmus.train.executor import Executor
from isthmus.train.faults.events import EventLog
from isthmus.train.faults.pulse import Pulse
from isthmus.train.faults.recovery import Recovery
from isthmus.train.membership import Membership
from isthmus.train.metrics import Account
from isthmus.train.micro_batches import MicroBatches
from isthmus.train.model.deferred import _Product
from isthmus.train.model.pieces import StagePieces
from isthmus.train.model.stage import StageModel, build_stage
from isthmus.train.stage_pass import StagePass
from tests.train.small_models import write_config
from tests.train.worker_jobs import make_job, whole

STAGES, TOTAL = 3, 5


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is freed is freed because nobody holds it, not because the collector came by."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Lost(Exchange):
    """An exchange with peers that send ones, until one of them is lost at the wait number `after`."""

    def __init__(self, after: int) -> None:
        super().__init__("abc", 1)
        self.left, self.alive_at_start = after, -1

    def start(self, messages: Sequence[Message]) -> list[Lost]:  # type: ignore[override]
        if self.alive_at_start < 0:
            self.alive_at_start = alive(_Product)
        for one in messages:
            if not one.is_send:
                one.tensor.fill_(0.01 * one.tag)
        return [self] * len(messages)

    def is_completed(self) -> bool:
        return True

    def wait(self, work: Any, timeout: timedelta | None = None) -> None:
        self.left -= 1
        if self.left == 0:
            raise PeerError("rank 2 is lost")


def alive(kind: type) -> int:
    """Return how many there are of a kind of object."""
    return sum(type(one) is kind for one in gc.get_objects())


def middle_stage(folder: Path) -> StageModel:
    model = write_config(folder, "llama")
    return build_stage(model, (1, 3), dtype=torch.float32, device="cpu", seed=0, weights="random")


def gradients_of(model: StageModel) -> dict[str, torch.Tensor]:
    """Return and forget them."""
    found = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("schedule", [overlapped(STAGES, TOTAL), zero_bubble(STAGES, TOTAL)], ids=str)
@pytest.mark.parametrize("after", [4, 11])
@pytest.mark.usefixtures("no_collector")
def test_nothing_stays_of_a_step_that_was_broken_off(schedule: Schedule, after: int, tmp_path: Path) -> None:
    """Its tensors are free once its error is, and the step done again makes the gradients of the first."""
    model, exchange = middle_stage(tmp_path), Lost(after=0)
    executor = Executor(StagePieces([model]), 1, range(STAGES), exchange, dtype=torch.float32)
    batches = MicroBatches((1,) * TOTAL, 4, TOTAL)
    executor.run(schedule, batches, Account())
    usual = gradients_of(model)
    exchange.left = after
    with pytest.raises(PeerError):
        executor.run(schedule, batches, Account())
    assert alive(StagePass) == 0
    model.zero_grad()
    exchange.alive_at_start = -1
    executor.run(schedule, batches, Account())
    assert exchange.alive_at_start == 0
    again = gradients_of(model)
    assert all(torch.equal(again[name], gradient) for name, gradient in usual.items())


class Patient(Membership):
    """A membership whose ranks always meet again."""

    def __init__(self) -> None:
        self.rejoined = 0

    def rejoin(self, error: PeerError, drain: Callable[[], None]) -> None:
        self.rejoined += 1

    def leave(self, reason: str = "") -> None:
        assert not reason


class Activations(list["Activations"]):
    """What a step holds in memory."""


def recovery_of(folder: Path, membership: Membership) -> Recovery:
    job = make_job(folder)
    spec = WorkerSpec(run="r", attempt=1, rank=0, job=job, plan=whole(job))
    memory = MemoryCheckpoint("r", 0, folder / "memory")
    return Recovery(spec, membership, memory, Pulse(), EventLog(WorkerFolder(folder), 0))


@pytest.mark.usefixtures("no_collector")
def test_a_loss_holds_no_memory_once_the_ranks_have_met_anew(tmp_path: Path) -> None:
    """What the frames of the error held, cycles too, is free before the next attempt needs the room."""
    membership, found = Patient(), list[int]()

    def attempt() -> None:
        found.append(alive(Activations))
        held = Activations()
        held.append(held)
        if len(found) < 3:
            raise PeerError("rank 1 is lost")

    recovery_of(tmp_path, membership).persist(attempt, lambda: None)
    assert (found, membership.rejoined) == ([0, 0, 0], 2)
