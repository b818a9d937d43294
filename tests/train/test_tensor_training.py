"""Rules of training with shared stages: the loss is that of one process, whatever the shares."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from isthmus.core.job import Training
from tests.train.small_models import write_config
from tests.train.tensor_threads import SharedPipeline
from tests.train.test_executor import make_training
from tests.train.threads import Pipeline


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One torch thread per rank: summation order does not depend on the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def shared(
    model: Path, ends: list[int], tps: list[int], training: Training, **options: object
) -> list[float]:
    """Train with shared stages; return the loss of each step. Every rank clips by one norm."""
    pipeline = SharedPipeline(model, ends, tps, training, **options)
    try:
        found = pipeline.train(training.steps)
        assert all(stage.norms == pipeline.stages[0].norms for stage in pipeline.stages)
        return found
    finally:
        pipeline.close()


def alone(model: Path, training: Training) -> list[float]:
    """Train with one process; return the loss of each step."""
    pipeline = Pipeline(model, [4], training)
    try:
        return pipeline.train(training.steps)
    finally:
        pipeline.close()


@pytest.mark.parametrize("variant", ["llama-tied", "qwen3-moe-tied-sparse"])
def test_shared_stages_train_as_one_process_does(tmp_path: Path, variant: str) -> None:
    """Stages of two ranks and of one, tied head and embedding cut unlike: the curve of one process."""
    model, training = write_config(tmp_path, variant), make_training(steps=3)
    assert shared(model, [2, 4], [2, 1], training) == pytest.approx(alone(model, training), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["llama", "qwen3", "mixtral", "qwen3-moe"])
@pytest.mark.parametrize(
    ("ends", "tps"), [([4], [2]), ([4], [4]), ([1, 4], [1, 2]), ([1, 2, 4], [4, 1, 2])], ids=str
)
def test_two_hundred_steps_stay_on_the_curve(
    tmp_path: Path, variant: str, ends: list[int], tps: list[int]
) -> None:
    """Each of 200 losses is that of one process to 1e-4: alone, in pipelines, shares unlike."""
    model = write_config(tmp_path, variant, num_key_value_heads=4)
    training = make_training(steps=200, global_batch_size=4, learning_rate=3e-3)
    assert shared(model, ends, tps, training) == pytest.approx(alone(model, training), rel=1e-4)
