"""Memory of one chip of a pipeline stage in training: weights, gradients, optimizer, activations, buffers,
reserve.

The accounting is that of mixed-precision Adam as the runtime keeps it, in bytes per parameter:

| precision | weights | gradients | optimizer |
|---|---|---|---|
| `fp32` | 4 | 4 | 8: two moments |
| `bf16` | 2: the copy that is multiplied | 4: fp32 | 12: fp32 parameters and two moments |

An outer optimizer (local steps) adds 8 to the optimizer: the fp32 parameters of the last average, and a
momentum. Activations are the tensors that autograd keeps (`plan.profile.layers`) for every micro-batch in
flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from isthmus.core.errors import PlanError
from isthmus.plan.memory.peak import HeldLayer, Load, held_layer, working_bytes
from isthmus.plan.profile.model_profile import LayerProfile, ModelProfile, Recompute, Sharding

Precision = Literal["bf16", "fp32"]

_COMPUTE_BYTES = {"bf16": 2, "fp32": 4}
_OPTIMIZER_BYTES = {"bf16": 12, "fp32": 8}
_GRADIENT_BYTES = 4
OUTER_BYTES = 8
"""Bytes per parameter of an outer optimizer: parameters as they were averaged last, and momentum, in fp32."""


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
    def allocated_bytes(self) -> float:
        """Largest number of bytes in use at one time: what torch counts as allocated."""
        return self.static_bytes + self.activations_bytes + self.buffers_bytes

    @property
    def total_bytes(self) -> float:
        """Largest number of bytes held from the device, the allocator's reserve included."""
        return self.allocated_bytes + self.reserve_bytes


def beside(one: StageMemory, other: StageMemory) -> StageMemory:
    """Return the memory of a chip that holds two pieces of the model and computes with one at a time.

    Micro-batches in flight are counted as those of the piece that keeps more.
    """
    return StageMemory(
        weights_bytes=one.weights_bytes + other.weights_bytes,
        gradients_bytes=one.gradients_bytes + other.gradients_bytes,
        optimizer_bytes=one.optimizer_bytes + other.optimizer_bytes,
        activations_bytes=max(one.activations_bytes, other.activations_bytes),
        buffers_bytes=max(one.buffers_bytes, other.buffers_bytes),
        reserve_bytes=one.reserve_bytes + other.reserve_bytes,
    )


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

    def dealt(self, stage: int, *, expert: bool = False) -> int:
        """Return over how many chips ZeRO `stage` deals out what it deals out: optimizer 1, gradients 2,
        weights 3.
        """
        if self.zero < stage:
            return 1
        return self.expert_dp if expert else self.dp * self.cp

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
    outer_optimizer: bool = False,
    imbalance: float = 0.0,
    reserve_fraction: float = 0.05,
) -> StageMemory:
    """Return what one chip of the stage of decoder layers `[first, last)` holds at its fullest.

    `in_flight` micro-batches wait for their backward pass at once. `recompute_layers` of the layers (all,
    without it) are recomputed as `recompute` says; the others keep everything. `imbalance` goes from 0
    (balanced experts) to 1 (all tokens at this chip's experts). `outer_optimizer` is held beside the other
    (local steps). `reserve_fraction` of the sum is lost in the allocator. Raises `PlanError` for an empty or
    unknown range of layers, or a degree below 1.
    """
    degrees = Degrees(tp=tp, cp=cp, ep=ep, dp=dp, sp=sp, zero=zero)
    each = _COMPUTE_BYTES[precision]
    load = Load(
        tokens=micro_batch_size * sequence_length / cp, sequence_length=sequence_length, precision_bytes=each
    )
    modes = _modes(profile, layers, recompute, recompute_layers)
    held = _held(profile, modes, layers, degrees, imbalance, load)
    shard = Sharding(tp=tp, sp=sp, ep=ep, etp=degrees.etp)
    static = _static(profile, held, degrees, shard, is_first, is_last, precision, outer_optimizer)
    if optimizer_on_host:
        static = replace(static, optimizer=0.0)
    kept = in_flight * _kept(profile, held, load, shard, is_first=is_first, is_last=is_last)
    buffers = working_bytes(profile, held, load, shard, is_first=is_first, is_last=is_last)
    if not optimizer_on_host:  # the update holds two tensors of the size it works on, and no activations
        largest = max(one.largest_gradient for one in held) / degrees.dealt(1)
        buffers = max(buffers, 2 * _GRADIENT_BYTES * largest - kept)
    if not (is_first and is_last):
        buffers += 2 * profile.boundary_bytes(load.tokens, each)
    if zero == 3:
        buffers += max(one.dense_parameters + one.expert_parameters for one in held) * each
    return StageMemory(
        weights_bytes=static.weights,
        gradients_bytes=static.gradients,
        optimizer_bytes=static.optimizer,
        activations_bytes=kept,
        buffers_bytes=buffers,
        reserve_bytes=reserve_fraction * (static.total + kept + buffers),
    )


def _modes(
    profile: ModelProfile, layers: tuple[int, int], recompute: Recompute, recompute_layers: int | None
) -> list[Recompute]:
    first, last = layers
    if not 0 <= first < last <= profile.num_layers:
        raise PlanError(
            f"no layers [{first}, {last}) in a model of {profile.num_layers}", hint="first < last <= layers"
        )
    again = last - first if recompute_layers is None else recompute_layers
    return [recompute if index < again else "none" for index in range(last - first)]


def _held(
    profile: ModelProfile,
    modes: Sequence[Recompute],
    layers: tuple[int, int],
    degrees: Degrees,
    imbalance: float,
    load: Load,
) -> list[HeldLayer]:
    """Return the cost of each layer of the stage; equal layers are computed once."""
    known: dict[tuple[int, Recompute], HeldLayer] = {}
    held = []
    for layer, mode in zip(profile.layers[slice(*layers)], modes, strict=True):
        key = (id(layer), mode)
        if key not in known:
            known[key] = held_layer(layer, mode, degrees.sharding(layer, imbalance), load)
        held.append(known[key])
    return held


@dataclass(frozen=True, kw_only=True)
class _Static:
    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


def _static(
    profile: ModelProfile,
    held: Sequence[HeldLayer],
    degrees: Degrees,
    shard: Sharding,
    is_first: bool,
    is_last: bool,
    precision: Precision,
    outer: bool,
) -> _Static:
    """Return what is held through the iteration; ZeRO deals it out over the chips that hold the same."""
    ends = [profile.embedding] if is_first else []
    ends += [profile.final_norm, profile.head] if is_last else []
    if is_last and profile.tied_embeddings and not is_first:
        ends.append(profile.embedding)  # the copy that serves as head
    dense = sum(one.dense_parameters for one in held) + sum(part.on_chip(shard) for part in ends)
    experts = sum(one.expert_parameters for one in held)

    def dealt(bytes_each: int, stage: int) -> float:
        return bytes_each * (dense / degrees.dealt(stage) + experts / degrees.dealt(stage, expert=True))

    return _Static(
        weights=dealt(_COMPUTE_BYTES[precision], 3),
        gradients=dealt(_GRADIENT_BYTES, 2),
        optimizer=dealt(_OPTIMIZER_BYTES[precision] + OUTER_BYTES * outer, 1),
    )


def _kept(
    profile: ModelProfile,
    held: Sequence[HeldLayer],
    load: Load,
    shard: Sharding,
    *,
    is_first: bool,
    is_last: bool,
) -> float:
    """Return what the stage keeps for one micro-batch: layers, rotary tables, ends, and what crosses its
    borders.
    """
    sizes = (load.tokens, load.sequence_length, load.precision_bytes)
    kept = sum(one.kept_bytes for one in held)
    positions = load.tokens if load.tokens < load.sequence_length else load.sequence_length
    kept += profile.position_width * load.precision_bytes * positions
    ends = [profile.embedding] if is_first else []
    ends += [profile.final_norm, profile.head] if is_last else []
    kept += sum(part.activation_bytes(*sizes, shard=shard) for part in ends)
    crossing = profile.boundary_bytes(load.tokens, load.precision_bytes)
    if not is_last:
        kept += crossing
    if (
        not is_first and load.precision_bytes < 4
    ):  # in fp32 the received tensor is the one the first norm keeps
        kept += crossing
    return kept
