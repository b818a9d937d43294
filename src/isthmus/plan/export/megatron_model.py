"""`model_arguments`: a decoder as command-line options of Megatron-LM."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.plan.export.decoder_config import DecoderConfig
from isthmus.plan.export.flag import Flag, flag
from isthmus.plan.export.incompatibility import Incompatibility
from isthmus.plan.export.megatron_experts import expert_arguments, expert_incompatibilities
from isthmus.plan.profile.layer_shapes import LatentShape


def model_incompatibilities(decoder: DecoderConfig) -> Iterator[Incompatibility]:
    """Yield the properties of a decoder that Megatron-LM's options cannot express."""
    dense = [block for block in decoder.feed_forwards if not block.num_experts]
    biased = {decoder.attention.o_bias, *(block.bias for block in decoder.feed_forwards)}
    if len(biased) > 1:
        yield Incompatibility(
            "biases in the attention output but not in the feed-forward blocks, or vice versa: "
            "--disable-bias-linear applies to both",
            final="remove them from config.json, or train it with its own code",
        )
    if len({block.intermediate_size for block in dense}) > 1:
        yield Incompatibility("feed-forward blocks of several widths", final="train it with its own code")
    rope = decoder.rope
    if rope.kind == "yarn" and (rope.original_positions, rope.beta_fast, rope.beta_slow) != (4096, 32.0, 1.0):
        yield Incompatibility(
            f"YaRN from {rope.original_positions} positions, betas {rope.beta_fast:g} and {rope.beta_slow:g}: "
            "with latent attention it supports only 4096, 32 and 1",
            final="remove rope_scaling from config.json",
        )
    yield from expert_incompatibilities(decoder)


def model_arguments(decoder: DecoderConfig, sequence_length: int, tp: int, ep: int) -> list[Flag]:
    """Return the options that describe the model, for sequences of `sequence_length` tokens."""
    shape = decoder.attention
    flags = [
        flag("num-layers", len(decoder.feed_forwards)),
        flag("hidden-size", decoder.hidden_size),
        flag("ffn-hidden-size", decoder.dense_width),
        flag("num-attention-heads", shape.num_heads),
        flag("seq-length", sequence_length),
        flag("max-position-embeddings", max(sequence_length, decoder.max_positions)),
        flag("padded-vocab-size", -(-decoder.vocab_size // tp) * tp),
        flag("position-embedding-type", "rope"),
        flag("rotary-base", round(decoder.rope.theta)),
        flag("normalization", "RMSNorm"),
        flag("norm-epsilon", decoder.norm_epsilon),
        flag("swiglu"),
        flag("init-method-std", decoder.init_std),
        flag("attention-dropout", 0.0),
        flag("hidden-dropout", 0.0),
    ]
    if shape.latent:
        flags += _latent_arguments(decoder, shape.latent)
    else:
        flags.append(flag("kv-channels", shape.head_dim))
        if shape.num_kv_heads != shape.num_heads:
            flags += [flag("group-query-attention"), flag("num-query-groups", shape.num_kv_heads)]
    if decoder.rope.kind == "llama3":
        flags += [flag("use-rope-scaling"), flag("rope-scaling-factor", decoder.rope.factor)]
    if decoder.rotary_share != 1.0:
        flags.append(flag("rotary-percent", decoder.rotary_share))
    if not shape.o_bias:
        flags.append(flag("disable-bias-linear"))
        if shape.qkv_bias:
            flags.append(flag("add-qkv-bias"))
    if shape.qk_norm:
        flags.append(flag("qk-layernorm"))
    if not decoder.tied_embeddings:
        flags.append(flag("untie-embeddings-and-output-weights"))
    if shape.window is not None and shape.window < sequence_length:
        flags.append(flag("window-size", f"{shape.window - 1},0"))
    return flags + (expert_arguments(decoder, tp, ep) if decoder.expert_blocks else [])


def _latent_arguments(decoder: DecoderConfig, latent: LatentShape) -> list[Flag]:
    """Return the options of multi-head latent attention."""
    rope = decoder.rope
    flags = [
        flag("multi-latent-attention"),
        flag("kv-lora-rank", latent.kv_rank),
        flag("qk-head-dim", latent.nope_dim),
        flag("qk-pos-emb-head-dim", latent.rope_dim),
        flag("v-head-dim", decoder.attention.value_dim),
        flag("qk-layernorm"),
        flag("rope-type", "yarn" if rope.kind == "yarn" else "rope"),
    ]
    if latent.query_rank:
        flags.append(flag("q-lora-rank", latent.query_rank))
    if rope.kind == "yarn":
        flags += [
            flag("rotary-scaling-factor", rope.factor),
            flag("mscale", rope.mscale),
            flag("mscale-all-dim", rope.mscale_all_dim),
        ]
    return flags
