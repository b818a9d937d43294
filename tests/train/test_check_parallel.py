"""Rules of the comparison with one process: plans in any degrees pass, and what differs is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isthmus.core.errors import PlanError
from isthmus.core.plan import Plan
from isthmus.train.comparison import check_parallel
from tests.train.small_models import write_config
from tests.train.worker_jobs import fork_worker


def plan_of(ends: list[int], stages: list[dict[str, Any]], **changes: Any) -> Plan:
    """Return a plan whose stages end at the layers `ends`, each changed as `stages` says."""
    layers = zip([0, *ends], ends, stages, strict=False)
    return Plan.model_validate(
        {
            "id": "p",
            "stages": [
                {"cluster": "a", "node_group": "cpu", "layers": (first, last), **more} for first, last, more in layers
            ],
            "micro_batches": 2,
            "micro_batch_size": 2,
            "sequence_length": 16,
            **changes,
        }
    )


@pytest.mark.slow
def test_a_plan_in_all_degrees_is_compared_with_one_process(whole: bool, tmp_path: Path) -> None:
    """Two stages, one of tensor parallelism (with `--whole` over shared sequences), one of a ring: losses, gradients
    and state agree.
    """
    model = write_config(tmp_path / "model", "qwen3", vocab_size=272, pad_token_id=None)
    plan = plan_of([2, 4], [{"tp": 2, "cp": 2 if whole else 1}, {"cp": 2, "cp_kind": "ring"}])
    found = check_parallel(plan, model, tmp_path / "runs", start=fork_worker)
    assert len(found.losses) == len(found.expected_losses) == 3
    assert found.losses[-1] != found.losses[0]
    assert found.loss_error < 1e-4
    assert found.gradient_error < 1e-4
    assert found.state_error < 1e-3


@pytest.mark.slow
def test_sharded_weights_are_compared_with_one_process(tmp_path: Path) -> None:
    """ZeRO 3 over two ranks that share sequences: losses, gradients and the state of all shards agree."""
    model = write_config(tmp_path / "model", "qwen3", vocab_size=272, pad_token_id=None)
    found = check_parallel(plan_of([4], [{"cp": 2}], zero=3), model, tmp_path / "runs", start=fork_worker)
    assert found.losses[-1] != found.losses[0]
    assert max(found.loss_error, found.gradient_error) < 1e-4
    assert found.state_error < 1e-3


def test_an_unsupported_plan_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    """By the check that workers make."""
    model = write_config(tmp_path / "model", "qwen3", vocab_size=272, pad_token_id=None)
    with pytest.raises(PlanError, match="cp 3, which does not divide 16 tokens"):
        check_parallel(plan_of([4], [{"cp": 3}]), model, tmp_path / "runs", start=fork_worker)
    assert not list((tmp_path / "runs").glob("*/rank-*"))
