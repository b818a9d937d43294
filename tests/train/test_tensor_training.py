"""Rules of training with shared stages: the loss is that of one process, whatever the shares."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from isthmus.core.job import TrainingConfig
from isthmus.train.model.recompute import RecomputePolicy
from tests.train.devices import on_devices
from tests.train.small_models import write_config
from tests.train.tensor_threads import SharedPipeline
from tests.train.test_executor import make_training
from tests.train.threads import LONG, Pipeline

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("one_thread")]


def shared(
    model: Path,
    ends: list[int],
    tps: list[int],
    training: TrainingConfig,
    schedule: str = "1f1b",
    steps: int | None = None,
    **options: object,
) -> list[float]:
    """Train with shared stages; return the loss of all steps or the first. Every rank clips by one norm."""
    pipeline = SharedPipeline(model, ends, tps, training, **options)
    try:
        found = pipeline.train(steps or training.steps, schedule=schedule)
        assert all(stage.norms == pipeline.stages[0].norms for stage in pipeline.stages)
        return found
    finally:
        pipeline.close()


def alone(model: Path, training: TrainingConfig, device: str = "cpu", steps: int | None = None) -> list[float]:
    """Train with one process; return the loss of all steps or the first."""
    pipeline = Pipeline(model, [4], training, device=device)
    try:
        return pipeline.train(steps or training.steps)
    finally:
        pipeline.close()


@on_devices
@pytest.mark.parametrize(("variant", "sp"), [("llama-tied", False), ("qwen3-moe-tied-sparse", True)])
def test_shared_stages_train_as_one_process_does(tmp_path: Path, variant: str, sp: bool, device: str) -> None:
    """Stages of two ranks and of one, tied head and embedding cut unlike: the curve of one process."""
    model, training = write_config(tmp_path, variant), make_training(steps=3)
    found = shared(model, [2, 4], [2, 1], training, sp=sp, device=device)
    assert found == pytest.approx(alone(model, training, device), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "ends", "tps", "sp", "sampled"),
    [
        ("llama", [4], [2], False, False),
        ("qwen3-moe", [4], [2], False, False),
        ("mixtral", [1, 4], [1, 2], True, True),
        ("qwen3", [1, 2, 4], [4, 1, 2], False, False),
    ],
    ids=str,
)
def test_two_hundred_steps_stay_on_the_curve(
    tmp_path: Path,
    variant: str,
    ends: list[int],
    tps: list[int],
    sp: bool,
    sampled: bool,
    steps_of: Callable[[bool], int],
) -> None:
    """Each of 200 losses is that of one process to 1e-4: alone, in pipelines, shares unlike.

    60 steps of a sample of them in a run of the tests, of the others a few.
    """
    model, steps = write_config(tmp_path, variant, num_key_value_heads=4), steps_of(sampled)
    training = make_training(steps=LONG, global_batch_size=4, learning_rate=3e-3)
    found = shared(model, ends, tps, training, steps=steps, sp=sp)
    assert found == pytest.approx(alone(model, training, steps=steps), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "ends"),
    [("zero_bubble", [2, 4]), ("interleaved", [1, 2, 3, 4]), ("overlapped", [1, 4]), ("gpipe", [3, 4])],
)
@pytest.mark.parametrize(("variant", "sp"), [("qwen3", False), ("mixtral", True)])
def test_shares_go_with_any_schedule(
    tmp_path: Path, schedule: str, ends: list[int], variant: str, sp: bool, whole: bool
) -> None:
    """Whatever the order of work: weights put off, several pieces a rank, early forwards.

    Each schedule with one of the models, or with both if asked.
    """
    if not whole and (variant == "mixtral") != (schedule in ("zero_bubble", "interleaved")):
        pytest.skip("one of the pairs that --whole tries")
    model, training = write_config(tmp_path, variant), make_training(steps=3)
    found = shared(model, ends, [2, 2], training, schedule, sp=sp)
    assert found == pytest.approx(alone(model, training), rel=1e-5)


@pytest.mark.slow
@on_devices
@pytest.mark.parametrize("kind", ["full", "selective", "moe"])
def test_shares_go_with_recomputation(tmp_path: Path, kind: str, device: str) -> None:
    """What is computed again, sums included, has the same bits."""
    model, training = write_config(tmp_path, "mixtral"), make_training(steps=2)
    for sp in (False, True):
        again = shared(model, [1, 4], [1, 2], training, sp=sp, recompute=RecomputePolicy(kind), device=device)
        assert again == plain_curve(model, sp, device)


_plain_curves: dict[tuple[bool, str], list[float]] = {}


def plain_curve(model: Path, sp: bool, device: str) -> list[float]:
    """Return the curve without recomputation, trained once for all kinds: the models of all tests are alike."""
    if (sp, device) not in _plain_curves:
        _plain_curves[sp, device] = shared(model, [1, 4], [1, 2], make_training(steps=2), sp=sp, device=device)
    return _plain_curves[sp, device]


@pytest.mark.slow
def test_shares_train_in_bf16(tmp_path: Path) -> None:
    """With bf16 copies shares stay near the fp32 curve, as one process does; a run repeats its bits."""
    model, training = write_config(tmp_path, "mixtral"), make_training(steps=4, precision="bf16")
    found = shared(model, [4], [2], training)
    assert found == pytest.approx(alone(model, make_training(steps=4)), rel=0.03)
    assert found == shared(model, [4], [2], training)


def test_a_rank_that_holds_nothing_whole_ends_with_the_same_weights(tmp_path: Path) -> None:
    """Weights put together from their shares are those of one process; copies have the same bits."""
    model, training = write_config(tmp_path, "llama"), make_training(steps=2)
    pipeline, single = SharedPipeline(model, [1, 4], [2, 2], training), Pipeline(model, [4], training)
    pipeline.train(2)
    single.train(2)
    found, expected = pipeline.wholes(), single.weights()
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], one, rtol=1e-4, atol=1e-5) for name, one in expected.items())
    norms = [dict(stage.model.global_named_parameters())["model.norm.weight"] for stage in pipeline.stages[2:]]
    assert torch.equal(*norms)
    pipeline.close()
    single.close()
