"""The time of a pipeline stage: the roofline of its work on a chip, its collectives, and host launches.

A pass takes the sum over kinds of work, each at its achieved share of the chip's peak, plus exposed
collectives, combined by `smooth_max` with the host's launch time. The bytes of a matrix product's operands
add to its time, which slows small products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from isthmus.core.chip import NARROW_PRECISIONS, AttentionRate, Chip, Precision
from isthmus.core.pool import NodeGroup
from isthmus.core.stack import Stack
from isthmus.plan.memory.stage_degrees import StageDegrees
from isthmus.plan.profile.component import Recompute
from isthmus.plan.profile.layer_profile import LayerProfile, ModelProfile
from isthmus.plan.profile.mean_places import Routing
from isthmus.plan.time.calibration import Calibration, ChipRates, smooth_max
from isthmus.plan.time.chip_rates import ANY_KERNEL
from isthmus.plan.time.collectives import (
    Topology,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    node_all_to_all_s,
    ring_pass_s,
)
from isthmus.plan.time.layer_exchanges import ChipMicroBatch, CollectiveCall
from isthmus.plan.time.stage_work import (
    ChipWork,
    embedding_work,
    head_work,
    layer_work,
)
from isthmus.plan.time.time_model_parameters import shape_scope, vocabulary_scope

BACKWARD_LAUNCHES = 1.5
"""Kernel launches of a backward pass over those of the forward pass."""

UPDATE_BYTES = {2: 36, 4: 28}
"""Bytes that Adam reads and writes per parameter, by the bytes of a compute element."""

GRADIENT_BYTES = 4
"""Bytes of a gradient element."""

HOST_LINK_BYTES_PER_S = 25.1e9
"""Rate between a chip that states none and its host: of an A100 over PCIe 4.0 x16 (NVIDIA/nvbandwidth issue 42)."""

HOST_MEMORY_BYTES_PER_S = 25e9
"""Assumed host memory bandwidth per chip: 200 GB/s shared by eight."""

_COLLECTIVES: dict[str, Callable[[Topology, float, int, int], float]] = {
    "all_reduce": all_reduce_s,
    "all_gather": all_gather_s,
    "all_to_all": all_to_all_s,
    "ring": ring_pass_s,
}


@dataclass(frozen=True, kw_only=True)
class ChipModel:
    """The model of a stage's chips: chip, achieved rates, topology and calibration."""

    chip: Chip
    rates: ChipRates
    topology: Topology
    calibration: Calibration
    expert_topology: Topology | None = None
    """What joins the chips that share experts, if they are in unlike node groups; None: `topology`."""

    def call_s(self, call: CollectiveCall) -> float:
        """Return the seconds of all calls of a collective over the links that join its chips."""
        joined = self.expert_topology if call.num_experts else None
        return collective_call_s(joined or self.topology, call)

    @cached_property
    def attention_rates(self) -> dict[str, AttentionRate]:
        """Rates of attention kernels that the chip states."""
        return {one.kernel: one for one in self.chip.sustained.attention} if self.chip.sustained else {}

    def shape_factor(self, layer: LayerProfile, micro_batch: ChipMicroBatch) -> float:
        """Return the factor on the time of a layer of this shape, 1 if it was not measured."""
        scope = shape_scope(self.chip.name, layer.hidden_size, micro_batch.tokens, micro_batch.degrees.tp)
        return self.calibration.value("shape_time", scope)

    def end_factor(self, name: str, profile: ModelProfile, micro_batch: ChipMicroBatch) -> float:
        """Return the factor `embedding_time` or `head_time`, 1 if not measured or with tensor parallelism."""
        if micro_batch.degrees.tp > 1:
            return 1.0
        scope = vocabulary_scope(self.chip.name, profile.hidden_size, micro_batch.tokens, profile.vocab_size)
        return self.calibration.value(name, scope)

    def bias_of(self, stack: Stack) -> float:
        """Return the factor on the time of a pass that the chip's and the stack's bias make together."""
        return self.rates.bias_factor * self.calibration.value("stack_factor", stack.name)

    @classmethod
    def of(cls, group: NodeGroup, chip: Chip, calibration: Calibration) -> ChipModel:
        """Return the model of a node group's chips under a calibration; the network rate is per chip."""
        rates = ChipRates.of(calibration, chip.name)
        return cls(
            chip=chip,
            rates=rates,
            calibration=calibration,
            topology=Topology(
                chips_per_node=group.num_linked_chips,
                link_bytes_per_s=chip.in_node_link.bandwidth_bytes_per_s * rates.link_share,
                link_latency_s=rates.link_latency_s,
                network_bytes_per_s=group.network_gbps * 1e9 / 8 * rates.network_share,
                network_latency_s=rates.network_latency_s,
            ),
        )


@dataclass(frozen=True, kw_only=True)
class MicroBatchShape:
    """Shape of a micro-batch and precision of its matrix products; with 8 bits, attention uses 16."""

    micro_batch_size: int
    sequence_length: int
    precision: Precision
    packed_tokens: int | None = None
    """Tokens of a document, if several share a sequence."""

    @property
    def precision_bytes(self) -> int:
        """Bytes of an activation element; 8-bit products output 16 bits."""
        return 4 if self.precision in ("fp32", "tf32") else 8 if self.precision == "fp64" else 2

    def per_chip(self, degrees: StageDegrees) -> ChipMicroBatch:
        """Return the part of the micro-batch that one chip processes."""
        return ChipMicroBatch(
            tokens=self.micro_batch_size * self.sequence_length / degrees.sequence_parts,
            sequence_length=self.sequence_length,
            precision_bytes=self.precision_bytes,
            degrees=degrees,
            packed_tokens=self.packed_tokens,
        )


@dataclass(frozen=True, kw_only=True)
class PassTime:
    """Times of a forward and a backward of one micro-batch; the other fields are parts of their sum."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    matmul_s: float = 0.0
    attention_s: float = 0.0
    memory_s: float = 0.0
    exchange_s: float = 0.0

    def scaled(self, num_passes: float) -> PassTime:
        """Return the time of `num_passes` such passes."""
        if num_passes == 1:
            return self
        return PassTime(
            forward_s=self.forward_s * num_passes,
            backward_s=self.backward_s * num_passes,
            matmul_s=self.matmul_s * num_passes,
            attention_s=self.attention_s * num_passes,
            memory_s=self.memory_s * num_passes,
            exchange_s=self.exchange_s * num_passes,
        )

    def __add__(self, other: PassTime) -> PassTime:
        return PassTime(
            forward_s=self.forward_s + other.forward_s,
            backward_s=self.backward_s + other.backward_s,
            matmul_s=self.matmul_s + other.matmul_s,
            attention_s=self.attention_s + other.attention_s,
            memory_s=self.memory_s + other.memory_s,
            exchange_s=self.exchange_s + other.exchange_s,
        )


def collective_call_s(topology: Topology, call: CollectiveCall) -> float:
    """Return the seconds of all calls of a collective."""
    args = (topology, call.num_bytes, call.size, call.stride)
    if call.kind == "node_all_to_all":
        routing = Routing(
            experts=call.num_experts, chosen=call.experts_per_token, groups=call.routing_groups,
            chosen_groups=call.groups_per_token,
        )  # fmt: skip
        return call.num_calls * node_all_to_all_s(*args, routing)
    return call.num_calls * _COLLECTIVES[call.kind](*args)


def pass_time(
    chip_model: ChipModel,
    work: ChipWork,
    precision: Precision,
    recompute: Recompute = "none",
    *,
    overlap_experts: bool = False,
    backward_bytes: float | None = None,
) -> PassTime:
    """Return the times of the forward and the backward pass of `work`.

    `overlap_experts` overlaps the all-to-all of experts with the computation of another micro-batch, as
    DualPipe does. `backward_bytes` is the memory traffic of the backward pass (default: twice the forward's).
    """
    # Step 1: compute time by the roofline.
    rates, peak = chip_model.rates, chip_model.chip.flop_per_s(precision)
    wide: Precision = "bf16" if precision in NARROW_PRECISIONS else precision
    memory = chip_model.chip.memory_bandwidth_bytes_per_s * rates.memory_share
    sustained = chip_model.chip.sustained if work.attention_kernel != ANY_KERNEL else None
    peak *= sustained.matmul_ratio(precision, chip_model.chip) if sustained else 1.0
    peak /= rates.narrow_factor if precision in NARROW_PRECISIONS else 1.0
    matmul_s = work.matmul_flops / (peak * rates.matmul_share) + work.matmul_bytes / memory
    core_s = work.attention_flops / (chip_model.chip.flop_per_s(wide) * rates.attention_share)
    core_s *= rates.context_factor if work.shares_context else 1.0
    core_ratio = work.attention_backward_ratio
    kernel = chip_model.attention_rates.get(work.attention_kernel) if sustained else None
    if kernel:
        core_s *= kernel.time_factor(work.keys_per_query, work.elements_per_head)
        core_ratio *= kernel.forward_flop_per_s / kernel.backward_flop_per_s
    moved_s = work.moved_bytes / memory
    back_bytes = work.moved_back_bytes if backward_bytes is None else backward_bytes
    moved_back_s = 2 * moved_s if back_bytes is None else back_bytes / memory
    # Step 2: collectives: overlapped with another micro-batch, with weight gradients (backward), or exposed.
    exposed_s = overlapping_s = hidden_s = exposed_back_s = 0.0
    backward_core_s = core_ratio * core_s
    for one in work.collectives:
        seconds = chip_model.call_s(one)
        if one.behind == "other" or (one.num_experts and overlap_experts):
            hidden_s += seconds
        elif one.overlaps:
            overlapping_s += seconds
        else:
            exposed_s += seconds - hidden_part_s(one, seconds, matmul_s, core_s)
            back_s = seconds * one.backward_ratio
            hidden_back_s = hidden_part_s(one, back_s, 2 * matmul_s, backward_core_s) if one.behind_backward else 0.0
            exposed_back_s += back_s - hidden_back_s
    # Step 3: host launches, and the forward pass.
    launch_s = work.num_launches * rates.launch_s
    launch_s += sum(one.num_calls * (one.size - 1) for one in work.collectives) * rates.skew_s
    compute_s = matmul_s + core_s + moved_s
    forward_s = compute_s + exposed_s + overlapping_s
    forward_s = smooth_max(max(forward_s, hidden_s), launch_s)
    # Step 4: the backward pass, with recomputation.
    own_share = max(0.0, 1.0 - work.frozen_flops / work.matmul_flops) if work.matmul_flops else 1.0
    weight_s = rates.backward_overlap * own_share * work.overlapping_flops / (peak * rates.matmul_share)
    trained_share = 1.0 - work.frozen_flops / work.matmul_flops / 2 if work.matmul_flops else 1.0
    matmul_back_s = 2 * matmul_s * trained_share
    back_s = matmul_back_s + core_ratio * core_s + moved_back_s
    exchanged_s = exposed_back_s + max(0.0, overlapping_s - weight_s)
    selective_s = core_s * work.repeats_attention + work.repeated_flops / (peak * rates.matmul_share)
    selective_s += sum(chip_model.call_s(one) for one in work.repeated_collectives)
    selective_s += moved_s / 2 if work.repeated_bytes is None else work.repeated_bytes / memory
    recompute_s, recompute_launch_s = _recompute_s(
        recompute, compute_s, selective_s, exposed_s + overlapping_s, launch_s
    )
    backward_s = smooth_max(
        max(back_s + exchanged_s + recompute_s, hidden_s), BACKWARD_LAUNCHES * launch_s + recompute_launch_s
    )
    whole = 1 if recompute == "full" else 0
    return PassTime(
        forward_s=forward_s,
        backward_s=backward_s,
        matmul_s=(1 + whole) * matmul_s + matmul_back_s,
        attention_s=(1 + core_ratio + whole) * core_s,
        memory_s=(1 + whole) * moved_s + moved_back_s,
        exchange_s=(1 + whole) * (exposed_s + overlapping_s) + exchanged_s,
    )


def hidden_part_s(call: CollectiveCall, seconds: float, matmul_s: float, core_s: float) -> float:
    """Return how much of a collective's `seconds` what it runs beside hides.

    Products are cut into as many parts as there are chips, and all parts but the first compute while another is sent
    (S. Wang et al., Overlap Communication with Dependent Computation via Decomposition, ASPLOS 2023). A ring's step
    hides behind the core of the block that has arrived, 1 / cp of it, in all steps but the last.
    """
    room_s = {"products": matmul_s, "core": core_s}.get(call.behind, 0.0)
    return min(seconds, room_s * (call.size - 1) / call.size)


def _recompute_s(
    recompute: Recompute, compute_s: float, selective_s: float, exchanged_s: float, launch_s: float
) -> tuple[float, float]:
    """Return the seconds that recomputation adds to a backward pass, and the seconds of its launches."""
    if recompute == "full":
        return compute_s + exchanged_s, launch_s
    if recompute == "selective":
        return selective_s, launch_s / 4
    if recompute == "moe":
        return compute_s / 2, launch_s / 2
    return 0.0, 0.0


@lru_cache(maxsize=4096)
def _cached_layer_work(layer: LayerProfile, micro_batch: ChipMicroBatch) -> ChipWork:
    return layer_work(layer, micro_batch)


def stage_pass_time(
    profile: ModelProfile,
    layers: tuple[int, int],
    chip_model: ChipModel,
    micro_batch: MicroBatchShape,
    degrees: StageDegrees,
    *,
    recompute: Recompute = "none",
    recompute_layers: int | None = None,
    overlap_experts: bool = False,
) -> PassTime:
    """Return the times of one micro-batch on the stage of decoder layers `[first, last)`.

    The first stage holds the embedding, the last one the head. `recompute_layers` of the layers (default all)
    are recomputed.
    """
    share, (first, last) = micro_batch.per_chip(degrees), layers
    recomputed = last - first if recompute_layers is None else recompute_layers
    total = PassTime()
    for layer, mode, count in _group_equal_layers(profile, layers, recompute, recomputed):
        work = _cached_layer_work(layer, share)
        one = pass_time(chip_model, work, micro_batch.precision, mode, overlap_experts=overlap_experts)
        total = total + one.scaled(count * chip_model.shape_factor(layer, share))
    wide: Precision = "bf16" if micro_batch.precision in NARROW_PRECISIONS else micro_batch.precision
    if first == 0:
        time = embedding_pass_time(profile, chip_model, share, wide)
        total = total + time.scaled(chip_model.end_factor("embedding_time", profile, share))
    if last == profile.num_layers:
        total = total + head_pass_time(profile, chip_model, share, wide).scaled(
            chip_model.end_factor("head_time", profile, share)
        )
    return total.scaled(chip_model.bias_of(profile.stack))


def embedding_pass_time(
    profile: ModelProfile, chip_model: ChipModel, micro_batch: ChipMicroBatch, precision: Precision
) -> PassTime:
    """Return the times of one micro-batch in the embedding, by the roofline."""
    return pass_time(chip_model, embedding_work(profile, micro_batch), precision)


def head_pass_time(
    profile: ModelProfile, chip_model: ChipModel, micro_batch: ChipMicroBatch, precision: Precision
) -> PassTime:
    """Return the times of one micro-batch in final norm, head and loss, by the roofline.

    A loss by chunks repeats the head's product in the backward pass.
    """
    work = head_work(profile, micro_batch)
    loss = profile.stack.loss
    backward_bytes = work.moved_bytes * loss.backward_bytes / loss.forward_bytes
    chunked = profile.loss_chunk_tokens(micro_batch.tokens, micro_batch.degrees.tp) is not None
    return pass_time(chip_model, work, precision, "selective" if chunked else "none", backward_bytes=backward_bytes)


@lru_cache(maxsize=4096)
def _group_equal_layers(
    profile: ModelProfile, layers: tuple[int, int], recompute: Recompute, num_recomputed: int
) -> tuple[tuple[LayerProfile, Recompute, int], ...]:
    """Return (layer, recompute mode, count) of equal layers of `[first, last)`; equal layers are one object."""
    counted: dict[tuple[int, Recompute], tuple[LayerProfile, int]] = {}
    for index, layer in enumerate(profile.layers[slice(*layers)]):
        key = id(layer), recompute if index < num_recomputed else "none"
        counted[key] = layer, counted.get(key, (layer, 0))[1] + 1
    return tuple((layer, mode, count) for (_, mode), (layer, count) in counted.items())


def update_s(chip_model: ChipModel, parameters: float, precision_bytes: int) -> float:
    """Return the seconds of an optimizer step over `parameters` elements on one chip."""
    moved = parameters * UPDATE_BYTES.get(precision_bytes, 28)
    rate = chip_model.chip.memory_bandwidth_bytes_per_s * chip_model.rates.memory_share
    return moved / rate * chip_model.rates.update_time


def host_link_bytes_per_s(chip: Chip) -> float:
    """Return the rate of copies between a chip and its host, each way: measured, or that of PCIe 4.0 x16."""
    return (chip.sustained and chip.sustained.host_bytes_per_s) or HOST_LINK_BYTES_PER_S


def host_update_s(chip: Chip, parameters: float, precision_bytes: int) -> float:
    """Return the seconds of an optimizer step in host memory over one chip's `parameters`.

    Gradients (fp32) go to the host, weights of `precision_bytes` come back, without overlap.
    """
    crossing = parameters * (GRADIENT_BYTES + precision_bytes)
    moved = parameters * UPDATE_BYTES.get(precision_bytes, 28)
    return crossing / host_link_bytes_per_s(chip) + moved / HOST_MEMORY_BYTES_PER_S
