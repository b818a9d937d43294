"""Rules of tensors that several ranks share: together they are the model that one rank would hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from isthmus.train.model.recompute import RecomputePolicy
from isthmus.train.model.save_weights import export_shard, finish_export
from isthmus.train.model.stage_model import StageModel, build_stage
from isthmus.train.tensor_parallel.parameter_slices import parameter_slice
from isthmus.train.tensor_parallel.tensor_parallel_group import TensorParallelGroup
from tests.train.small_models import NUM_LAYERS, VARIANTS, save_model, token_ids, write_config
from tests.train.tensor_groups import each, tensor_groups

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = {
    "model.embed_tokens.weight": (61, 16),
    "lm_head.weight": (61, 16),
    "model.layers.0.self_attn.q_proj.weight": (24, 16),
    "model.layers.0.self_attn.o_proj.weight": (16, 24),
    "model.layers.0.self_attn.o_proj.bias": (16,),
    "model.layers.0.mlp.gate_proj.bias": (30,),
    "model.layers.0.mlp.down_proj.weight": (16, 30),
    "model.layers.0.mlp.experts.gate_up_proj": (4, 60, 16),
    "model.layers.0.mlp.experts.down_proj": (4, 16, 30),
    "model.layers.0.mlp.gate.weight": (4, 16),
    "model.layers.0.self_attn.q_norm.weight": (4,),
    "model.norm.weight": (16,),
}


@given(name=st.sampled_from(sorted(NAMES)), tp=st.integers(1, 6))
def test_the_slices_of_a_parameter_are_all_of_it(name: str, tp: int) -> None:
    """Every row lies at one rank, or all rows at all of them; put together they are the parameter."""
    whole = torch.randn(NAMES[name])
    held = [one for index in range(tp) if (one := parameter_slice(name, whole.shape, tp, index)) is not None]
    found = torch.full_like(whole, torch.nan)
    for one in held:
        one.copy_into(one.take_from(whole), found)
        assert one.take_from(whole).shape == one.local_shape
        assert sum(stop - start for start, stop, _ in one.row_ranges()) == one.num_rows
    assert torch.equal(found, whole)
    counted = sum(one.num_rows for one in held if one.is_first_copy)
    assert counted == whole.shape[held[0].dim]
    assert len({one.dim for one in held}) == 1
    assert parameter_slice(name, whole.shape, 1, 0).is_full


def losses_and_gradients(folder: Path, weights: str, group: TensorParallelGroup | None) -> tuple[float, StageModel]:
    """Return the loss of fixed tokens, and the model with its gradients; one layer is recomputed."""
    model = build_stage(
        folder, (0, NUM_LAYERS), dtype=torch.float32, device="cpu", seed=3, weights=weights, group=group
    )
    ids = token_ids(length=12)
    labels = ids.roll(-1, 1)
    labels[0, :3] = -100
    logits, balance = model.compute(ids, RecomputePolicy("full", 1))
    loss = model.loss(logits, labels)
    (loss if balance is None else loss + balance).backward()
    return loss.item(), model


def check_shared(folder: Path, tp: int, weights: str, *, sp: bool = False) -> None:
    """Check weights, loss and gradients of `tp` ranks against one."""
    expected, alone = losses_and_gradients(folder, weights, None)
    whole = dict(alone.global_named_parameters())
    largest = max(parameter.grad.abs().max().item() for parameter in whole.values())
    groups = tensor_groups(tp, cuts_sequence=sp)
    found = each(groups, lambda group: losses_and_gradients(folder, weights, group))
    for loss, model in found:
        assert loss == pytest.approx(expected, rel=1e-6)
        for name, parameter in model.global_named_parameters():
            held = model.slices[name]
            assert torch.equal(parameter, held.take_from(whole[name].detach())), name
            gradient = held.take_from(whole[name].grad)
            assert torch.allclose(parameter.grad, gradient, rtol=1e-4, atol=1e-6 * largest), name
    copies = [dict(model.global_named_parameters()) for _, model in found]
    for name, held in found[0][1].slices.items():
        if held.is_replicated:
            assert all(torch.equal(copies[0][name].grad, other[name].grad) for other in copies), name


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("tp", "sp"), [(2, False), (4, False), (2, True), (4, True)])
def test_ranks_that_share_a_model_compute_what_one_does(tmp_path: Path, variant: str, tp: int, sp: bool) -> None:
    """The same initial weights, loss and gradients; what all ranks hold gets the same bits on each.

    So it is where they share the tokens between blocks as well.
    """
    changes = {"output_router_logits": True} if "m" in variant else {}
    check_shared(write_config(tmp_path, variant, num_key_value_heads=4, **changes), tp, "random", sp=sp)


@pytest.mark.parametrize("variant", ["llama", "qwen3-moe-tied-sparse"])
def test_shares_are_read_from_a_published_model(tmp_path: Path, variant: str) -> None:
    """Two ranks read their shares of a folder that transformers wrote: biases, experts, a tied head."""
    save_model(tmp_path, variant)
    check_shared(tmp_path, 2, "load")


@pytest.mark.parametrize("variant", ["llama", "mixtral-tied-window"])
def test_an_export_of_shares_is_the_whole_model(tmp_path: Path, variant: str) -> None:
    """Two ranks that share all of a model write the folder that it was read from, tensor by tensor."""
    whole, output = save_model(tmp_path / "model", variant), tmp_path / "output"

    def run(group: TensorParallelGroup) -> None:
        layers, dtype = (0, NUM_LAYERS), torch.bfloat16
        stage = build_stage(tmp_path / "model", layers, dtype=dtype, device="cpu", seed=0, weights="load", group=group)
        export_shard(stage, output, 0)

    each(tensor_groups(2), run)
    finish_export(output, tmp_path / "model", 1)
    found = AutoModelForCausalLM.from_pretrained(output).state_dict()
    expected = whole.to(torch.bfloat16).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
