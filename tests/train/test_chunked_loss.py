"""Head and loss by chunks: the loss and gradients of one pass, at the memory of a chunk."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from isthmus.core.model import load_model
from isthmus.core.stack import find_stack
from isthmus.plan.memory.stage_memory import stage_memory
from isthmus.plan.profile.model_profile import profile_model
from isthmus.plan.profile.stack_tensors import stacked_profile
from isthmus.train.model.chunked_loss import LOSS_CHUNK_BYTES, chunked_loss, tokens_per_chunk
from isthmus.train.model.stage_model import IGNORED_LABEL, StageModel, build_stage, token_loss
from tests.plan.torch_memory import peak_bytes
from tests.train.small_models import NUM_LAYERS, token_ids, write_config
from tests.train.tensor_groups import each, tensor_groups


def inputs(num_tokens: int, vocab: int, hidden: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Return hidden states [1, N, H], a weight [V, H] and labels [1, N], a third of which do not count."""
    generator = torch.Generator().manual_seed(num_tokens * vocab + hidden)
    states = torch.randn(1, num_tokens, hidden, generator=generator).to(dtype)
    weight = torch.randn(vocab, hidden, generator=generator).to(dtype)
    labels = torch.randint(vocab, (1, num_tokens), generator=generator)
    labels[:, ::3] = IGNORED_LABEL
    return states.requires_grad_(), weight.requires_grad_(), labels


@settings(max_examples=60, deadline=None)
@given(
    num_tokens=st.integers(1, 23),
    vocab=st.integers(1, 40),
    hidden=st.integers(1, 9),
    chunk=st.integers(1, 25),
    factor=st.sampled_from([1.0, 1e-3, 30.0]),
)
def test_chunks_of_any_size_give_the_loss_and_gradients_of_one_pass(
    num_tokens: int, vocab: int, hidden: int, chunk: int, factor: float
) -> None:
    """The loss to 1e-6 and gradients to the rounding of fp32, whatever the chunk, also multiplied afterwards."""
    states, weight, labels = inputs(num_tokens, vocab, hidden, torch.float32)
    whole = token_loss(torch.nn.functional.linear(states, weight), labels) * factor
    expected = torch.autograd.grad(whole, (states, weight))
    loss = chunked_loss(states, weight, labels, chunk_tokens=chunk, ignored_label=IGNORED_LABEL).sum() * factor
    assert loss.item() == pytest.approx(whole.item(), rel=1e-6, abs=1e-6 * factor)
    for ours, theirs in zip(torch.autograd.grad(loss, (states, weight)), expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=2e-6 * factor * num_tokens)


def test_gradients_of_bf16_are_as_near_to_fp32_as_those_of_one_pass() -> None:
    """The weight's gradient is summed in fp32 over chunks: the error stays that of one product in bf16."""
    states, weight, labels = inputs(96, 33, 16, torch.bfloat16)
    exact = [one.detach().float().requires_grad_() for one in (states, weight)]
    expected = torch.autograd.grad(token_loss(exact[0] @ exact[1].t(), labels), exact)
    errors = {}
    for chunk in (3, 96):
        loss = chunked_loss(states, weight, labels, chunk_tokens=chunk, ignored_label=IGNORED_LABEL).sum()
        found = torch.autograd.grad(loss, (states, weight))
        assert [one.dtype for one in found] == [torch.bfloat16] * 2
        errors[chunk] = max(float((a.float() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))
    assert errors[3] < 1.5 * errors[96] < 0.02


def loss_of(folder: Path, chunk_bytes: int, group: Any = None) -> tuple[float, StageModel]:
    """Return the loss of fixed tokens with chunks of `chunk_bytes`, and the model with its gradients."""
    model = build_stage(
        folder, (0, NUM_LAYERS), dtype=torch.float32, device="cpu", seed=3, weights="random", group=group
    )
    model.loss_chunk_bytes = chunk_bytes
    ids = token_ids(length=12)
    labels = ids.roll(-1, 1)
    labels[0, :3] = IGNORED_LABEL
    loss = model.loss(model.compute(ids)[0], labels)
    loss.backward()
    return loss.item(), model


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["llama", "qwen3-moe-tied-sparse"])
@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (2, True)])
def test_a_shared_vocabulary_is_summed_by_chunks(tmp_path: Path, variant: str, tp: int, sp: bool) -> None:
    """Tensor-parallel ranks with chunks of 5 tokens get the loss and gradients of one rank without chunks."""
    folder = write_config(tmp_path, variant)
    expected, alone = loss_of(folder, LOSS_CHUNK_BYTES)
    whole = dict(alone.global_named_parameters())
    largest = max(parameter.grad.abs().max().item() for parameter in whole.values())
    chunk_bytes = 5 * 4 * -(-alone.vocab_size // tp)
    assert tokens_per_chunk(alone.vocab_size, tp, chunk_bytes) == 5
    groups = [None] if tp == 1 else tensor_groups(tp, cuts_sequence=sp)
    found = [loss_of(folder, chunk_bytes)] if tp == 1 else each(groups, lambda one: loss_of(folder, chunk_bytes, one))
    for loss, model in found:
        assert loss == pytest.approx(expected, rel=1e-6)
        for name, parameter in model.global_named_parameters():
            gradient = model.slices[name].take_from(whole[name].grad)
            assert torch.allclose(parameter.grad, gradient, rtol=1e-4, atol=1e-6 * largest), name


class LargestTensor(TorchDispatchMode):
    """Records the largest fp32 tensor that an operation returns, in elements."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation; look at what it returns."""
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor) and one.dtype == torch.float32:
                self.num_elements = max(self.num_elements, one.numel())
        return result


WIDE = {"vocab_size": 4001, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
TOKENS, LENGTH = 512, 256


def wide_stage(folder: Path) -> StageModel:
    """Return a whole model whose logits are most of its memory, with chunks of 64 tokens."""
    stage = build_stage(
        write_config(folder, "llama", attention_bias=False, mlp_bias=False, pad_token_id=None, **WIDE),
        (0, 2),
        dtype=torch.float32,
        device="cpu",
        seed=0,
        weights="random",
    )
    stage.loss_chunk_bytes = 64 * 4 * stage.vocab_size
    return stage


def test_the_logits_of_all_tokens_never_exist(tmp_path: Path) -> None:
    """No fp32 tensor of the forward and backward pass is larger than the chunk's logits or the head's weight."""
    stage = wide_stage(tmp_path)
    ids = torch.randint(stage.vocab_size, (TOKENS // LENGTH, LENGTH))
    with LargestTensor() as seen:
        stage.loss(stage.compute(ids)[0], ids.roll(-1, 1)).backward()
    assert seen.num_elements == 64 * stage.vocab_size < TOKENS * stage.vocab_size / 4


@pytest.mark.slow
def test_the_memory_model_knows_the_chunks(tmp_path: Path) -> None:
    """The peak of training with chunks agrees with torch's allocations within 2 %; without chunks it is far above."""
    stage = wide_stage(tmp_path)

    def module(input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=stage.loss(stage.compute(input_ids)[0], labels.roll(-1, 1)))

    stack = find_stack("isthmus")
    assert stack.loss.chunk_bytes == LOSS_CHUNK_BYTES
    plain, model = profile_model(load_model(tmp_path)), None
    small = stack.loss.model_copy(update={"chunk_bytes": float(stage.loss_chunk_bytes)})
    model = stacked_profile(plain, stack.model_copy(update={"loss": small}), "fp32")
    ids = torch.randint(stage.vocab_size, (TOKENS // LENGTH, LENGTH))
    measured = peak_bytes(module, ids) + 16 * plain.num_parameters
    sizes: dict[str, Any] = {"is_first": True, "is_last": True, "in_flight": 1, "precision": "fp32"}
    sizes |= {"micro_batch_size": TOKENS // LENGTH, "sequence_length": LENGTH}
    predicted = stage_memory(model, (0, 2), **sizes).allocated_bytes
    assert predicted == pytest.approx(measured, rel=0.02)
    assert stage_memory(plain, (0, 2), **sizes).allocated_bytes > 1.5 * measured
