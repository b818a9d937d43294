"""`decoder_config`: the decoder parameters that Megatron-LM and torchtitan need, from its `config.json`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from isthmus.core.model import Model
from isthmus.plan.export.incompatibility import Incompatibility
from isthmus.plan.profile.families.layer_dimensions import config_with_defaults, layer_shape
from isthmus.plan.profile.families.model_families import model_family
from isthmus.plan.profile.layer_shapes import AttentionShape, FeedForwardShape, LayerShape

_MODEL_REMEDY = "exports support Llama, Mistral, Phi-3, Qwen, Mixtral and DeepSeek: train this model with its own code"


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Parameters of a rotary embedding."""

    theta: float
    """Base of the frequencies."""
    kind: str
    """Scaling of positions, such as `default`, `llama3` or `yarn`."""
    factor: float
    """Factor of that scaling."""
    mscale: float
    """YaRN's correction of the attention scale."""
    mscale_all_dim: float
    """YaRN's correction of the attention scale, over all dimensions."""
    original_positions: int
    """Number of positions before scaling."""
    beta_fast: float
    """Rotations above which YaRN keeps frequencies."""
    beta_slow: float
    """Rotations below which YaRN interpolates them."""


@dataclass(frozen=True, kw_only=True)
class Router:
    """Parameters of an expert router."""

    sigmoid: bool
    """Whether scores pass through a sigmoid instead of a softmax."""
    bias: bool
    """Whether a bias balances the experts."""
    renormalised: bool
    """Whether the weights of the chosen experts sum to one, before `scale`."""
    scale: float
    groups: int
    """Number of expert groups."""
    groups_chosen: int
    """Number of groups to choose experts from."""
    balance_weight: float
    """Weight of the load-balancing loss."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Dimensions and constants of a decoder; `attention` is that of every layer, `feed_forwards` one per layer."""

    hidden_size: int
    vocab_size: int
    attention: AttentionShape
    feed_forwards: tuple[FeedForwardShape, ...]
    dense_width: int
    rope: Rope
    router: Router
    rotary_share: float
    max_positions: int
    norm_epsilon: float
    init_std: float
    tied_embeddings: bool

    @property
    def expert_blocks(self) -> tuple[FeedForwardShape, ...]:
        """The feed-forward blocks with experts."""
        return tuple(block for block in self.feed_forwards if block.num_experts)


def decoder_config(model: Model) -> DecoderConfig:
    """Return the decoder parameters of a model without `decoder_incompatibilities`."""
    family = model_family(model.architecture)
    config = config_with_defaults(family, model.config)
    shapes = [layer_shape(family, config, index) for index in range(model.num_layers)]
    return DecoderConfig(
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        attention=shapes[0].attention,
        feed_forwards=tuple(shape.feed_forward for shape in shapes),
        dense_width=int(config.get("intermediate_size") or shapes[0].feed_forward.intermediate_size),
        rope=_rope(config),
        router=_router(config, model.architecture),
        rotary_share=float(config.get("partial_rotary_factor", 1.0)),
        max_positions=int(config.get("max_position_embeddings", 0)),
        norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
        init_std=float(config.get("initializer_range", 0.02)),
        tied_embeddings=model.tied_embeddings,
    )


def decoder_incompatibilities(model: Model) -> Iterator[Incompatibility]:
    """Yield the features of a model that exports do not support."""
    family = model_family(model.architecture)
    config = config_with_defaults(family, model.config)
    shapes = [layer_shape(family, config, index) for index in range(model.num_layers)]
    for feature in (*_unsupported_features(shapes), *(["a bias in its head"] if family.head_bias else [])):
        yield Incompatibility(f"{model.architecture} has {feature}", final=_MODEL_REMEDY)
    act = str(config.get("hidden_act", "silu"))
    if act != "silu":
        yield Incompatibility(f"the activation is {act}, not a gated silu", final=_MODEL_REMEDY)
    kind = _rope(config).kind
    if kind not in ("default", "llama3") and not (kind == "yarn" and family.latent):
        yield Incompatibility(
            f"its rotary embedding uses '{kind}' scaling",
            final="train at the original length: remove rope_scaling from config.json",
        )


def _unsupported_features(shapes: list[LayerShape]) -> Iterator[str]:
    first = shapes[0].attention
    checks = {
        "attention sinks": first.sinks,
        "capped attention scores": first.capped,
        "norms other than RMS": any(s.norm != "rms" for s in shapes) or first.qk_norm not in (None, "rms"),
        "a number of norms per layer other than two": any(s.num_norms != 2 for s in shapes),
        "parallel attention and feed-forward blocks": any(s.feed_forward.parallel for s in shapes),
        "a feed-forward block without gate": any(not s.feed_forward.gated for s in shapes),
        "windows in some layers only": len({s.attention.window for s in shapes}) > 1,
        "biases in its experts or router": any(
            s.feed_forward.num_experts and (s.feed_forward.bias or s.feed_forward.router_bias) for s in shapes
        ),
    }
    return (text for text, found in checks.items() if found)


def _rope(config: Mapping[str, Any]) -> Rope:
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return Rope(
        theta=float(scaling.get("rope_theta") or config.get("rope_theta") or 10_000.0),
        kind=str(scaling.get("rope_type") or scaling.get("type") or "default"),
        factor=float(scaling.get("factor", 1.0)),
        mscale=float(scaling.get("mscale", 1.0)),
        mscale_all_dim=float(scaling.get("mscale_all_dim", 0.0)),
        original_positions=int(scaling.get("original_max_position_embeddings", 4096)),
        beta_fast=float(scaling.get("beta_fast", 32)),
        beta_slow=float(scaling.get("beta_slow", 1)),
    )


def _router(config: Mapping[str, Any], architecture: str) -> Router:
    """Return the router; missing fields have the defaults of the model's published class."""
    is_v3 = architecture == "DeepseekV3ForCausalLM"
    groups = int(config.get("n_group") or 1)
    return Router(
        sigmoid=is_v3,
        bias=is_v3,
        renormalised=bool(config.get("norm_topk_prob", is_v3 or architecture == "MixtralForCausalLM")),
        scale=float(config.get("routed_scaling_factor", 2.5 if is_v3 else 1.0)),
        groups=groups,
        groups_chosen=int(config.get("topk_group") or groups),
        balance_weight=float(config.get("router_aux_loss_coef", config.get("aux_loss_alpha", 0.001))),
    )
