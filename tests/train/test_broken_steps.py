"""Rules of a step that a loss breaks off: nothing of it stays, and done again it is the usual one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.core.errors import PeerError
from isthmus.schedule import Schedule, overlapped, schedule_of_text, zero_bubble
from isthmus.train.communication.communicator import Communicator, TensorMessage
from isthmus.train.communication.step_metrics import StepTimer
from isthmus.train.model.deferred_weight_gradients import DeferredProduct
from isthmus.train.model.model_chunks import ModelChunks
from isthmus.train.model.stage_model import StageModel, build_stage
from isthmus.train.pipeline.micro_batches import MicroBatches
from isthmus.train.pipeline.stage_executor import StageExecutor
from isthmus.train.pipeline.step_execution import StepExecution
from tests.schedule.wan_orders import wan_orders
from tests.train.alive import alive, no_collector
from tests.train.small_models import write_config

pytestmark = pytest.mark.integration

STAGES, TOTAL = 3, 5
BROKEN_OFF = [
    overlapped(STAGES, TOTAL), zero_bubble(STAGES, TOTAL), schedule_of_text(wan_orders(STAGES, TOTAL), TOTAL)
]  # fmt: skip


def _name(schedule: Schedule) -> str:
    return schedule.name


class Lost(Communicator):
    """An exchange with peers that send ones, until one of them is lost at the wait number `after`."""

    def __init__(self, after: int) -> None:
        super().__init__("abc", 1)
        self.left, self.alive_at_start = after, -1

    def start(self, messages: Sequence[TensorMessage]) -> list[Lost]:  # type: ignore[override]
        if self.alive_at_start < 0:
            self.alive_at_start = alive(DeferredProduct)
        for one in messages:
            if not one.is_send:
                one.tensor.fill_(0.01 * one.tag)
        return [self] * len(messages)

    def is_completed(self) -> bool:
        return True

    def wait(self, work: Any, *, until_delivered: bool = False) -> None:
        self.left -= 1
        if self.left == 0:
            raise PeerError("rank 2 is lost")


def middle_stage(folder: Path) -> StageModel:
    model = write_config(folder, "llama")
    return build_stage(model, (1, 3), dtype=torch.float32, device="cpu", seed=0, weights="random")


def gradients_of(model: StageModel) -> dict[str, torch.Tensor]:
    """Return and forget them."""
    found = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("schedule", BROKEN_OFF, ids=_name)
def test_nothing_stays_of_a_step_that_was_broken_off(schedule: Schedule, tmp_path: Path) -> None:
    """Its tensors are free once its error is, and the step done again makes the gradients of the first."""
    model, exchange = middle_stage(tmp_path), Lost(after=0)
    executor = StageExecutor(ModelChunks([model]), 1, range(STAGES), exchange, dtype=torch.float32)
    batches = MicroBatches((1,) * TOTAL, 4, TOTAL)
    with no_collector():
        executor.run(schedule, batches, StepTimer())
        assert alive(StepExecution) == 0
    usual = gradients_of(model)
    exchange.left = 9
    with no_collector():
        with pytest.raises(PeerError):
            executor.run(schedule, batches, StepTimer())
        assert alive(StepExecution) == 0
    model.zero_grad()
    exchange.alive_at_start = -1
    executor.run(schedule, batches, StepTimer())
    assert exchange.alive_at_start == 0
    again = gradients_of(model)
    assert all(torch.equal(again[name], gradient) for name, gradient in usual.items())
