"""Rules of the model profile: counts, operations, bytes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.errors import ModelError
from isthmus.core.model import Model
from isthmus.plan.profile.component import AttentionCore
from isthmus.plan.profile.model_profile import profile_model
from tests.plan.published import NAMES, PARAMETERS, published

PROFILES = {name: profile_model(published(name)) for name in NAMES}
any_profile = st.sampled_from(NAMES)


def model(architecture="LlamaForCausalLM", **config):
    fields = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 100,
        "num_hidden_layers": 2,
    } | config
    return Model(
        path="m",
        architecture=architecture,
        num_layers=fields["num_hidden_layers"],
        hidden_size=fields["hidden_size"],
        vocab_size=fields["vocab_size"],
        config=fields,
    )


@pytest.mark.parametrize("name", NAMES)
def test_parameter_counts_are_exact(name):
    """The profile has as many parameters as the published model, to the last one."""
    assert PROFILES[name].num_parameters == PARAMETERS[name]


def test_active_parameters_are_those_of_the_names():
    """A22B, A3B and 12.9B active: experts count as often as a token uses them."""
    assert round(PROFILES["qwen3-235b-a22b"].active_parameters / 1e9) == 22
    assert round(PROFILES["qwen3-30b-a3b"].active_parameters / 1e9) == 3
    assert PROFILES["mixtral-8x7b"].active_parameters == 12_879_925_248


@given(any_profile, st.integers(1, 4096), st.integers(1, 8))
@settings(deadline=None, max_examples=40)
def test_forward_operations_are_two_per_matrix_parameter_and_token_plus_the_scores(name, length, sequences):
    """FLOPs = 2 x (parameters that multiply a token) x tokens + 2 (d_k + d_v) x heads x visible keys."""
    profile, tokens = PROFILES[name], length * sequences
    matrices = sum(
        weight.active_copies * weight.matrix_elements
        for layer in profile.layers
        for part in layer.components
        for weight in part.weights
    )
    matrices += profile.vocab_size * profile.hidden_size  # the head, tied or not
    pairs = 0.0
    for layer in profile.layers:
        core = layer.attention.core
        width = 2 * core.num_heads * (core.key_dim + core.value_dim)
        seen = sum(min(i + 1, core.window or length) for i in range(length))
        pairs += width * seen * sequences
    assert profile.forward_flops(length, tokens) == pytest.approx(2 * matrices * tokens + pairs)


@given(any_profile, st.integers(1, 10_000), st.integers(1, 10_000))
@settings(deadline=None, max_examples=40)
def test_backward_is_twice_the_forward_and_recomputation_adds_what_it_repeats(name, length, tokens):
    """Backward = 2 x forward; full recomputation adds the layers' forward, other kinds at most that."""
    profile = PROFILES[name]
    forward = profile.forward_flops(length, tokens)
    layers = sum(layer.forward_flops(length, tokens) for layer in profile.layers)
    extra = {
        kind: profile.backward_flops(length, tokens, kind) - 2 * forward
        for kind in ("none", "selective", "moe", "full")
    }
    assert extra["none"] == pytest.approx(0, abs=1e-6 * forward)
    assert extra["full"] == pytest.approx(layers, rel=1e-6)
    assert extra["selective"] <= extra["full"]
    assert extra["moe"] <= extra["full"]


@given(st.integers(1, 500), st.integers(1, 600))
def test_mean_keys_counts_the_visible_keys(length, window):
    """Under the causal mask query i sees min(i + 1, window) keys."""
    core = AttentionCore(num_heads=1, num_kv_heads=1, key_dim=1, value_dim=1, window=window)
    assert core.mean_keys(length) == pytest.approx(sum(min(i + 1, window) for i in range(length)) / length)


def test_windows_fall_on_the_layers_that_the_families_say():
    """Gemma 3 looks through a window but in each sixth layer, Gemma 2 and GPT-OSS but in each second."""

    def windows(name):
        return [layer.attention.core.window for layer in PROFILES[name].layers]

    assert [i for i, window in enumerate(windows("gemma-3-1b")) if window is None] == [5, 11, 17, 23]
    assert windows("gemma-2-9b")[:4] == [4096, None, 4096, None]
    assert windows("gpt-oss-20b")[:4] == [128, None, 128, None]
    assert set(windows("mistral-7b-v0.1")) == {4096}
    assert set(windows("qwen2.5-7b")) == {None}


def test_first_layers_of_deepseek_are_dense():
    """DeepSeek-V3 has three dense layers, then experts with one shared."""
    kinds = [layer.feed_forward.kind for layer in PROFILES["deepseek-v3"].layers]
    assert kinds == ["dense"] * 3 + ["experts"] * 58
    block = PROFILES["deepseek-v3"].layers[3].feed_forward
    assert (block.num_experts, block.experts_per_token, block.shared_experts) == (256, 8, 1)


def test_equal_layers_are_one_object():
    """A profile of many layers is small: equal layers are shared."""
    assert len({id(layer) for layer in PROFILES["llama-3.1-405b"].layers}) == 1
    assert len({id(layer) for layer in PROFILES["deepseek-v3"].layers}) == 2


def test_cache_bytes_per_token():
    """Key and value of each layer: 2 x heads x width; for latent attention, the latent and the rotary key."""
    assert PROFILES["llama-3.1-8b"].kv_cache_bytes_per_token(2) == 32 * 2 * 8 * 128 * 2
    assert PROFILES["deepseek-v3"].kv_cache_bytes_per_token(2) == 61 * (512 + 64) * 2
    assert PROFILES["qwen3-235b-a22b"].kv_cache_bytes_per_token(2, tp=4) == 94 * 2 * 128 * 2
    assert PROFILES["qwen3-235b-a22b"].kv_cache_bytes_per_token(2, tp=8) == 94 * 2 * 128 * 2


@given(any_profile, st.integers(1, 10_000))
def test_the_hidden_state_crosses_a_boundary(name, tokens):
    """Between stages goes one hidden state a token, whatever the layer."""
    profile = PROFILES[name]
    assert profile.boundary_bytes(tokens, 2) == 2 * tokens * profile.hidden_size


@given(st.sampled_from(["mixtral-8x7b", "qwen3-30b-a3b"]), st.integers(1, 5000))
def test_more_tokens_read_more_experts_up_to_all(name, tokens):
    """Of experts, one token reads its own, many read all; dense weights are read once."""
    profile = PROFILES[name]
    block = profile.layers[0].feed_forward
    one, many = block.weight_bytes_read(1, 2), block.weight_bytes_read(tokens, 2)
    assert one == pytest.approx(2 * block.active_parameters)
    assert one * (1 - 1e-9) <= many <= 2 * block.parameters * (1 + 1e-9)


def test_an_unknown_architecture_is_refused_with_those_known():
    """The error names the architecture and what is known."""
    with pytest.raises(ModelError, match="BertForMaskedLM") as error:
        profile_model(model("BertForMaskedLM"))
    assert "LlamaForCausalLM" in (error.value.hint or "")


@pytest.mark.parametrize(("key", "value"), [("num_attention_heads", None), ("intermediate_size", "128")])
def test_a_missing_dimension_is_named(key, value):
    """A dimension that is missing or no number is named in the error."""
    with pytest.raises(ModelError, match=key):
        profile_model(model(**{key: value}))


@pytest.mark.parametrize(
    ("architecture", "changes", "named"),
    [
        ("LlamaForCausalLM", {"num_key_value_heads": "2"}, "num_key_value_heads is '2'"),
        ("LlamaForCausalLM", {"num_key_value_heads": 3}, "must divide num_attention_heads, 4"),
        ("LlamaForCausalLM", {"num_attention_heads": 100, "num_key_value_heads": 1}, "hidden_size, 64"),
        ("LlamaForCausalLM", {"head_dim": -1}, "head_dim is -1"),
        ("LlamaForCausalLM", {"intermediate_size": 10**400}, "intermediate_size"),
        ("PhiForCausalLM", {"partial_rotary_factor": "half"}, "partial_rotary_factor is 'half'"),
        ("Qwen3ForCausalLM", {"layer_types": ["full_attention"]}, "types of 2 layers"),
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "max_window_layers": "x"}, "max_window_layers"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": 5}, "mlp_only_layers is 5"),
        ("MixtralForCausalLM", {"num_key_value_heads": 4, "num_experts_per_tok": 9}, "num_experts, 8"),
    ],
)
def test_what_a_config_cannot_mean_is_refused_by_name(architecture, changes, named):
    """A value of another kind, or dimensions that do not go together: refused, and never profiled."""
    with pytest.raises(ModelError) as refused:
        profile_model(model(architecture, **changes))
    assert named in str(refused.value)


def test_biases_and_tied_heads_are_counted_as_configured():
    """Each switch of `config.json` adds exactly its own parameters."""
    plain = profile_model(model()).num_parameters
    assert profile_model(model(attention_bias=True)).num_parameters == plain + 2 * 4 * 64
    assert profile_model(model(mlp_bias=True)).num_parameters == plain + 2 * (128 + 128 + 64)
    assert profile_model(model(tie_word_embeddings=True)).num_parameters == plain - 100 * 64
