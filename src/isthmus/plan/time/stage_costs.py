"""`stage_costs`: the time, memory and simulator load of every stage of a replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.core.errors import PlanError
from isthmus.core.plan import Plan, Stage
from isthmus.core.pool import Pool
from isthmus.plan.memory.plan_stage_memory import max_in_flight, plan_stage_memory, stage_degrees, weight_element_bytes
from isthmus.plan.memory.stage_memory import StageDegrees, StageMemory
from isthmus.plan.profile.model_profile import ModelProfile
from isthmus.plan.time.calibration import Calibration
from isthmus.plan.time.collectives import all_gather_s, all_reduce_bytes_per_s, send_s
from isthmus.plan.time.stage_time import (
    GRADIENT_BYTES,
    ChipModel,
    MicroBatchShape,
    PassTime,
    host_update_s,
    stage_pass_time,
    update_s,
)
from isthmus.sim import StageLoad


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
    max_in_flight: int
    """Number of micro-batches in flight that fit in memory."""
    num_reducing: int
    """Number of replicas, its own included, that reduce its gradients every step."""


def stage_costs(
    plan: Plan, pool: Pool, profile: ModelProfile, calibration: Calibration, replica: int = 0
) -> tuple[StageCost, ...]:
    """Return the cost of every stage of a replica, (num_stages,).

    Raises `PlanError` if plan and model differ in layers, or a stage has more expert-parallel ranks than experts;
    `InputError` for unknown clusters or node groups.
    """
    if plan.num_layers != profile.num_layers:
        raise PlanError(
            f"the plan has {plan.num_layers} layers, the model {profile.num_layers}",
            hint="the last stage must end at the model's last layer",
        )
    stages = plan.pipeline(replica)
    experts = max(1, *(layer.feed_forward.num_experts for layer in profile.layers))
    for index, stage in enumerate(stages):
        if stage.ep > experts:
            raise PlanError(
                f"stage {index} has ep {stage.ep} for {experts} experts in a layer", hint=f"nearest valid: ep {experts}"
            )
    return tuple(_stage_cost(plan, pool, profile, calibration, stages, index) for index in range(len(stages)))


@dataclass(frozen=True, kw_only=True)
class _PlacedStage:
    """A stage on its chips: the chip model, its micro-batch, its degrees, the time of a pass and its memory."""

    stage: Stage
    chip_model: ChipModel
    micro_batch: MicroBatchShape
    degrees: StageDegrees
    time: PassTime
    memory: StageMemory


def _stage_cost(
    plan: Plan,
    pool: Pool,
    profile: ModelProfile,
    calibration: Calibration,
    stages: Sequence[Stage],
    index: int,
) -> StageCost:
    stage = stages[index]
    group = pool.node_group(stage.cluster, stage.node_group)
    chip_model = ChipModel.of(group, pool.chip(group), calibration)
    micro_batch = MicroBatchShape(
        micro_batch_size=plan.micro_batch_size_of(stage.replica),
        sequence_length=plan.sequence_length,
        precision=plan.precision or "bf16",
    )
    degrees = stage_degrees(plan, stage)
    time = stage_pass_time(
        profile, stage.layers, chip_model, micro_batch, degrees,
        recompute=stage.recompute, recompute_layers=stage.recompute_layers,
        overlap_experts=plan.schedule == "dualpipe",
    )  # fmt: skip
    memory = plan_stage_memory(plan, profile, stages, index)
    placed = _PlacedStage(
        stage=stage, chip_model=chip_model, micro_batch=micro_batch, degrees=degrees, time=time, memory=memory
    )
    return StageCost(
        stage=stage,
        chip_model=chip_model,
        time=time,
        load=_stage_load(plan, profile, placed),
        memory=memory,
        max_in_flight=max_in_flight(memory, chip_model.chip.memory_bytes),
        num_reducing=degrees.dp,
    )


def _stage_load(plan: Plan, profile: ModelProfile, placed: _PlacedStage) -> StageLoad:
    """Return what the simulator takes of a stage: seconds and bytes over all of its chips, memory per chip."""
    stage, host, degrees, memory = placed.stage, placed.chip_model, placed.degrees, placed.memory
    parameters = memory.weights_bytes / weight_element_bytes(plan)
    if plan.zero == 3:
        parameters *= degrees.zero_shards(3)
    dealt = degrees.zero_shards(1)
    boundary = profile.boundary_bytes(
        placed.micro_batch.micro_batch_size * plan.sequence_length, placed.micro_batch.precision_bytes
    )
    dp = degrees.dp
    near = 2 * stage.num_chips * dp <= host.topology.chips_per_node
    rate = all_reduce_bytes_per_s(host.topology, max(2, dp), stage.num_chips)
    return StageLoad(
        cluster=stage.cluster,
        forward_s=placed.time.forward_s + _exposed_gather_s(degrees, host, memory, placed.time.forward_s),
        backward_s=placed.time.backward_s + _exposed_gather_s(degrees, host, memory, placed.time.backward_s),
        update_s=host.rates.step_s + _update_s(plan, host, parameters / dealt, placed.micro_batch.precision_bytes),
        boundary_bytes=boundary,
        hop_s=send_s(host.topology, boundary / stage.num_chips, same_node=near),
        static_bytes=memory.static_bytes + memory.buffers_bytes + memory.reserve_bytes,
        activation_bytes=memory.activations_bytes,
        layers=stage.layers,
        gradient_bytes=stage.num_chips * _exposed_gradient_bytes(plan, dp, parameters, rate, placed.time.backward_s),
        averaged_bytes=stage.num_chips * parameters * GRADIENT_BYTES if plan.local_steps > 1 else 0.0,
        local_bytes_per_s=rate * stage.num_chips,
    )


def _update_s(plan: Plan, chip_model: ChipModel, parameters: float, precision_bytes: int) -> float:
    if plan.optimizer_on_host:
        return host_update_s(parameters, precision_bytes)
    return update_s(chip_model, parameters, precision_bytes)


def _exposed_gradient_bytes(plan: Plan, dp: int, parameters: float, bytes_per_s: float, backward_s: float) -> float:
    """Return the bytes of gradients per chip whose reduction is exposed, that is, not overlapped.

    ZeRO reduces gradients and gathers weights of half their size. With bucketed reduction they overlap the
    backward of the last micro-batch.
    """
    whole = parameters * GRADIENT_BYTES * (0.75 if plan.zero else 1.0)
    reduce_s = 2 * (dp - 1) / dp * whole / bytes_per_s
    if not plan.overlap_gradients or dp < 2:
        return whole
    return whole * max(0.0, 1 - backward_s / reduce_s)


def _exposed_gather_s(degrees: StageDegrees, chip_model: ChipModel, memory: StageMemory, pass_s: float) -> float:
    """Return the exposed seconds of ZeRO 3's weight all-gather in a pass."""
    if degrees.zero < 3:
        return 0.0
    gathered_s = all_gather_s(chip_model.topology, memory.weights_bytes * degrees.dp, degrees.dp)
    return max(0.0, gathered_s - pass_s)
