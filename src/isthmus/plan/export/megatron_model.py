"""`model_arguments`: a decoder as the command line of Megatron-LM describes it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from isthmus.plan.export.decoder import Decoder
from isthmus.plan.export.obstacle import Obstacle


@dataclass(frozen=True)
class Flag:
    """An option of a command line with its values; a switch has none."""

    name: str
    values: tuple[str, ...] = ()

    def words(self) -> tuple[str, ...]:
        """Return the option as separate words."""
        return (f"--{self.name}", *self.values)


def flag(name: str, *values: object) -> Flag:
    """Return an option with its values as text."""
    return Flag(name, tuple(str(value) for value in values))


def model_obstacles(decoder: Decoder) -> Iterator[Obstacle]:
    """Yield what Megatron-LM's options cannot say of a decoder."""
    dense = [block for block in decoder.blocks if not block.num_experts]
    biased = {decoder.attention.o_bias, *(block.bias for block in decoder.blocks)}
    if len(biased) > 1:
        yield Obstacle(
            "biases in attention's output but not in the feed-forward blocks, or the other way round: "
            "--disable-bias-linear governs both",
            "leave them out of config.json, or train with our runtime",
        )
    if len({block.intermediate for block in dense}) > 1:
        yield Obstacle("feed-forward blocks of several widths", "train it with our runtime")


def model_arguments(decoder: Decoder, sequence_length: int, tp: int, ep: int) -> list[Flag]:
    """Return the options that describe the model, for sequences of `sequence_length` tokens."""
    shape = decoder.attention
    found = [
        flag("num-layers", len(decoder.blocks)),
        flag("hidden-size", decoder.hidden_size),
        flag("ffn-hidden-size", decoder.dense_width),
        flag("num-attention-heads", shape.num_heads),
        flag("kv-channels", shape.head_dim),
        flag("seq-length", sequence_length),
        flag("max-position-embeddings", max(sequence_length, decoder.max_positions)),
        flag("padded-vocab-size", -(-decoder.vocab_size // tp) * tp),
        flag("position-embedding-type", "rope"),
        flag("rotary-base", round(decoder.rope_theta)),
        flag("normalization", "RMSNorm"),
        flag("norm-epsilon", decoder.norm_epsilon),
        flag("swiglu"),
        flag("init-method-std", decoder.init_std),
        flag("attention-dropout", 0.0),
        flag("hidden-dropout", 0.0),
    ]
    if shape.num_kv_heads != shape.num_heads:
        found += [flag("group-query-attention"), flag("num-query-groups", shape.num_kv_heads)]
    if decoder.rope_factor is not None:
        found += [flag("use-rope-scaling"), flag("rope-scaling-factor", decoder.rope_factor)]
    if decoder.rotary_share != 1.0:
        found.append(flag("rotary-percent", decoder.rotary_share))
    if not shape.o_bias:
        found.append(flag("disable-bias-linear"))
        if shape.qkv_bias:
            found.append(flag("add-qkv-bias"))
    if shape.qk_norm:
        found.append(flag("qk-layernorm"))
    if not decoder.tied:
        found.append(flag("untie-embeddings-and-output-weights"))
    if shape.window is not None and shape.window < sequence_length:
        found.append(flag("window-size", f"{shape.window - 1},0"))
    return found + (_expert_arguments(decoder, tp, ep) if decoder.sparse else [])


def _expert_arguments(decoder: Decoder, tp: int, ep: int) -> list[Flag]:
    experts = decoder.sparse[0]
    found = [
        flag("num-experts", experts.num_experts),
        flag("moe-router-topk", experts.experts_per_token),
        flag("moe-ffn-hidden-size", experts.intermediate),
        flag("moe-router-load-balancing-type", "aux_loss"),
        flag("moe-aux-loss-coeff", decoder.balance_weight),
        flag("moe-token-dispatcher-type", "alltoall"),
        flag("moe-grouped-gemm"),
        flag("expert-model-parallel-size", ep),
        flag("expert-tensor-parallel-size", tp if ep == 1 else 1),
    ]
    if len(decoder.sparse) < len(decoder.blocks):
        runs = itertools.groupby(bool(block.num_experts) for block in decoder.blocks)
        pattern = "+".join(f"[{int(sparse)}]*{len(list(run))}" for sparse, run in runs)
        found.append(flag("moe-layer-freq", f"({pattern})"))
    if experts.shared:
        found.append(flag("moe-shared-expert-intermediate-size", experts.shared))
    if experts.shared_gate:
        found.append(flag("moe-shared-expert-gate"))
    if not decoder.renormalised:
        found.append(flag("moe-router-pre-softmax"))
    return found
