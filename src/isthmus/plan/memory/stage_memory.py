"""`stage_memory`: the peak memory of one chip of a pipeline stage in training.

The profile's stack says how many bytes per parameter a chip keeps (mixed-precision Adam of this project's runtime: 2
for the compute copy, 4 for gradients in fp32, 12 for parameters and two moments in fp32). An outer optimizer (local
steps) adds 8: the fp32 parameters of the last average, and a momentum. Activations are the tensors that the stack
keeps (`isthmus.plan.profile`) for every micro-batch in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from isthmus.core.errors import PlanError
from isthmus.core.plan_parts.activation_offload import ActivationOffload
from isthmus.core.stack import StateBytes
from isthmus.plan.memory.backward_peak import (
    LayerMemory,
    MicroBatchLoad,
    layer_memory,
    stranded_bytes,
    working_bytes,
)
from isthmus.plan.memory.exchange_buffers import exchange_buffer_bytes
from isthmus.plan.memory.stage_degrees import StageDegrees
from isthmus.plan.profile.component import Component, Recompute, Sharding
from isthmus.plan.profile.layer_profile import ModelProfile

TrainingPrecision = Literal["bf16", "fp32"]

COMPUTE_BYTES = {"bf16": 2, "fp32": 4}
"""Bytes per parameter of the weights that compute uses."""
_GRADIENT_BYTES = 4
OUTER_OPTIMIZER_BYTES = 8
"""Bytes per parameter of an outer optimizer: the last averaged parameters and a momentum, in fp32."""


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Peak bytes on one chip of a stage."""

    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float
    """Activations saved for all micro-batches in flight."""
    buffers_bytes: float
    """Tensors live only while a layer or the head is computed, and message buffers."""
    reserve_bytes: float
    """Memory lost at least to fragmentation in the allocator."""
    stranded_bytes: float = 0.0
    """Memory that the allocator reserves in holes while there is room, and gives back when there is none."""

    @property
    def static_bytes(self) -> float:
        """Bytes held throughout the iteration."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def allocated_bytes(self) -> float:
        """Peak bytes in use, as torch counts allocated memory."""
        return self.static_bytes + self.activations_bytes + self.buffers_bytes

    @property
    def total_bytes(self) -> float:
        """Peak bytes that the allocator needs at least: those in use and what fragments lose."""
        return self.allocated_bytes + self.reserve_bytes

    def as_dict(self) -> dict[str, float]:
        """Return the bytes by kind, and their sums."""
        names = ("weights", "gradients", "optimizer", "activations", "buffers", "reserve")
        kinds = {name: float(getattr(self, f"{name}_bytes")) for name in names}
        return {**kinds, "allocated": self.allocated_bytes, "needed": self.total_bytes}

    def with_in_flight(self, micro_batches: int) -> StageMemory:
        """Return the memory with this many micro-batches in flight; this memory has one."""
        share = self.reserve_bytes / self.allocated_bytes if self.allocated_bytes else 0.0
        one = replace(self, activations_bytes=micro_batches * self.activations_bytes)
        return replace(one, reserve_bytes=share * one.allocated_bytes)


def combine_copies(one: StageMemory, other: StageMemory) -> StageMemory:
    """Return the memory of a chip that holds two parts of the model and computes with one at a time.

    All micro-batches in flight count as those of the part with more activations.
    """
    return StageMemory(
        weights_bytes=one.weights_bytes + other.weights_bytes,
        gradients_bytes=one.gradients_bytes + other.gradients_bytes,
        optimizer_bytes=one.optimizer_bytes + other.optimizer_bytes,
        activations_bytes=max(one.activations_bytes, other.activations_bytes),
        buffers_bytes=max(one.buffers_bytes, other.buffers_bytes),
        reserve_bytes=one.reserve_bytes + other.reserve_bytes,
        stranded_bytes=max(one.stranded_bytes, other.stranded_bytes),
    )


def stage_memory(
    profile: ModelProfile,
    layers: tuple[int, int],
    *,
    is_first: bool,
    is_last: bool,
    micro_batch_size: int,
    sequence_length: int,
    in_flight: int,
    precision: TrainingPrecision = "bf16",
    tp: int = 1,
    cp: int = 1,
    ep: int = 1,
    dp: int = 1,
    sp: bool = False,
    zero: Literal[0, 1, 2, 3] = 0,
    degrees: StageDegrees | None = None,
    offload: ActivationOffload | None = None,
    recompute: Recompute = "none",
    recompute_layers: int | None = None,
    optimizer_on_host: bool = False,
    outer_optimizer: bool = False,
    reference_model: bool = False,
    imbalance: float = 0.0,
    reserve_fraction: float | None = None,
    gradient_share: float = 1.0,
) -> StageMemory:
    """Return the peak memory of one chip of the stage of decoder layers `[first, last)`.

    `in_flight` micro-batches hold activations at the peak. `recompute` applies to `recompute_layers` of the
    layers (default all); the others save all activations. `imbalance` ranges from 0 (balanced experts) to 1
    (all tokens at this chip's experts). `outer_optimizer` is held in addition (local steps), and so is a
    frozen copy of the weights (`reference_model`), sharded as they are. `degrees` replaces `tp` to
    `zero`; `offload` leaves the activations of two layers at a time on the chip, one that is copied and one that is
    used. `gradient_share` of the layers have gradients at a time that are not reduced before the last micro-batch.
    `reserve_fraction` of the sum is lost in the allocator (default: the stack's). Raises `PlanError` for an empty
    or unknown range of layers, or a degree below 1.
    """
    # Step 1: the memory of each layer and the static memory of the stage.
    degrees = degrees or StageDegrees(tp=tp, cp=cp, ep=ep, dp=dp, sp=sp, zero=zero)
    tp, ep, sp, zero = degrees.tp, degrees.ep, degrees.sp, degrees.zero
    each = COMPUTE_BYTES[precision]
    load = MicroBatchLoad(
        tokens=micro_batch_size * sequence_length / degrees.sequence_parts, sequence_length=sequence_length,
        precision_bytes=each,
        fused_weight_gradients=profile.stack.fused_weight_gradients,
    )  # fmt: skip
    modes = _layer_recompute(profile, layers, recompute, recompute_layers)
    held = _layer_memories(profile, modes, layers, degrees, imbalance, load)
    shard = Sharding(tp=tp, sp=sp, ep=ep, etp=degrees.etp)
    static = _static_bytes(profile, held, degrees, shard, is_first, is_last, precision, outer_optimizer)
    if reference_model:
        copy_bytes = _reference_bytes(profile, held, degrees, shard, is_first, is_last, precision)
        static = replace(static, weights_bytes=static.weights_bytes + copy_bytes)
    if optimizer_on_host:
        static = replace(static, optimizer_bytes=0.0)
    # Step 2: activations, and the peak of the backward pass above them.
    kept = in_flight * _activation_bytes(profile, held, load, shard, is_first=is_first, is_last=is_last)
    buffers = working_bytes(profile, held, load, shard, is_first=is_first, is_last=is_last)
    buffers += max(exchange_buffer_bytes(layer, degrees, load) for layer in set(profile.layers[slice(*layers)]))
    if offload is not None:
        moved = [one.activation_bytes for one in held[: offload.num_layers(len(held))]]
        kept -= in_flight * sum(moved)
        buffers += sum(sorted(moved)[-2:])
    # Step 3: buffers of the update, of messages and of gathered weights (ZeRO 3).
    if not optimizer_on_host:  # the update holds two tensors of the largest gradient's size, and no activations
        largest = max(one.largest_gradient_elements for one in held) / degrees.zero_shards(1)
        buffers = max(buffers, 2 * _GRADIENT_BYTES * largest - kept)
    if not (is_first and is_last):
        buffers += 2 * profile.boundary_bytes(load.tokens, each)
    if zero == 2:
        buffers += _unreduced_bytes(profile, held)
    if zero == 3:
        whole = not degrees.reshard
        buffers += _gathered_bytes(
            profile, held, shard, each, is_first=is_first, is_last=is_last, whole=whole, gradient_share=gradient_share
        )
    if zero:
        buffers += profile.stack.buffer_bytes
    reserve = profile.stack.allocator.least_share if reserve_fraction is None else reserve_fraction
    return StageMemory(
        weights_bytes=static.weights_bytes,
        gradients_bytes=static.gradients_bytes,
        optimizer_bytes=static.optimizer_bytes,
        activations_bytes=kept,
        buffers_bytes=buffers,
        reserve_bytes=reserve * (static.total_bytes + kept + buffers),
        stranded_bytes=stranded_bytes(profile, load, shard) if is_last else 0.0,
    )


def _gathered_bytes(
    profile: ModelProfile,
    held: Sequence[LayerMemory],
    shard: Sharding,
    compute_bytes: int,
    *,
    is_first: bool,
    is_last: bool,
    whole: bool,
    gradient_share: float,
) -> float:
    """Return the bytes of weights that ZeRO 3 has gathered at the peak, and of gradients that are not yet reduced.

    `whole` keeps all of the stage gathered.
    """
    rule, each = profile.stack.gathered, profile.stack.gathered.element_bytes or compute_bytes
    sizes = [one.dense_parameters + one.expert_parameters for one in held]
    layers, pipeline = min(rule.layers, len(held)), not (is_first and is_last)
    keeps_stage = whole or (rule.whole_stage_with_pipeline and pipeline)
    if keeps_stage:
        layers = len(held)
    all_ends = is_first * profile.embedding.on_chip(shard) + is_last * profile.head.on_chip(shard)
    ends, weights = all_ends if rule.ends or whole else 0.0, float(layers * max(sizes))
    if rule.ends_in_turn:
        table, head = end_parameters(profile, shard)
        parts = [*[table] * is_first, *sizes, *[head] * is_last]
        twice = table if is_first and is_last and profile.tied_embeddings else 0
        ends, weights = 0.0, sum(parts) - twice if keeps_stage else most_in_turn(parts, rule.layers)
    gradients = _unreduced_bytes(profile, held)
    if pipeline:
        stage = all_ends + gradient_share * sum(one.dense_parameters + one.expert_parameters for one in held)
        gradients += rule.pipeline_gradient_bytes * stage
    return each * weights + max(each, 2) * ends + gradients


def _unreduced_bytes(profile: ModelProfile, held: Sequence[LayerMemory]) -> float:
    """Return the bytes of the gradients of a layer before they are reduced."""
    return profile.stack.gathered.gradient_bytes * max(one.dense_parameters + one.expert_parameters for one in held)


def end_parameters(profile: ModelProfile, shard: Sharding) -> tuple[int, int]:
    """Return the parameters on one chip of the embedding, and of norm and head; a tied head is the embedding."""
    table = profile.embedding.on_chip(shard)
    head = profile.embedding.weights[0].on_chip(shard) if profile.tied_embeddings else profile.head.on_chip(shard)
    return table, profile.final_norm.on_chip(shard) + head


def most_in_turn(sizes: Sequence[float], count: int) -> float:
    """Return the most parameters of `count` adjacent ones of `sizes`."""
    return max(sum(sizes[place : place + count]) for place in range(max(1, len(sizes) - count + 1)))


def _layer_recompute(
    profile: ModelProfile, layers: tuple[int, int], recompute: Recompute, recompute_layers: int | None
) -> list[Recompute]:
    first, last = layers
    if not 0 <= first < last <= profile.num_layers:
        raise PlanError(
            f"layers [{first}, {last}) of a model of {profile.num_layers}",
            hint="0 <= first < last <= number of layers is required",
        )
    recomputed = last - first if recompute_layers is None else recompute_layers
    return [recompute if index < recomputed else "none" for index in range(last - first)]


def _layer_memories(
    profile: ModelProfile,
    modes: Sequence[Recompute],
    layers: tuple[int, int],
    degrees: StageDegrees,
    imbalance: float,
    load: MicroBatchLoad,
) -> list[LayerMemory]:
    """Return the memory of each layer of the stage; equal layers are computed once."""
    known: dict[tuple[int, Recompute], LayerMemory] = {}
    held = []
    for layer, mode in zip(profile.layers[slice(*layers)], modes, strict=True):
        key = (id(layer), mode)
        if key not in known:
            known[key] = layer_memory(layer, mode, degrees.sharding(layer, imbalance), load)
        held.append(known[key])
    return held


def state_bytes(profile: ModelProfile, precision: TrainingPrecision) -> StateBytes:
    """Return the bytes per parameter of the profile's stack with this precision."""
    return profile.stack.state.of("fp8" if profile.narrow_bytes else precision, profile.narrow_bytes)


@dataclass(frozen=True, kw_only=True)
class _StaticBytes:
    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float

    @property
    def total_bytes(self) -> float:
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes


def _static_bytes(
    profile: ModelProfile,
    held: Sequence[LayerMemory],
    degrees: StageDegrees,
    shard: Sharding,
    is_first: bool,
    is_last: bool,
    precision: TrainingPrecision,
    outer: bool,
) -> _StaticBytes:
    """Return the bytes held throughout the iteration, sharded by ZeRO over the replicas of each tensor."""
    ends, dense, experts = _parameters(profile, held, shard, is_first, is_last)
    frozen = sum(one.frozen_dense_parameters for one in held)
    frozen += sum(weight.on_chip(shard) for part in ends for weight in part.weights if not weight.trainable)
    frozen_experts = sum(one.frozen_expert_parameters for one in held)

    def dealt(dense: float, experts: float, stage: int) -> float:
        return _dealt(degrees, dense, experts, stage)

    each, trained = state_bytes(profile, precision), (dense - frozen, experts - frozen_experts)
    return _StaticBytes(
        weights_bytes=each.weights * dealt(*trained, 3) + COMPUTE_BYTES[precision] * dealt(frozen, frozen_experts, 3),
        gradients_bytes=each.gradients * dealt(*trained, 2),
        optimizer_bytes=(each.optimizer + OUTER_OPTIMIZER_BYTES * outer) * dealt(*trained, 1),
    )


def _dealt(degrees: StageDegrees, dense: float, experts: float, stage: int) -> float:
    """Return the parameters that a chip keeps of what ZeRO `stage` shards."""
    return dense / degrees.zero_shards(stage) + experts / degrees.zero_shards(stage, expert=True)


def _reference_bytes(
    profile: ModelProfile, held: Sequence[LayerMemory], degrees: StageDegrees, shard: Sharding, is_first: bool,
    is_last: bool, precision: TrainingPrecision,
) -> float:  # fmt: skip
    """Return the bytes of a frozen copy of the weights, as wide as compute uses them."""
    _, dense, experts = _parameters(profile, held, shard, is_first, is_last)
    return COMPUTE_BYTES[precision] * _dealt(degrees, dense, experts, 3)


def _parameters(
    profile: ModelProfile, held: Sequence[LayerMemory], shard: Sharding, is_first: bool, is_last: bool
) -> tuple[list[Component], float, float]:
    """Return the parts before and after the layers, and the dense and expert parameters of the stage on a chip."""
    ends = [profile.embedding] if is_first else []
    ends += [profile.final_norm, profile.head] if is_last else []
    if is_last and profile.tied_embeddings and not is_first:
        table = replace(profile.embedding, weights=profile.embedding.weights[:1])
        ends.append(table)  # the tied head's copy
    dense = sum(one.dense_parameters for one in held) + sum(part.on_chip(shard) for part in ends)
    experts = sum(one.expert_parameters for one in held)
    return ends, dense, experts


def _activation_bytes(
    profile: ModelProfile,
    held: Sequence[LayerMemory],
    load: MicroBatchLoad,
    shard: Sharding,
    *,
    is_first: bool,
    is_last: bool,
) -> float:
    """Return the bytes of a micro-batch's activations: layers, rotary tables, ends and boundary tensors."""
    sizes = (load.tokens, load.sequence_length, load.precision_bytes)
    kept = sum(one.activation_bytes for one in held)
    positions = load.tokens if load.tokens < load.sequence_length else load.sequence_length
    kept += profile.position_width * load.precision_bytes * positions
    ends = [profile.embedding] if is_first else []
    ends += [profile.final_norm] if is_last else []
    kept += sum(part.activation_bytes(*sizes, shard=shard) for part in ends)
    kept += profile.head_kept_bytes(sizes, shard) if is_last else 0.0
    if not profile.stack.keeps_stage_tensors:
        return kept
    crossing = profile.boundary_bytes(load.tokens, load.precision_bytes)
    if not is_last:
        kept += crossing
    if not is_first and load.precision_bytes < 4:  # in fp32 the first norm saves the received tensor itself
        kept += crossing
    return kept
