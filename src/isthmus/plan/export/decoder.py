"""`decoder_of`: what Megatron-LM and torchtitan ask of a decoder, read from its `config.json`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from isthmus.core.model import Model
from isthmus.plan.export.obstacle import Obstacle
from isthmus.plan.profile.attention import AttentionShape
from isthmus.plan.profile.decoder_layer import FeedForwardShape, LayerShape
from isthmus.plan.profile.dimensions import layer_shape, with_defaults
from isthmus.plan.profile.families import family_of

_OTHER_MODEL = (
    "train it with our runtime or its own code; Llama, Mistral, Qwen, Mixtral and DeepSeek can be exported"
)


@dataclass(frozen=True, kw_only=True)
class Rope:
    """A rotary embedding: its base, how positions are stretched (`kind`) and by which `factor`.

    `mscale` and `mscale_all_dim` are YaRN's corrections of the attention's scale, `original` the positions it
    was trained for, `beta_fast` and `beta_slow` the rotations between which it blends.
    """

    theta: float
    kind: str
    factor: float
    mscale: float
    mscale_all_dim: float
    original: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True, kw_only=True)
class Router:
    """How experts are chosen: by softmax or sigmoid of their scores, some with a bias that balances them.

    `renormalised` says that the weights of the chosen ones sum to one, before `scale`. Of `groups` of experts
    `groups_chosen` are looked at. `balance_weight` is that of the loss that balances them.
    """

    sigmoid: bool
    bias: bool
    renormalised: bool
    scale: float
    groups: int
    groups_chosen: int
    balance_weight: float


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Dimensions and constants of a decoder: `attention` of every layer, the feed-forward block of each."""

    hidden_size: int
    vocab_size: int
    attention: AttentionShape
    blocks: tuple[FeedForwardShape, ...]
    dense_width: int
    rope: Rope
    router: Router
    rotary_share: float
    max_positions: int
    norm_epsilon: float
    init_std: float
    tied: bool

    @property
    def sparse(self) -> tuple[FeedForwardShape, ...]:
        """The blocks of experts."""
        return tuple(block for block in self.blocks if block.num_experts)


def decoder_of(model: Model) -> Decoder:
    """Return the decoder of a model in which `decoder_obstacles` finds nothing."""
    family = family_of(model.architecture)
    config = with_defaults(family, model.config)
    shapes = [layer_shape(family, config, index) for index in range(model.num_layers)]
    return Decoder(
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        attention=shapes[0].attention,
        blocks=tuple(shape.feed_forward for shape in shapes),
        dense_width=int(config.get("intermediate_size") or shapes[0].feed_forward.intermediate),
        rope=_rope(config),
        router=_router(config, model.architecture),
        rotary_share=float(config.get("partial_rotary_factor", 1.0)),
        max_positions=int(config.get("max_position_embeddings", 0)),
        norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
        init_std=float(config.get("initializer_range", 0.02)),
        tied=model.tied_embeddings,
    )


def decoder_obstacles(model: Model) -> Iterator[Obstacle]:
    """Yield what makes a model unlike the decoders that exports describe."""
    family = family_of(model.architecture)
    config = with_defaults(family, model.config)
    shapes = [layer_shape(family, config, index) for index in range(model.num_layers)]
    for unlike in (*_unlike(shapes), *(["a bias in its head"] if family.head_bias else [])):
        yield Obstacle(f"{model.architecture} has {unlike}", _OTHER_MODEL)
    act = str(config.get("hidden_act", "silu"))
    if act != "silu":
        yield Obstacle(f"the activation is {act}, not a gated silu", _OTHER_MODEL)
    kind = _rope(config).kind
    if kind not in ("default", "llama3") and not (kind == "yarn" and family.latent):
        yield Obstacle(
            f"its rotary embedding is stretched by '{kind}'",
            "train at the original length: take rope_scaling out of config.json",
        )


def _unlike(shapes: list[LayerShape]) -> Iterator[str]:
    first = shapes[0].attention
    checks = {
        "attention sinks": first.sinks,
        "capped attention scores": first.capped,
        "norms other than RMS": any(s.norm != "rms" for s in shapes) or first.qk_norm not in (None, "rms"),
        "other than two norms a layer": any(s.num_norms != 2 for s in shapes),
        "attention and feed-forward side by side": any(s.feed_forward.parallel for s in shapes),
        "a feed-forward block without gate": any(not s.feed_forward.gated for s in shapes),
        "windows in some layers only": len({s.attention.window for s in shapes}) > 1,
        "biases in its experts or router": any(
            s.feed_forward.num_experts and (s.feed_forward.bias or s.feed_forward.router_bias) for s in shapes
        ),
    }
    return (text for text, found in checks.items() if found)


def _rope(config: Mapping[str, Any]) -> Rope:
    said = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return Rope(
        theta=float(said.get("rope_theta") or config.get("rope_theta") or 10_000.0),
        kind=str(said.get("rope_type") or said.get("type") or "default"),
        factor=float(said.get("factor", 1.0)),
        mscale=float(said.get("mscale", 1.0)),
        mscale_all_dim=float(said.get("mscale_all_dim", 0.0)),
        original=int(said.get("original_max_position_embeddings", 4096)),
        beta_fast=float(said.get("beta_fast", 32)),
        beta_slow=float(said.get("beta_slow", 1)),
    )


def _router(config: Mapping[str, Any], architecture: str) -> Router:
    """Return the router; what a config leaves out is as the model's published class has it."""
    third = architecture == "DeepseekV3ForCausalLM"
    groups = int(config.get("n_group") or 1)
    return Router(
        sigmoid=third,
        bias=third,
        renormalised=bool(config.get("norm_topk_prob", third or architecture == "MixtralForCausalLM")),
        scale=float(config.get("routed_scaling_factor", 2.5 if third else 1.0)),
        groups=groups,
        groups_chosen=int(config.get("topk_group") or groups),
        balance_weight=float(config.get("router_aux_loss_coef", config.get("aux_loss_alpha", 0.001))),
    )
