"""Rules of the balance loss: what it is, who has it, and that no cut changes it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from isthmus.train.model.balance_loss import balance_loss
from isthmus.train.model.recompute import RecomputePolicy
from isthmus.train.model.stage_model import build_stage
from tests.train.small_models import token_ids, write_config
from tests.train.test_executor import make_training
from tests.train.threads import Pipeline, random_batch

ON = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


@given(st.integers(2, 8), st.integers(1, 40), st.integers(0, 10**6), st.data())
def test_one_layer_has_the_loss_of_transformers(experts: int, tokens: int, seed: int, data: st.DataObject) -> None:
    """For one layer with experts it is what transformers computes, whatever the router says."""
    taken = data.draw(st.integers(1, experts))
    logits = 3 * torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed))
    chosen = torch.softmax(logits, dim=-1).topk(taken).indices
    expected = load_balancing_loss_func((logits,), experts, taken)
    assert balance_loss(logits, chosen).item() == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("taken", [1, 2])
def test_even_use_is_the_least(taken: int) -> None:
    """Evenly used experts cost the number taken per token; all tokens at the same ones cost more."""
    even = torch.zeros(8, 4)
    chosen = torch.stack([torch.arange(8) % 4, (torch.arange(8) + 1) % 4], dim=1)[:, :taken]
    assert balance_loss(even, chosen).item() == pytest.approx(taken)
    uneven = torch.zeros(8, 4)
    uneven[:, 0] = 9.0
    assert balance_loss(uneven, torch.zeros(8, 1, dtype=torch.int64)).item() > 3.9


def train(model: Path, ends: list[int], **options: object) -> tuple[list[float], list[float]]:
    """Return the losses of a few steps, and the balance losses summed over the stages."""
    pipeline = Pipeline(model, ends, make_training(steps=5), **options)
    found = pipeline.train(5)
    parts = [[one or 0.0 for one in stage.balance_losses] for stage in pipeline.stages]
    pipeline.close()
    return found, [sum(step) for step in zip(*parts, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["mixtral", "qwen3-moe-tied-sparse"])
def test_every_cut_has_the_same_balance_loss(variant: str, tmp_path: Path) -> None:
    """Summed over stages it does not depend on the cut, nor on recomputation; the curves agree with it."""
    model = write_config(tmp_path, variant, **ON)
    alone, balance = train(model, [4])
    assert all(one >= 1.9 for one in balance)
    for ends, options in (([1, 4], {}), ([1, 2, 4], {"recompute": RecomputePolicy("full", 3)})):
        cut, of_cut = train(model, ends, **options)
        assert cut == pytest.approx(alone, rel=1e-6)
        assert of_cut == pytest.approx(balance, rel=1e-6)


@pytest.mark.slow
def test_it_is_trained_on(tmp_path: Path) -> None:
    """With a large coefficient the experts become evenly used, which they do not without."""
    on = write_config(tmp_path / "on", "mixtral", output_router_logits=True, router_aux_loss_coef=50.0)
    _, balance = train(on, [4])
    assert balance[-1] < balance[0]
    off_losses, off = train(write_config(tmp_path / "off", "mixtral"), [4])
    assert off == [0.0] * 5
    zero = write_config(tmp_path / "zero", "mixtral", output_router_logits=True, router_aux_loss_coef=0.0)
    assert train(zero, [4]) == (off_losses, [0.0] * 5)


@pytest.mark.slow
def test_its_gradient_is_that_of_transformers(tmp_path: Path) -> None:
    """A model with one layer of experts gets the gradients of transformers' own loss, labels and balance."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = write_config(tmp_path, "qwen3-moe", mlp_only_layers=[0, 1, 3], **ON, attn_implementation="sdpa")
    config = AutoConfig.from_pretrained(folder)
    stage = build_stage(folder, (0, 4), dtype=torch.float32, device="cpu", seed=1, weights="random")
    whole = AutoModelForCausalLM.from_config(config)
    state = {name: tensor.detach() for name, tensor in stage.global_named_parameters()}
    whole.load_state_dict(state, strict=False)
    ids = token_ids(2, 9)
    hidden, balance = stage.compute(ids)
    assert balance is not None
    out = stage.lm_head(hidden)
    loss = torch.nn.functional.cross_entropy(out[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    (loss + stage.balance_coefficient * balance).backward()
    theirs = whole(input_ids=ids, labels=ids)
    theirs.loss.backward()
    assert balance.item() == pytest.approx(theirs.aux_loss.item(), rel=1e-5)
    gradients = {name: one.grad for name, one in whole.named_parameters()}
    for name, parameter in stage.global_named_parameters():
        assert torch.allclose(parameter.grad, gradients[name], rtol=1e-3, atol=1e-6), name


def test_evaluation_and_the_reported_loss_leave_it_out(tmp_path: Path) -> None:
    """A held-out loss, and the loss of the first step, are the same with and without it."""
    on, off = (
        Pipeline(write_config(tmp_path / name, "mixtral", **fields), [2, 4], make_training())
        for name, fields in (("on", ON), ("off", {}))
    )
    batch = random_batch(make_training(), 3)
    assert on.evaluate(*batch) == off.evaluate(*batch)
    assert on.train(1) == off.train(1)
    assert on.train(1, first=1) != off.train(1, first=1)
    on.close()
    off.close()
