"""Rules of section 4.2.1, stated in the order in which the executor really does things.

A stage in the middle of an overlapped pipeline runs alone; a recording exchange says what it starts and waits
for, and the spans of the account say when it computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import pytest
import torch

from isthmus.schedule import overlapped, peak_receive_buffers
from isthmus.train.communication.communicator import Communicator, TensorMessage
from isthmus.train.communication.step_metrics import StepTimer
from isthmus.train.model.model_chunks import ModelChunks
from isthmus.train.model.stage_model import build_stage
from isthmus.train.pipeline.micro_batches import MicroBatches
from isthmus.train.pipeline.stage_executor import StageExecutor
from isthmus.train.pipeline.stage_program import ProgramStep
from isthmus.train.pipeline.step_execution import StepExecution
from tests.train.small_models import write_config

STAGES, TOTAL, WARM_UP = 3, 6, (4, 2, 0)


class Done:
    """A message that has arrived: zeros."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder, self.name = recorder, name

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.recorder.events.append(f"wait {self.name}")
        return True


class Recorder(Communicator):
    """An exchange without peers, which records its requests."""

    def __init__(self, events: list[str]) -> None:
        super().__init__("abc", 1)
        self.events = events
        self.rooms: set[int] = set()

    def start(self, messages: Sequence[TensorMessage]) -> list[Done]:  # type: ignore[override]
        works = []
        for one in messages:
            forward = (one.tag - 1) % 2 == 0
            name = f"{'send' if one.is_send else 'receive'} {'f' if forward else 'b'}"
            name += str((one.tag - 1) // 2 // STAGES)
            self.events.append(name)
            if not one.is_send:
                one.tensor.zero_()
                self.rooms.add(one.tensor.data_ptr())
            works.append(Done(self, name))
        return works


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Recorder]:
    """Return what the middle stage did in one step, in order, and the exchange that saw it."""
    model = write_config(tmp_path_factory.mktemp("model"), "llama")
    stage = build_stage(model, (1, 2), dtype=torch.float32, device="cpu", seed=0, weights="random")
    events: list[str] = []
    exchange = Recorder(events)
    executor = StageExecutor(ModelChunks([stage]), 1, range(STAGES), exchange, dtype=torch.float32)
    schedule, do = overlapped(STAGES, TOTAL, WARM_UP), StepExecution.execute

    def noted(self: StepExecution, step: ProgramStep) -> None:
        if step.kind in ("forward", "backward"):
            events.append(f"{step.kind[0]}{step.key[0]}")
        do(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepExecution, "execute", noted)
        executor.run(schedule, MicroBatches.split(TOTAL, 1, 4), StepTimer())
    return events, exchange


def at(told: tuple[list[str], Recorder], what: str) -> int:
    """Return the place of an event that happens once."""
    assert told[0].count(what) == 1, what
    return told[0].index(what)


@pytest.mark.parametrize("m", range(TOTAL))
def test_the_next_receive_is_posted_before_this_computation(told, m: int) -> None:
    """In all three phases: forward N begins once N + 1 is awaited, backward M once M + 1 is."""
    for kind in "fb":
        if m + 1 < TOTAL:
            assert at(told, f"receive {kind}{m + 1}") < at(told, f"{kind}{m}")
        assert at(told, f"wait receive {kind}{m}") < at(told, f"{kind}{m}")


@pytest.mark.parametrize("m", range(TOTAL))
def test_a_result_leaves_before_the_next_computation(told, m: int) -> None:
    """A send is started right after what made it: nothing is computed and nothing waited for in between."""
    for kind in "fb":
        assert at(told, f"send {kind}{m}") == at(told, f"{kind}{m}") + 1


@pytest.mark.parametrize("m", range(TOTAL))
def test_no_computation_waits_for_a_send(told, m: int) -> None:
    """A send is waited for once a message proves it arrived, or after the last computation."""
    events = told[0]
    last = at(told, f"b{TOTAL - 1}")
    for kind in "fb":
        place = at(told, f"wait send {kind}{m}")
        before = next(one for one in reversed(events[:place]) if not one.startswith("wait send"))
        assert place > last or before.startswith("wait receive")


def test_phases_follow_each_other(told) -> None:
    """Warm-up forwards, then one forward and one backward in turn, then the backwards that remain."""
    computed = [one for one in told[0] if one[0] in "fb" and one[1:].isdigit()]
    ahead = WARM_UP[1]
    steady = [one for m in range(TOTAL - ahead) for one in (f"f{ahead + m}", f"b{m}")]
    cooling = [f"b{m}" for m in range(TOTAL - ahead, TOTAL)]
    assert computed == [*(f"f{m}" for m in range(ahead)), *steady, *cooling]


def test_the_first_gradient_is_awaited_before_the_warm_up_ends(told) -> None:
    """The receive of gradient M stands from the beginning: it may come while forwards are computed."""
    assert at(told, "receive b0") < at(told, f"f{WARM_UP[1] - 1}")


def test_messages_arrive_in_few_places(told) -> None:
    """Receive buffers are used again: no more places than the schedule was checked to need."""
    limit = peak_receive_buffers(overlapped(STAGES, TOTAL, WARM_UP))[1]
    assert len(told[1].rooms) <= limit < 2 * TOTAL
