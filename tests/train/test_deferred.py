"""Rules of backwards that are cut in two: what is put off, and that nothing comes out differently."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from isthmus.train.model.deferred_weight_gradients import DeferredWeightGradients
from isthmus.train.model.recompute import RecomputeKind, RecomputePolicy
from isthmus.train.model.stage_model import StageModel, build_stage
from isthmus.train.model.transformers_model import choose_expert_kernels, read_transformers_config
from tests.train.small_models import write_config

PUT_OFF = ("proj", "lm_head")


def gradients(stage: StageModel) -> dict[str, torch.Tensor]:
    """Return the gradients of a stage by name, those that are there."""
    return {name: one.grad.clone() for name, one in stage.named_parameters() if one.grad is not None}


@pytest.mark.parametrize(
    ("variant", "kind"),
    [("llama", "none"), ("mixtral", "moe"), ("mixtral", "full"), ("qwen3-moe-tied-sparse", "selective")],
)
def test_weights_are_put_off_and_change_nothing(variant: str, kind: RecomputeKind, tmp_path: Path) -> None:
    """Projections of attention, of dense layers and of all experts wait; then the bits are the usual ones."""
    stage = build_stage(
        write_config(tmp_path, variant), (2, 4), dtype=torch.float32, device="cpu", seed=0, weights="random"
    )
    hidden = torch.randn(2, 5, stage.hidden_size, generator=torch.Generator().manual_seed(1))
    xs = [hidden.clone().requires_grad_() for _ in range(2)]
    stage.compute(xs[0])[0].square().sum().backward()
    usual = gradients(stage)
    stage.zero_grad()

    deferred = DeferredWeightGradients([stage])
    out = stage.compute(xs[1], RecomputePolicy(kind, 1))[0].square().sum()
    with deferred.defer((0, 0)):
        out.backward()
    at_once = gradients(stage)
    assert torch.equal(xs[0].grad, xs[1].grad)
    assert not [name for name in at_once if any(kind in name for kind in PUT_OFF)]
    deferred.compute_gradients((0, 0))
    later = gradients(stage)
    assert later.keys() == usual.keys()
    assert all(torch.equal(later[name], gradient) for name, gradient in usual.items())


def test_a_backward_outside_is_refused(tmp_path: Path) -> None:
    """Weight gradients that are never computed are an error, not a model that does not learn."""
    stage = build_stage(
        write_config(tmp_path, "llama"), (1, 2), dtype=torch.float32, device="cpu", seed=0, weights="random"
    )
    DeferredWeightGradients([stage])
    out = stage.compute(torch.randn(1, 3, stage.hidden_size))[0].sum()
    with pytest.raises(RuntimeError, match="outside of `defer`"):
        out.backward()


@pytest.mark.parametrize(
    ("width", "shares", "one_by_one"), [(24, 1, False), (24, 2, True), (12, 1, True), (32, 4, False)]
)
def test_experts_too_narrow_for_grouped_products_go_one_by_one(
    tmp_path: Path, width: int, shares: int, one_by_one: bool
) -> None:
    """On a device too: torch's grouped product takes rows of whole 16 bytes alone, slices included."""
    config = read_transformers_config(write_config(tmp_path, "mixtral", intermediate_size=width))
    choose_expert_kernels(config, "cuda", shares)
    assert (config._experts_implementation == "eager") == one_by_one
