"""Rules of training with shared sequences: the loss is that of one process, whatever the degrees and kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isthmus.core.job import TrainingConfig
from isthmus.train.context_parallel.cp_communicator import SharedTokens, shared_tokens
from isthmus.train.context_parallel.sequence_shares import share_sequence
from isthmus.train.model.recompute import RecomputePolicy
from tests.train.context_threads import ContextPipeline
from tests.train.small_models import write_config
from tests.train.test_executor import make_training
from tests.train.test_tensor_training import alone

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("one_thread")]


def shared(
    model: Path, ends: list[int], stages: list[dict[str, Any]], training: TrainingConfig, **options: Any
) -> list[float]:
    """Train with shared sequences; return the loss of all steps. Every rank clips by one norm."""
    pipeline = ContextPipeline(model, ends, stages, training, **options)
    try:
        pipeline.train(training.steps)
        assert all(stage.norms == pipeline.stages[0].norms for stage in pipeline.stages)
        return pipeline.summed_losses()
    finally:
        pipeline.close()


@pytest.mark.parametrize(
    ("variant", "ends", "stages"),
    [
        ("llama", [4], [{"cp": 2, "cp_kind": "ring"}]),
        ("qwen3", [4], [{"cp": 4}]),
        ("llama-tied", [2, 4], [{"cp": 2, "cp_kind": "all_to_all"}, {"cp": 2}]),
        ("qwen3-tied-window", [2, 4], [{"cp": 4, "cp_kind": "ring"}, {"cp": 2}]),
        ("qwen3-moe", [2, 4], [{}, {"cp": 2, "cp_kind": "ring"}]),
        ("llama", [2, 4], [{"cp": 2, "tp": 2, "sp": True}, {"cp": 2, "cp_kind": "ring"}]),
    ],
)
def test_shared_sequences_train_as_one_process_does(
    tmp_path: Path, variant: str, ends: list[int], stages: list[dict[str, Any]]
) -> None:
    """Each kind, stages of unlike degrees, windows, experts, tensor and sequence parallelism: one curve."""
    model, training = write_config(tmp_path, variant), make_training(steps=3)
    assert shared(model, ends, stages, training) == pytest.approx(alone(model, training), rel=1e-5)


@pytest.mark.parametrize("kind", ["full", "moe"])
def test_recomputed_layers_exchange_again(tmp_path: Path, kind: str) -> None:
    """A layer that is computed again in its backward attends over all ranks again: the same bits."""
    model, training = write_config(tmp_path, "qwen3-moe"), make_training(steps=2)
    stages = [{"cp": 2, "cp_kind": "ring"}]
    plain = shared(model, [4], stages, training)
    assert shared(model, [4], stages, training, recompute=RecomputePolicy(kind)) == plain


def test_the_balance_of_experts_is_that_of_whole_sequences(tmp_path: Path) -> None:
    """With a balance loss the curve is that of one process, though each rank routes its own tokens only."""
    model = write_config(tmp_path, "mixtral", output_router_logits=True, router_aux_loss_coef=0.5)
    training = make_training(steps=3)
    assert shared(model, [4], [{"cp": 2}], training) == pytest.approx(alone(model, training), rel=1e-5)


def test_stages_pass_each_token_once() -> None:
    """Between ranks of equal shares whole tensors go to one peer; otherwise each token goes to the rank that has it."""
    halves, quarters = share_sequence(16, [1.0] * 2), share_sequence(16, [1.0] * 4)
    assert shared_tokens(halves[1], halves, [8, 9]) == [SharedTokens(9, None)]
    for own in halves:
        rows = [row for part in shared_tokens(own, quarters, range(4)) for row in part.rows or ()]
        assert sorted(rows) == list(range(8))
    assert shared_tokens(quarters[0], halves, [8, 9]) == [SharedTokens(8, None)]
