"""Memory of one chip of a pipeline stage in training: weights, gradients, optimizer, activations, buffers,
reserve.

The accounting is that of mixed-precision Adam as the runtime keeps it, in bytes per parameter:

| precision | weights | gradients | optimizer |
|---|---|---|---|
| `fp32` | 4 | 4 | 8: two moments |
| `bf16` | 2: the copy that is multiplied | 4: fp32 | 12: fp32 parameters and two moments |

Activations are the tensors that autograd keeps (`isthmus.plan.layers`) for every micro-batch in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from isthmus.core.errors import PlanError
from isthmus.plan.profile import LayerProfile, ModelProfile, Recompute, Sharding

Precision = Literal["bf16", "fp32"]

_COMPUTE_BYTES = {"bf16": 2, "fp32": 4}
_OPTIMIZER_BYTES = {"bf16": 12, "fp32": 8}
_GRADIENT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes on one chip of a stage. `buffers_bytes` live only while a layer or the head is being computed."""

    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float
    buffers_bytes: float
    reserve_bytes: float

    @property
    def static_bytes(self) -> float:
        """Bytes held through the whole iteration."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def total_bytes(self) -> float:
        """Largest number of bytes held at one time."""
        return self.static_bytes + self.activations_bytes + self.buffers_bytes + self.reserve_bytes


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """How one stage is cut: tensor, context, expert and data parallelism; `etp` cuts each expert as `tp`
    does.

    Without expert parallelism (`ep` 1) experts are cut like everything else; with it they stay whole.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    sp: bool = False
    zero: Literal[0, 1, 2, 3] = 0

    def __post_init__(self) -> None:
        for name in ("tp", "cp", "ep", "dp"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} is {getattr(self, name)}", hint="a degree is at least 1")

    @property
    def etp(self) -> int:
        """Pieces each expert is cut into."""
        return self.tp if self.ep == 1 else 1

    @property
    def expert_dp(self) -> int:
        """Chips that hold the same experts."""
        return max(1, self.dp * self.cp * self.tp // (self.ep * self.etp))

    def sharding(self, layer: LayerProfile, imbalance: float = 0.0) -> Sharding:
        """Return how `layer` is cut, with routed tokens from balanced (`imbalance` 0) to worst (1).

        Balanced, as many routed tokens arrive as leave: `experts_per_token` per token. At worst every token
        of the `ep` chips goes to experts of this chip: min(experts_per_token, experts here) x ep.
        """
        part, routed = layer.feed_forward, None
        if part.num_experts:
            here = -(-part.num_experts // self.ep)
            worst = min(part.experts_per_token, here) * self.ep
            routed = part.experts_per_token + imbalance * (worst - part.experts_per_token)
        return Sharding(tp=self.tp, sp=self.sp, ep=self.ep, etp=self.etp, routed_per_token=routed)


def stage_memory(
    profile: ModelProfile,
    layers: tuple[int, int],
    *,
    is_first: bool,
    is_last: bool,
    micro_batch_size: int,
    sequence_length: int,
    in_flight: int,
    precision: Precision = "bf16",
    tp: int = 1,
    cp: int = 1,
    ep: int = 1,
    dp: int = 1,
    sp: bool = False,
    zero: Literal[0, 1, 2, 3] = 0,
    recompute: Recompute = "none",
    recompute_layers: int | None = None,
    optimizer_on_host: bool = False,
    imbalance: float = 0.0,
    reserve_fraction: float = 0.05,
) -> StageMemory:
    """Return what one chip of the stage of decoder layers `[first, last)` holds at its fullest.

    `in_flight` micro-batches wait for their backward pass at once. `recompute_layers` of the layers (all,
    without it) are recomputed as `recompute` says; the others keep everything. `imbalance` goes from 0
    (balanced experts) to 1 (all tokens at this chip's experts). `reserve_fraction` of the sum is lost in the
    allocator. Raises `PlanError` for an empty or unknown range of layers, or a degree below 1.
    """
    held = _held(profile, layers)
    degrees = Degrees(tp=tp, cp=cp, ep=ep, dp=dp, sp=sp, zero=zero)
    each = _COMPUTE_BYTES[precision]
    tokens = micro_batch_size * sequence_length / cp
    again = len(held) if recompute_layers is None else recompute_layers
    modes: list[Recompute] = [recompute if index < again else "none" for index in range(len(held))]

    weights, gradients, optimizer = _static(profile, held, degrees, is_first, is_last, precision)
    shards = [degrees.sharding(layer, imbalance) for layer in held]
    kept = sum(
        layer.activation_bytes(tokens, sequence_length, each, mode, shard)
        for layer, mode, shard in zip(held, modes, shards, strict=True)
    )
    kept += profile.position_width * each * sequence_length / cp
    ends = [profile.embedding] if is_first else []
    ends += [profile.final_norm, profile.head] if is_last else []
    kept += sum(part.activation_bytes(tokens, sequence_length, each, shard=shards[0]) for part in ends)
    buffers = _buffers(profile, held, modes, shards, tokens, sequence_length, each, zero, is_last=is_last)
    host = 0.0 if optimizer_on_host else optimizer
    subtotal = weights + gradients + host + in_flight * kept + buffers
    return StageMemory(
        weights_bytes=weights,
        gradients_bytes=gradients,
        optimizer_bytes=host,
        activations_bytes=in_flight * kept,
        buffers_bytes=buffers,
        reserve_bytes=reserve_fraction * subtotal,
    )


def _held(profile: ModelProfile, layers: tuple[int, int]) -> Sequence[LayerProfile]:
    first, last = layers
    if not 0 <= first < last <= profile.num_layers:
        raise PlanError(
            f"no layers [{first}, {last}) in a model of {profile.num_layers}", hint="first < last <= layers"
        )
    return profile.layers[first:last]


def _static(
    profile: ModelProfile,
    held: Sequence[LayerProfile],
    degrees: Degrees,
    is_first: bool,
    is_last: bool,
    precision: Precision,
) -> tuple[float, float, float]:
    """Return bytes of weights, gradients and optimizer; ZeRO deals them out over the chips that hold the
    same.
    """
    shard = degrees.sharding(held[0])
    parts = [part for layer in held for part in layer.components]
    parts += [profile.embedding] if is_first else []
    parts += [profile.final_norm, profile.head] if is_last else []
    if is_last and profile.tied_embeddings and not is_first:
        parts.append(profile.embedding)  # the copy that serves as head
    weights = [weight for part in parts for weight in part.weights]
    dense = sum(weight.on_chip(shard) for weight in weights if not weight.expert)
    experts = sum(weight.on_chip(shard) for weight in weights if weight.expert)

    def dealt(bytes_each: int, from_zero: int) -> float:
        if degrees.zero < from_zero:
            return bytes_each * (dense + experts)
        return bytes_each * (dense / (degrees.dp * degrees.cp) + experts / degrees.expert_dp)

    return (
        dealt(_COMPUTE_BYTES[precision], 3),
        dealt(_GRADIENT_BYTES, 2),
        dealt(_OPTIMIZER_BYTES[precision], 1),
    )


def _buffers(
    profile: ModelProfile,
    held: Sequence[LayerProfile],
    modes: Sequence[Recompute],
    shards: Sequence[Sharding],
    tokens: float,
    sequence_length: int,
    each: int,
    zero: int,
    *,
    is_last: bool,
) -> float:
    """Return the largest of what is alive only for a while: a recomputed layer, the head's logits."""
    rebuilt = 0.0
    for layer, mode, shard in zip(held, modes, shards, strict=True):
        if mode != "none":
            whole = layer.activation_bytes(tokens, sequence_length, each, "none", shard)
            left = layer.activation_bytes(tokens, sequence_length, each, mode, shard)
            rebuilt = max(rebuilt, whole - left)
    logits_each = each if each == 4 else each + 4
    logits = tokens * profile.vocab_size * logits_each / shards[0].tp if is_last else 0.0
    gathered = max(layer.on_chip(shards[0]) for layer in held) * each if zero == 3 else 0.0
    return max(rebuilt, logits) + gathered + 2 * profile.boundary_bytes(tokens, each)
