"""`stage_costs`: the time, memory and simulator load of every stage of a replica."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from isthmus.core.plan import Plan, Stage
from isthmus.core.plan_parts.tensor_formats import TensorFormats
from isthmus.core.pool import Pool
from isthmus.core.stack import Stack
from isthmus.plan.memory.memory_limit import device_bytes, memory_limit_bytes
from isthmus.plan.memory.plan_stage_memory import max_in_flight, plan_stage_memory, stage_degrees, weight_element_bytes
from isthmus.plan.memory.stage_degrees import StageDegrees
from isthmus.plan.memory.stage_memory import StageMemory, state_bytes
from isthmus.plan.profile.layer_profile import ModelProfile
from isthmus.plan.profile.planned_profile import planned_profile, stage_profile
from isthmus.plan.time.calibration import Calibration
from isthmus.plan.time.collectives import send_s
from isthmus.plan.time.replica_reduction import (
    ReplicaPlace,
    expert_places,
    hybrid_gather_s,
    hybrid_reduce_s,
    joined_topology,
    replicas_all_gather_s,
    replicas_all_reduce_bytes_per_s,
    sync_servers,
)
from isthmus.plan.time.stage_time import (
    GRADIENT_BYTES,
    ChipModel,
    MicroBatchShape,
    PassTime,
    host_link_bytes_per_s,
    host_update_s,
    stage_pass_time,
    update_s,
)
from isthmus.sim import StageLoad, SyncServers

_NO_FORMATS = TensorFormats()

EXCHANGE_SHARES = {"nccl": 0.15}
"""Part of a chip's multiprocessors that an exchange takes from the kernels that run beside it, by library.

NCCL's blocks share no multiprocessor: 16 of an A100's 108 on a node of eight network adapters (NVIDIA/nccl issue 689);
85 % were left to another kernel (issue 1432).
"""


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """The time and memory of one stage of one replica, per chip."""

    stage: Stage
    chip_model: ChipModel
    time: PassTime
    load: StageLoad
    """The stage's input to the simulator."""
    memory: StageMemory
    """Memory with one micro-batch in flight."""
    memory_limit_bytes: float
    """What the allocator may reserve on the chip."""
    device_bytes: int
    """Capacity of the chip that the limit starts from."""
    stack: Stack
    """The framework that the plan is for."""
    max_in_flight: int
    """Number of micro-batches in flight that fit in memory."""
    reducing: tuple[ReplicaPlace, ...]
    """Where the replicas of its cluster that reduce its gradients every step are, its own included."""

    @property
    def num_reducing(self) -> int:
        """Number of replicas of its cluster, its own included, that reduce its gradients every step."""
        return sum(place.count for place in self.reducing)

    def memory_uncertainty(self, memory: StageMemory) -> float:
        """Return the relative uncertainty of a peak: of the factor on activations, by their share, and of the rest."""
        calibration, share = self.chip_model.calibration, memory.activations_bytes / max(memory.allocated_bytes, 1.0)
        factor = calibration.relative_uncertainty("activation_memory", self.chip_model.chip.name)
        return math.hypot(share * factor, calibration.memory_residual)


def stage_costs(
    plan: Plan, pool: Pool, profile: ModelProfile, calibration: Calibration, replica: int = 0
) -> tuple[StageCost, ...]:
    """Return the cost of every stage of a replica, (num_stages,).

    Equal stages have equal costs, which are computed once. The plan must pass `require_possible`. Raises `InputError`
    for unknown clusters or node groups.
    """
    profile = planned_profile(profile, plan)
    stages, chip_models = plan.pipeline(replica), _ChipModels(pool, calibration)
    known: dict[tuple[object, ...], StageCost] = {}
    costs: list[StageCost] = []
    for index, stage in enumerate(stages):
        kind = _stage_kind(plan, profile, stages, index)
        like = known.get(kind)
        if like is None:
            cost = known[kind] = _stage_cost(plan, profile, chip_models, stages, index)
        else:
            cost = replace(like, stage=stage, load=replace(like.load, layers=stage.layers))
        costs.append(cost)
    return tuple(costs)


def _stage_kind(plan: Plan, profile: ModelProfile, stages: Sequence[Stage], index: int) -> tuple[object, ...]:
    """Return all that the cost of a stage depends on: its layers, degrees and place, its successor, its peers."""
    stage = stages[index]
    follower = stages[index + 1] if index + 1 < len(stages) else None
    return (
        profile.layers[slice(*stage.layers)],
        index == 0,
        (stage.cluster, stage.node_group, stage.tp, stage.cp, stage.cp_kind, stage.cp_rates, stage.ep, stage.sp),
        (stage.recompute, stage.recompute_layers, stage.recompute_modules, stage.offload, stage.precision),
        follower and (follower.cluster, follower.node_group, follower.num_chips),
        tuple(plan.reducing_replicas(stage).items()),
        expert_places(plan, stage),
        index if plan.num_model_copies > 1 else None,  # a mirror stage shares the chips
    )


class _ChipModels:
    """The chip models of a plan's node groups, each made once."""

    def __init__(self, pool: Pool, calibration: Calibration) -> None:
        self.pool, self._calibration = pool, calibration
        self._known: dict[tuple[str, str], ChipModel] = {}

    def of(self, cluster: str, node_group: str) -> ChipModel:
        """Return the chip model of a node group; raise `InputError` for an unknown one."""
        key = cluster, node_group
        if key not in self._known:
            group = self.pool.node_group(*key)
            self._known[key] = ChipModel.of(group, self.pool.chip(group), self._calibration)
        return self._known[key]


@dataclass(frozen=True, kw_only=True)
class _PlacedStage:
    """A stage on its chips: the chip model, its micro-batch, its degrees, the time of a pass and its memory."""

    stage: Stage
    chip_model: ChipModel
    micro_batch: MicroBatchShape
    degrees: StageDegrees
    time: PassTime
    memory: StageMemory
    reducing: tuple[ReplicaPlace, ...]
    servers: SyncServers
    next_stage: Stage | None
    next_chip_model: ChipModel


def _stage_cost(
    plan: Plan, profile: ModelProfile, chip_models: _ChipModels, stages: Sequence[Stage], index: int
) -> StageCost:
    stage = stages[index]
    chip_model = chip_models.of(stage.cluster, stage.node_group)
    if len(shared := expert_places(plan, stage)) > 1:
        known = [(chip_models.of(stage.cluster, name).topology, count) for name, count in shared]
        chip_model = replace(chip_model, expert_topology=joined_topology(known))
    micro_batch = MicroBatchShape(
        micro_batch_size=plan.micro_batch_size_of(stage.replica),
        sequence_length=plan.sequence_length,
        precision=plan.precision or "bf16",
        packed_tokens=plan.packed_tokens,
    )
    degrees = stage_degrees(plan, stage)
    time = stage_pass_time(
        stage_profile(profile, stage), stage.layers, chip_model, micro_batch, degrees,
        recompute=stage.recompute, recompute_layers=stage.recompute_layers,
        overlap_experts=plan.schedule == "dualpipe",
    )  # fmt: skip
    memory = _fitted_memory(plan_stage_memory(plan, profile, stages, index), chip_model)
    follower = stages[index + 1] if index + 1 < len(stages) else None
    next_place = follower or stage
    reducing = _reducing_places(plan, chip_models, stage)
    num_sharing = sum(one.cluster == stage.cluster for one in stages)
    placed = _PlacedStage(
        stage=stage, chip_model=chip_model, micro_batch=micro_batch, degrees=degrees, time=time, memory=memory,
        reducing=reducing, servers=sync_servers(reducing, chip_models.pool.cluster(stage.cluster), num_sharing),
        next_stage=follower,
        next_chip_model=chip_models.of(next_place.cluster, next_place.node_group),
    )  # fmt: skip
    limit_bytes = _limit_bytes(chip_model, profile, degrees)
    return StageCost(
        stage=stage,
        chip_model=chip_model,
        time=time,
        load=_stage_load(plan, profile, placed),
        memory=memory,
        memory_limit_bytes=limit_bytes,
        device_bytes=device_bytes(chip_model.chip),
        stack=profile.stack,
        max_in_flight=max_in_flight(memory, limit_bytes),
        reducing=placed.reducing,
    )


def _reducing_places(plan: Plan, chip_models: _ChipModels, stage: Stage) -> tuple[ReplicaPlace, ...]:
    """Return the node groups of the stage's cluster whose replicas reduce its gradients, its own first."""
    return tuple(
        ReplicaPlace(
            topology=chip_models.of(stage.cluster, name).topology,
            count=count,
            num_chips=num_chips,
        )
        for name, (count, num_chips) in plan.reducing_replicas(stage).items()
    )


def _fitted_memory(memory: StageMemory, chip_model: ChipModel) -> StageMemory:
    """Return a stage's memory with the chip's factor on activations; the allocator's reserve keeps its proportion."""
    factor = chip_model.calibration.value("activation_memory", chip_model.chip.name)
    if factor == 1:
        return memory
    fitted = replace(memory, activations_bytes=memory.activations_bytes * factor)
    grown = fitted.allocated_bytes / memory.allocated_bytes
    return replace(fitted, reserve_bytes=memory.reserve_bytes * grown)


def _limit_bytes(chip_model: ChipModel, profile: ModelProfile, degrees: StageDegrees) -> float:
    """Return what a stage's allocator may reserve: less what was measured outside it, or what its stack keeps there."""
    chip_bytes = device_bytes(chip_model.chip)
    outside_bytes = chip_model.calibration.value("outside_memory_bytes", chip_model.chip.name)
    if outside_bytes:
        return max(0.0, chip_bytes - outside_bytes)
    return memory_limit_bytes(chip_bytes, profile.stack, degrees)


def _stage_load(plan: Plan, profile: ModelProfile, placed: _PlacedStage) -> StageLoad:
    """Return what the simulator takes of a stage: seconds and bytes over all of its chips, memory per chip."""
    stage, host, degrees, memory = placed.stage, placed.chip_model, placed.degrees, placed.memory
    each = weight_element_bytes(plan)
    parameters, trained = _num_parameters(plan, profile, placed, each)
    dealt, formats = degrees.zero_shards(1), plan.formats or _NO_FORMATS
    boundary = profile.boundary_bytes(
        placed.micro_batch.micro_batch_size * plan.sequence_length, placed.micro_batch.precision_bytes
    )
    rate = replicas_all_reduce_bytes_per_s(placed.reducing)
    reserved = memory.total_bytes / memory.allocated_bytes
    behind_s = placed.time.backward_s if plan.overlap_gradients or profile.stack.overlap_gradients else 0.0
    gathered_s = _gather_s(placed, parameters * (1.0 if formats.gathers == "fp8" else each))
    copy_s, copy_back_s = _copies_s(profile, placed, parameters)
    moved_s = _offload_s(stage, profile, placed)
    exposed_bytes, hidden_s = _gradient_reduction(plan, placed, trained, rate / stage.num_chips, behind_s)
    taken = EXCHANGE_SHARES.get(host.chip.collective_library, 0.0)
    return StageLoad(
        cluster=stage.cluster,
        forward_s=_with_offload_s(stage, beside_s(placed.time.forward_s + copy_s, gathered_s, taken), moved_s),
        backward_s=_with_offload_s(stage, beside_s(placed.time.backward_s + copy_back_s, gathered_s, taken), moved_s),
        update_s=host.rates.step_s
        + _update_s(plan, host, trained / dealt, placed.micro_batch.precision_bytes)
        + taken * hidden_s,
        boundary_bytes=boundary,
        hop_s=_hop_s(placed, boundary),
        static_bytes=reserved * (memory.static_bytes + memory.buffers_bytes),
        activation_bytes=reserved * memory.activations_bytes,
        layers=stage.layers,
        gradient_bytes=stage.num_chips * exposed_bytes,
        averaged_bytes=stage.num_chips * parameters * GRADIENT_BYTES if plan.local_steps > 1 else 0.0,
        local_bytes_per_s=rate,
        servers=placed.servers,
    )


def _hop_s(placed: _PlacedStage, boundary_bytes: float) -> float:
    """Return the seconds of a micro-batch's message to the next stage, if that is in the same cluster.

    Stages of one node group share a node where both, in all replicas, fit into one. Unlike node groups are joined
    by the nodes' network.
    """
    stage, topology, follower = placed.stage, placed.chip_model.topology, placed.next_stage or placed.stage
    if follower.node_group == stage.node_group or follower.cluster != stage.cluster:
        near = 2 * stage.num_chips * placed.degrees.dp <= topology.chips_per_node
        return send_s(topology, boundary_bytes / stage.num_chips, same_node=near)
    num_bytes = boundary_bytes / min(stage.num_chips, follower.num_chips)
    return send_s(topology, num_bytes, same_node=False, target=placed.next_chip_model.topology)


def _update_s(plan: Plan, chip_model: ChipModel, parameters: float, precision_bytes: int) -> float:
    if plan.optimizer_on_host:
        return host_update_s(chip_model.chip, parameters, precision_bytes)
    return update_s(chip_model, parameters, precision_bytes)


def _num_parameters(plan: Plan, profile: ModelProfile, placed: _PlacedStage, weight_bytes: int) -> tuple[float, float]:
    """Return the parameters of a stage on a chip before sharding, and those that have a gradient."""
    each, degrees = state_bytes(profile, "fp32" if weight_bytes == 4 else "bf16"), placed.degrees
    held_bytes = placed.memory.weights_bytes * degrees.zero_shards(3)
    if plan.lora is None:
        return held_bytes / each.weights, held_bytes / each.weights
    trained = placed.memory.gradients_bytes / (each.gradients or GRADIENT_BYTES) * degrees.zero_shards(2)
    return trained + (held_bytes - trained * each.weights) / weight_bytes, trained


def beside_s(pass_s: float, exchange_s: float, taken: float) -> float:
    """Return the seconds of a pass beside an exchange that takes a part of the multiprocessors while it runs."""
    return max(exchange_s, pass_s + taken * exchange_s)


def _gradient_reduction(
    plan: Plan, placed: _PlacedStage, parameters: float, bytes_per_s: float, behind_s: float
) -> tuple[float, float]:
    """Return the bytes of gradients per chip whose reduction is exposed, and the seconds of that which overlaps.

    ZeRO 1 and 2 reduce-scatter gradients and gather weights, together as many bytes as an all-reduce of their mean;
    ZeRO 3 gathers weights in each pass instead, unless they stay gathered. With bucketed reduction they overlap the
    backward of the last micro-batch (`behind_s`). Groups of replicas that shard among themselves (HSDP) take the
    seconds of their own collectives.
    """
    formats, dp = plan.formats or _NO_FORMATS, placed.degrees.dp
    gradient = 2 if formats.gradients == "bf16" else GRADIENT_BYTES
    weight = 1 if formats.gathers == "fp8" else weight_element_bytes(plan)
    in_passes = plan.zero == 3 and placed.degrees.reshard
    whole = parameters * (0.5 * (gradient + weight * (not in_passes)) if plan.zero else gradient)
    if dp < 2:
        return whole, 0.0
    if plan.zero and placed.degrees.sharding_dp < dp:
        gathers = 0.0 if in_passes else parameters * weight
        reduce_s = hybrid_reduce_s(
            placed.reducing, placed.degrees.sharding_dp, placed.stage.num_chips * parameters * gradient,
            placed.stage.num_chips * gathers,
        )  # fmt: skip
        whole = reduce_s * bytes_per_s * dp / (2 * (dp - 1))
    reduce_s = 2 * (dp - 1) / dp * whole / bytes_per_s
    return (whole * max(0.0, 1 - behind_s / reduce_s) if reduce_s else 0.0), min(reduce_s, behind_s)


def _offload_s(stage: Stage, profile: ModelProfile, placed: _PlacedStage) -> float:
    """Return the seconds in which the activations of a micro-batch that a stage moves cross the link to the host."""
    if stage.offload is None:
        return 0.0
    count = stage.offload.num_layers(stage.num_layers)
    own = stage_profile(profile, stage)
    recomputed = stage.num_layers if stage.recompute_layers is None else stage.recompute_layers
    share = placed.micro_batch.per_chip(placed.degrees)
    moved = 0.0
    for index, layer in enumerate(own.layers[slice(*stage.layers)][:count]):
        mode = stage.recompute if index < recomputed else "none"
        sizes = (share.tokens, share.sequence_length, share.precision_bytes)
        moved += layer.activation_bytes(*sizes, mode, placed.degrees.sharding(layer))
    return moved / host_link_bytes_per_s(placed.chip_model.chip)


def _with_offload_s(stage: Stage, pass_s: float, moved_s: float) -> float:
    """Return the seconds of a pass whose activations move beside it, or after it."""
    overlaps = stage.offload is not None and stage.offload.overlap
    return max(pass_s, moved_s) if overlaps else pass_s + moved_s


def _copies_s(profile: ModelProfile, placed: _PlacedStage, parameters: float) -> tuple[float, float]:
    """Return the seconds of copies between buffers of ZeRO 3's exchanges in a forward and a backward pass.

    Weights that stay gathered over the micro-batches of a pipeline are copied once a step, which does not count.
    """
    degrees, rule, host = placed.degrees, profile.stack.gathered, placed.chip_model
    pipeline = placed.stage.num_layers < profile.num_layers
    if degrees.zero < 3 or not degrees.reshard or degrees.zero_shards(3) < 2:
        return 0.0, 0.0
    if rule.whole_stage_with_pipeline and pipeline:
        return 0.0, 0.0
    each_s = parameters / (host.chip.memory_bandwidth_bytes_per_s * host.rates.memory_share)
    return each_s * rule.forward_copy_bytes, each_s * rule.backward_copy_bytes


def _gather_s(placed: _PlacedStage, num_bytes: float) -> float:
    """Return the seconds of ZeRO 3's all-gather of a stage's weights, `num_bytes` per chip, which a pass hides."""
    degrees = placed.degrees
    if degrees.zero < 3 or not degrees.reshard:
        return 0.0
    if degrees.sharding_dp < degrees.dp:
        return hybrid_gather_s(placed.reducing, degrees.sharding_dp, num_bytes * placed.stage.num_chips)
    return replicas_all_gather_s(placed.reducing, num_bytes * placed.stage.num_chips)
