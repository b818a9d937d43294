"""Rules of the model cut by layers: any cut is the same model."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isthmus.core.errors import ModelError, PlanError
from isthmus.train.model.stage_model import EMBEDDING_WEIGHT, HEAD_WEIGHT, StageModel, build_stage, token_loss
from tests.train.small_models import NUM_LAYERS, VARIANTS, VOCABULARY, save_model, token_ids, write_config

any_variant = pytest.mark.parametrize("variant", VARIANTS)
cuts = st.sets(st.integers(1, NUM_LAYERS - 1)).map(lambda inner: [0, *sorted(inner), NUM_LAYERS])
few = settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def stages(folder: Path, bounds: list[int], *, seed: int = 3, weights: str = "random") -> list[StageModel]:
    return [
        build_stage(folder, layers, dtype=torch.float32, device="cpu", seed=seed, weights=weights)
        for layers in pairwise(bounds)
    ]


def chain(parts: list[StageModel], ids: torch.Tensor) -> torch.Tensor:
    hidden = ids
    for part in parts:
        hidden = part(hidden)
    return hidden


def parameters(parts: list[StageModel]) -> dict[str, torch.Tensor]:
    return {name: value.detach() for part in parts for name, value in part.global_named_parameters()}


@pytest.mark.slow
@any_variant
@given(bounds=cuts)
@few
def test_a_chain_of_stages_computes_what_transformers_computes(tmp_path, variant, bounds):
    """Whatever the cut, the logits of the chained stages are those of the whole model, bit for bit.

    Experts go through one kernel here; the other one of transformers agrees to 1e-6.
    """
    folder = tmp_path / variant
    if not folder.exists():
        save_model(folder, variant)
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager")
    default = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        found = chain(stages(folder, bounds, weights="load"), token_ids())
        assert torch.equal(found, whole(token_ids()).logits)
        assert torch.allclose(found, default(token_ids()).logits, rtol=0, atol=1e-6)


@pytest.mark.slow
@any_variant
@given(bounds=cuts, seed=st.integers(0, 2**40))
@few
def test_initial_weights_do_not_depend_on_the_cut(tmp_path, variant, bounds, seed):
    """Each tensor follows from seed and full name: any cut starts bit-identical to the single stage."""
    folder = write_config(tmp_path, variant)
    single = parameters(stages(folder, [0, NUM_LAYERS], seed=seed))
    cut = parameters(stages(folder, bounds, seed=seed))
    assert cut.keys() == single.keys()
    assert all(torch.equal(cut[name], single[name]) for name in single)


@any_variant
def test_initial_weights_follow_the_rule_of_the_architecture(tmp_path, variant):
    """Norms, biases and the padding row are constants as in transformers; elsewhere the spread agrees."""
    folder = write_config(tmp_path, variant, initializer_range=0.05)
    whole = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    ours = parameters(stages(folder, [0, NUM_LAYERS]))
    assert ours.keys() == dict(whole.named_parameters()).keys()
    for name, theirs in whole.named_parameters():
        assert ours[name].shape == theirs.shape
        if theirs.std() == 0:
            assert torch.equal(ours[name], theirs), name
        else:
            rows = ours[name].reshape(len(ours[name]), -1)
            assert torch.equal(rows.std(1) == 0, theirs.reshape(len(theirs), -1).std(1) == 0), name
            assert ours[name].std() == pytest.approx(0.05, rel=0.3), name
            assert abs(ours[name].mean()) < max(0.02, 4 * 0.05 / ours[name].numel() ** 0.5), name


def test_the_seed_and_the_name_both_matter(tmp_path):
    """Another seed gives other weights, and no two tensors of one model are alike."""
    folder = write_config(tmp_path, "qwen3")
    one, other = (parameters(stages(folder, [0, NUM_LAYERS], seed=seed)) for seed in (1, 2))
    assert not torch.equal(one[EMBEDDING_WEIGHT], other[EMBEDDING_WEIGHT])
    layer = "model.layers.{}.mlp.up_proj.weight"
    assert not torch.equal(one[layer.format(0)], one[layer.format(1)])


def test_drawing_weights_leaves_the_global_generators_alone(tmp_path):
    """Building a stage neither reads nor moves torch's own random state."""
    folder = write_config(tmp_path, "mixtral")
    before = torch.get_rng_state()
    stages(folder, [0, NUM_LAYERS])
    assert torch.equal(torch.get_rng_state(), before)


def test_bf16_weights_are_the_fp32_ones_rounded(tmp_path):
    """The dtype changes the precision of the initial weights, not the draw."""
    folder = write_config(tmp_path, "mixtral")
    exact = parameters(stages(folder, [0, NUM_LAYERS]))
    stage = build_stage(folder, (1, 3), dtype=torch.bfloat16, device="cpu", seed=3, weights="random")
    for name, value in stage.global_named_parameters():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, exact[name].to(torch.bfloat16))


@pytest.mark.slow
@any_variant
@given(bounds=cuts)
@few
def test_each_parameter_of_the_model_is_in_one_stage(tmp_path, variant, bounds):
    """The stages divide the parameters of the whole model; only a tied embedding is held twice."""
    folder = write_config(tmp_path, variant)
    whole = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    parts = stages(folder, bounds)
    names = [name for part in parts for name, _ in part.global_named_parameters()]
    copies = 2 if parts[0].tied and len(parts) > 1 else 1
    assert sorted(set(names)) == sorted(name for name, _ in whole.named_parameters())
    assert names.count(EMBEDDING_WEIGHT) == copies
    assert len(names) == len(set(names)) + copies - 1


@pytest.mark.slow
@any_variant
def test_gradients_of_chained_stages_are_those_of_the_whole(tmp_path, variant):
    """Back-propagation through the stages gives transformers' gradients; tied copies add up to the whole's."""
    save_model(tmp_path, variant)
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager").train()
    parts = stages(tmp_path, [0, 1, NUM_LAYERS], weights="load")
    labels = token_ids().roll(-1, dims=1)
    token_loss(whole(token_ids()).logits, labels).backward()
    token_loss(chain(parts, token_ids()), labels).backward()
    found: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, value in part.global_named_parameters():
            found[name] = found[name] + value.grad if name in found else value.grad
    for name, value in whole.named_parameters():
        assert (found[name] - value.grad).norm() <= 1e-5 * value.grad.norm(), name


def test_tied_copies_are_told(tmp_path):
    """First and last stage hold a copy each, a middle stage none, a single stage one parameter used twice."""
    folder = write_config(tmp_path / "tied", "llama-tied")
    first, middle, last = (dict(one.global_named_parameters()) for one in stages(folder, [0, 1, 3, NUM_LAYERS]))
    assert EMBEDDING_WEIGHT not in middle
    assert torch.equal(first[EMBEDDING_WEIGHT], last[EMBEDDING_WEIGHT])
    assert not any(HEAD_WEIGHT in held for held in (first, middle, last))
    (single,) = stages(folder, [0, NUM_LAYERS])
    assert single.lm_head.weight is single.model.embed_tokens.weight
    (untied,) = stages(write_config(tmp_path / "untied", "llama"), [0, NUM_LAYERS])
    assert {EMBEDDING_WEIGHT, HEAD_WEIGHT} <= dict(untied.global_named_parameters()).keys()


def test_a_stage_says_what_it_is(tmp_path):
    """Ends, sizes and shapes of a stage are those of the configuration."""
    first, last = stages(write_config(tmp_path, "qwen3"), [0, 2, NUM_LAYERS])
    assert (first.is_first, first.is_last, last.is_first, last.is_last) == (True, False, False, True)
    assert first.hidden_size == 16
    hidden = first(token_ids(3, 7))
    assert hidden.shape == (3, 7, 16)
    assert last(hidden).shape == (3, 7, VOCABULARY)


@pytest.mark.parametrize("layers", [(2, 2), (3, 1), (0, NUM_LAYERS + 1), (-1, 2), (NUM_LAYERS, NUM_LAYERS + 1)])
def test_a_range_the_model_does_not_have_is_refused(tmp_path, layers):
    """An empty, reversed or too long range is a `PlanError` that says how many layers there are."""
    folder = write_config(tmp_path, "llama")
    with pytest.raises(PlanError) as caught:
        build_stage(folder, layers, dtype=torch.float32, device="cpu", seed=0, weights="random")
    assert str(NUM_LAYERS) in str(caught.value) or str(NUM_LAYERS - 1) in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 0},
        {"architectures": ["GPT2LMHeadModel"]},
        {"hidden_size": "wide"},
        {"hidden_act": "no-such"},
        {"rope_parameters": 3},
    ],
)
def test_a_configuration_that_transformers_refuses_is_a_model_error(tmp_path, changes):
    """A value that no model can have is answered with the file's name, not with a traceback of a library."""
    folder = write_config(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "head_dim": None, **changes}))
    with pytest.raises(ModelError) as caught:
        build_stage(folder, (0, 1), dtype=torch.float32, device="cpu", seed=0, weights="random")
    assert str(folder) in caught.value.message
    assert caught.value.hint


def test_token_loss_sums_over_the_labels_that_count():
    """The loss is the fp32 sum over labels other than -100, also of bf16 logits, and 0 where none counts."""
    logits = torch.randn(2, 5, 9, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[1, 2, -100, 4, -100], [-100, 0, 8, -100, 3]])
    log_probabilities = logits.log_softmax(-1)
    expected = -sum(log_probabilities[b, t, labels[b, t]] for b in range(2) for t in range(5) if labels[b, t] != -100)
    assert token_loss(logits, labels) == pytest.approx(float(expected), rel=1e-5)
    assert token_loss(logits.bfloat16(), labels).dtype == torch.float32
    assert token_loss(logits, torch.full((2, 5), -100)) == 0
