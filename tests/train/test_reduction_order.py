"""When gradients are added up: at each stage after its own last backward, while others still compute."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from isthmus.train.pipeline.stage_program import ProgramStep
from isthmus.train.pipeline.step_execution import StepExecution
from tests.train.replica_threads import LIMIT_S, Cut, Replicas, curve, make_plan
from tests.train.small_models import write_config
from tests.train.test_replicas import LENGTH, make_training

TWO_STAGES = Cut(ends=[2, 4], clusters="ab", micro_batches=4, size=1)


@pytest.mark.parametrize("schedule", ["1f1b", "overlapped"])
def test_a_stage_adds_its_gradients_up_while_the_stage_before_goes_backward(
    schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two replicas of two stages: no last backward of a first stage begins before both last stages have the
    sums of all their gradients. So held up, training comes to its end, with the same bits.
    """
    model, training = write_config(tmp_path, "llama"), make_training(steps=1)
    plan = make_plan([TWO_STAGES, TWO_STAGES], LENGTH, schedule=schedule)
    undisturbed = curve(model, plan, training)
    replicas = Replicas(model, plan, training)
    summed = {rank: threading.Semaphore(0) for rank, one in enumerate(replicas.ranks) if one.place.stage == 1}
    for rank, semaphore in summed.items():
        _tell_when_reduced(replicas, rank, semaphore, monkeypatch)
    do, last = StepExecution.execute, TWO_STAGES.micro_batches - 1

    def held_up(self: StepExecution, step: ProgramStep) -> None:
        if self.setup.stage == 0 and (step.kind, step.key[0]) == ("backward", last):
            mine = list(summed.values())
            assert all(one.acquire(timeout=LIMIT_S / 3) for one in mine), "the last stages wait for the first"
            for one in mine:
                one.release()
            together.wait(LIMIT_S / 3)
        do(self, step)

    def begin_anew() -> None:
        for one in summed.values():
            one.acquire()

    together = threading.Barrier(2, action=begin_anew)
    monkeypatch.setattr(StepExecution, "execute", held_up)
    try:
        assert replicas.train(training.steps) == undisturbed
    finally:
        replicas.close()


def _tell_when_reduced(
    replicas: Replicas, rank: int, semaphore: threading.Semaphore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Release `semaphore` whenever a rank has the sums of what it holds."""
    reducer = replicas.ranks[rank].optimizer.reducer
    assert reducer is not None
    reduce = reducer.reduce

    def told(view: object, *, to_all_owners: bool) -> None:
        reduce(view, to_all_owners=to_all_owners)  # type: ignore[arg-type]
        semaphore.release()

    monkeypatch.setattr(reducer, "reduce", told)
