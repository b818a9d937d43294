"""`decoder_of`: what Megatron-LM and torchtitan ask of a Llama-like decoder, read from its `config.json`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from isthmus.core.model import Model
from isthmus.plan.export.obstacle import Obstacle
from isthmus.plan.profile.attention import AttentionShape
from isthmus.plan.profile.dimensions import layer_shape, with_defaults
from isthmus.plan.profile.families import family_of
from isthmus.plan.profile.layers import FeedForwardShape, LayerShape

_OTHER_MODEL = "train it with our runtime or its own code; Llama, Mistral, Qwen and Mixtral can be exported"


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Dimensions and constants of a decoder. `rope_factor` is set where positions are stretched as Llama 3's.

    `attention` is that of every layer, `blocks` the feed-forward block of each. `renormalised` says that the
    weights of the chosen experts sum to one; `balance_weight` is that of the loss that balances them.
    """

    hidden_size: int
    vocab_size: int
    attention: AttentionShape
    blocks: tuple[FeedForwardShape, ...]
    dense_width: int
    rope_theta: float
    rope_factor: float | None
    rotary_share: float
    max_positions: int
    norm_epsilon: float
    init_std: float
    tied: bool
    renormalised: bool
    balance_weight: float

    @property
    def sparse(self) -> tuple[FeedForwardShape, ...]:
        """The blocks of experts."""
        return tuple(block for block in self.blocks if block.num_experts)


def decoder_of(model: Model) -> Decoder:
    """Return the decoder of a model in which `decoder_obstacles` finds nothing."""
    family = family_of(model.architecture)
    config = with_defaults(family, model.config)
    shapes = [layer_shape(family, config, index) for index in range(model.num_layers)]
    theta, factor, _ = _rope(config)
    return Decoder(
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        attention=shapes[0].attention,
        blocks=tuple(shape.feed_forward for shape in shapes),
        dense_width=int(config.get("intermediate_size") or shapes[0].feed_forward.intermediate),
        rope_theta=theta,
        rope_factor=factor,
        rotary_share=float(config.get("partial_rotary_factor", 1.0)),
        max_positions=int(config.get("max_position_embeddings", 0)),
        norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
        init_std=float(config.get("initializer_range", 0.02)),
        tied=model.tied_embeddings,
        renormalised=bool(config.get("norm_topk_prob", model.architecture == "MixtralForCausalLM")),
        balance_weight=float(config.get("router_aux_loss_coef", 0.001)),
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
    kind = _rope(config)[2]
    if kind not in ("default", "llama3"):
        yield Obstacle(
            f"its rotary embedding is stretched by '{kind}'",
            "train at the original length: take rope_scaling out of config.json",
        )


def _unlike(shapes: list[LayerShape]) -> Iterator[str]:
    first = shapes[0].attention
    checks = {
        "latent attention": first.latent is not None,
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


def _rope(config: Mapping[str, Any]) -> tuple[float, float | None, str]:
    """Return base, Llama 3's factor if that scaling is on, and the kind of scaling."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    return theta, float(scaling.get("factor", 8.0)) if kind == "llama3" else None, kind
