"""Attention kernels and compiled layers: the same losses within rounding, and refusals before the start."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.core.errors import PlanError
from isthmus.core.model import load_model
from isthmus.core.runs.run_identity import run_identity
from isthmus.train.kernels.check_kernels import DeviceKernels, check_kernels
from isthmus.train.kernels.compile_layers import keep_compiled_graphs
from isthmus.train.model.recompute import RecomputePolicy
from isthmus.train.model.stage_model import build_stage
from tests.train.small_models import NUM_LAYERS, token_ids, write_config
from tests.train.worker_jobs import make_job, make_plan

CPU = DeviceKernels(kind="cpu")
A100 = DeviceKernels(kind="cuda", capability=(8, 0))


def curve(folder: Path, *, num_layers: int = NUM_LAYERS, recompute: Any = "none", **kernels: Any) -> list[float]:
    """Return the losses of a few steps of plain gradient descent on fixed tokens."""
    model = build_stage(folder, (0, num_layers), dtype=torch.float32, device="cpu", seed=3, weights="random", **kernels)
    ids, losses = token_ids(length=12), []
    for _ in range(4):
        loss = model.loss(model.compute(ids, RecomputePolicy(recompute))[0], ids.roll(-1, 1)) / ids.numel()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for one in model.parameters():
                one -= 0.5 * one.grad
                one.grad = None
    return losses


@pytest.mark.parametrize(
    ("attention", "variant"), [("flash", "llama"), ("eager", "llama"), ("eager", "qwen3-tied-window")]
)
def test_every_attention_kernel_of_a_cpu_trains_alike(tmp_path: Path, attention: Any, variant: str) -> None:
    """Losses agree to 1e-5, recomputed or not, and fall."""
    folder = write_config(tmp_path, variant)
    expected = curve(folder)
    assert expected[-1] < expected[0]
    for recompute in ("none", "full"):
        assert curve(folder, attention=attention, recompute=recompute) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_layers_train_alike_and_are_kept(whole: bool, tmp_path: Path) -> None:
    """Losses agree to 1e-5 with those of layers that are not compiled, recomputed too; the graphs lie in the folder.

    Of one layer, or two with `--whole`: a C++ compiler takes many seconds for each.
    """
    num_layers = 2 if whole else 1
    folder, before = write_config(tmp_path / "model", "llama", num_hidden_layers=num_layers), dict(os.environ)
    expected = curve(folder, num_layers=num_layers)
    try:
        keep_compiled_graphs(tmp_path / "graphs")
        found = [curve(folder, num_layers=num_layers, compiled=True, recompute=one) for one in ("none", "full")]
    finally:
        os.environ.clear()
        os.environ.update(before)
    assert found[0] == pytest.approx(expected, rel=1e-5)
    assert found[1] == pytest.approx(expected, rel=1e-5)
    assert any((tmp_path / "graphs").rglob("*.so"))


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str, DeviceKernels, str]] = [
    ({"attention": "flex"}, {}, "llama", CPU, "flex, which has no backward pass on a CPU"),
    ({"attention": "flash"}, {}, "qwen3-tied-window", CPU, "sliding window of 5"),
    ({"attention": "flash", "precision": "fp32"}, {}, "llama", A100, "precision fp32"),
    ({"attention": "flash", "precision": "fp16"}, {}, "llama", DeviceKernels(kind="cuda", capability=(7, 5)), "7.5"),
    ({"precision": "bf16"}, {}, "llama", DeviceKernels(kind="cuda", capability=(7, 5)), "precision bf16"),
    ({"precision": "fp8"}, {}, "llama", DeviceKernels(kind="cuda", capability=(7, 5)), "precision fp8"),
    ({"compile": True, "precision": "fp8"}, {}, "llama", CPU, "precision fp8"),
    ({"compile": True}, {"stage": {"tp": 2}}, "llama", CPU, "tp 2"),
    ({"compile": True}, {"stage": {"cp": 2}}, "llama", CPU, "cp 2"),
    ({"attention": "eager"}, {"stage": {"cp": 2}}, "llama", CPU, "eager on a stage of cp 2"),
    ({"compile": True}, {"stage": {"recompute": "selective"}}, "llama", CPU, "recompute selective"),
    ({"compile": True}, {"schedule": "zero_bubble"}, "llama", CPU, "schedule zero_bubble"),
    ({"compile": True}, {}, "qwen3-moe", CPU, "4 experts"),
    ({"compile": True}, {}, "llama", DeviceKernels(kind="cpu", has_compiler=False), "C++ compiler"),
]


@pytest.mark.parametrize(("training", "plan", "variant", "device", "reason"), REFUSED)
def test_a_kernel_that_is_not_there_is_refused(
    tmp_path: Path, training: dict[str, Any], plan: dict[str, Any], variant: str, device: DeviceKernels, reason: str
) -> None:
    """Each refusal names the setting, why, and what to set instead."""
    job = make_job(tmp_path, variant, training=training)
    fixed = make_plan(job, [2, 4], **plan)
    with pytest.raises(PlanError) as caught:
        check_kernels(job.training, fixed, load_model(job.model), fixed.stages[0], device)
    assert reason in caught.value.message
    assert "training." in f"{caught.value.message} {caught.value.hint}"
    assert caught.value.hint


def test_kernels_leave_the_identity_of_a_run(tmp_path: Path) -> None:
    """A run goes on under other kernels: their results differ by rounding alone."""
    plain, other = (
        make_job(tmp_path, training=one)
        for one in ({}, {"attention": "eager", "compile": True, "deterministic": False})
    )
    found = [run_identity("r", one, load_model(one.model), {}) for one in (plain, other)]
    assert found[0].fields == found[1].fields
