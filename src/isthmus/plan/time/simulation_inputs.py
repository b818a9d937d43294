"""Simulator inputs of a plan: the load of each stage, the schedule of each replica, the simulated links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from isthmus.core.errors import InputError, PlanError
from isthmus.core.link_throughput import effective_bytes_per_s
from isthmus.core.plan import Plan, Stage, StageTime
from isthmus.core.pool import NodeGroup, Pool
from isthmus.plan.memory.stage_memory import StageDegrees, StageMemory, combine_copies, stage_memory
from isthmus.plan.profile.component import Recompute
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
from isthmus.schedule import Schedule, check_schedule, make_schedule
from isthmus.sim import Interference, SimulatedLink, StageLoad, simulated_link
from isthmus.sim.pipeline.warm_up import best_warm_up


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


def node_group_of(pool: Pool, stage: Stage) -> NodeGroup:
    """Return the node group of a stage; raise `InputError` for an unknown cluster or group."""
    known = {cluster.name: cluster for cluster in pool.clusters}
    if stage.cluster not in known:
        raise InputError(f"the pool has no cluster '{stage.cluster}'", hint="available: " + ", ".join(known))
    groups = {group.name: group for group in known[stage.cluster].node_groups}
    if stage.node_group not in groups:
        raise InputError(
            f"cluster '{stage.cluster}' has no node group '{stage.node_group}'",
            hint="available: " + ", ".join(groups),
        )
    return groups[stage.node_group]


def stage_costs(
    plan: Plan, pool: Pool, profile: ModelProfile, calibration: Calibration, replica: int = 0
) -> tuple[StageCost, ...]:
    """Return the cost of every stage of a replica.

    Raises `PlanError` if plan and model differ in layers, `InputError` for unknown clusters or node groups.
    """
    if plan.num_layers != profile.num_layers:
        raise PlanError(
            f"the plan has {plan.num_layers} layers, the model {profile.num_layers}",
            hint="the last stage must end at the model's last layer",
        )
    stages = plan.pipeline(replica)
    return tuple(_stage_cost(plan, pool, profile, calibration, stages, index) for index in range(len(stages)))


def _stage_cost(
    plan: Plan,
    pool: Pool,
    profile: ModelProfile,
    calibration: Calibration,
    stages: Sequence[Stage],
    index: int,
) -> StageCost:
    stage = stages[index]
    group = node_group_of(pool, stage)
    host = ChipModel.of(group, pool.chip(group), calibration)
    batch = micro_batch_shape(plan, stage.replica)
    degrees = _degrees(plan, stage)
    time = stage_pass_time(
        profile, stage.layers, host, batch, degrees,
        recompute=stage.recompute, recompute_layers=stage.recompute_layers,
        overlap_experts=plan.schedule == "dualpipe",
    )  # fmt: skip
    return _with_load(plan, profile, stages, index, _PlacedStage(host, batch, degrees, time))


def _degrees(plan: Plan, stage: Stage) -> StageDegrees:
    dp = num_reducing_replicas(plan, stage.replica)
    return StageDegrees(tp=stage.tp, cp=stage.cp, ep=stage.ep, dp=dp, sp=stage.sp, zero=plan.zero)


def num_reducing_replicas(plan: Plan, replica: int) -> int:
    """Return how many replicas reduce gradients with `replica` (included) every step: all, or its group."""
    if plan.local_steps == 1:
        return plan.dp
    return plan.replica_groups.count(plan.replica_groups[replica])


@dataclass(frozen=True)
class _PlacedStage:
    """A stage on its chips: the chip model, its micro-batch, its degrees and the time of a pass."""

    chip_model: ChipModel
    micro_batch: MicroBatchShape
    degrees: StageDegrees
    time: PassTime


def _with_load(
    plan: Plan, profile: ModelProfile, stages: Sequence[Stage], index: int, placed: _PlacedStage
) -> StageCost:
    stage, host, degrees = stages[index], placed.chip_model, placed.degrees
    memory = _memory_of_stage(plan, profile, stages, index, in_flight=1)
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
    load = StageLoad(
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
    return StageCost(
        stage=stage,
        chip_model=host,
        time=placed.time,
        load=load,
        memory=memory,
        max_in_flight=_max_in_flight(memory, host.chip.memory_bytes),
        num_reducing=dp,
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


def micro_batch_shape(plan: Plan, replica: int) -> MicroBatchShape:
    """Return the shape of the micro-batches of a replica."""
    return MicroBatchShape(
        micro_batch_size=plan.micro_batch_size_of(replica),
        sequence_length=plan.sequence_length,
        precision=plan.precision or "bf16",
    )


def weight_element_bytes(plan: Plan) -> int:
    """Return the bytes per element of the weights that compute uses."""
    return 4 if plan.precision in ("fp32", "tf32") else 2


def _memory_of_stage(
    plan: Plan, profile: ModelProfile, stages: Sequence[Stage], index: int, in_flight: int
) -> StageMemory:
    """Return the memory of a stage, with both of its copies in a bidirectional schedule."""
    own = _memory_of_copy(plan, profile, stages, index, index, in_flight)
    if plan.num_model_copies == 1:
        return own
    return combine_copies(own, _memory_of_copy(plan, profile, stages, index, len(stages) - 1 - index, in_flight))


def _memory_of_copy(
    plan: Plan, profile: ModelProfile, stages: Sequence[Stage], place: int, index: int, in_flight: int
) -> StageMemory:
    """Return the memory of the layers of stage `index` on the chips of stage `place`."""
    stage = stages[place].model_copy(update={"layers": stages[index].layers})
    return _cached_stage_memory(
        profile,
        stage.layers,
        (index == 0, index == len(stages) - 1),
        (plan.micro_batch_size_of(stage.replica), plan.sequence_length, in_flight),
        _degrees(plan, stage),
        "fp32" if weight_element_bytes(plan) == 4 else "bf16",
        (plan.local_steps > 1, plan.optimizer_on_host),
        (stage.recompute, stage.recompute_layers),
    )


@lru_cache(maxsize=4096)
def _cached_stage_memory(
    profile: ModelProfile,
    layers: tuple[int, int],
    ends: tuple[bool, bool],
    sizes: tuple[int, int, int],
    degrees: StageDegrees,
    precision: Literal["fp32", "bf16"],
    optimizer: tuple[bool, bool],
    recompute: tuple[Recompute, int | None],
) -> StageMemory:
    """Return the memory of a stage; `optimizer` is (has an outer optimizer, is on the host).

    It is cached, because it is independent of the calibration and fits request it repeatedly.
    """
    return stage_memory(
        profile, layers, is_first=ends[0], is_last=ends[1],
        micro_batch_size=sizes[0], sequence_length=sizes[1], in_flight=sizes[2], precision=precision,
        tp=degrees.tp, cp=degrees.cp, ep=degrees.ep, dp=degrees.dp, sp=degrees.sp, zero=degrees.zero,
        recompute=recompute[0], recompute_layers=recompute[1],
        outer_optimizer=optimizer[0], optimizer_on_host=optimizer[1],
    )  # fmt: skip


def first_equal_replicas(plan: Plan) -> tuple[int, ...]:
    """Return the first equal replica of each replica, (dp,)."""
    first_of: dict[tuple[object, ...], int] = {}
    pipelines: dict[int, list[Stage]] = {}
    for stage in plan.stages:
        pipelines.setdefault(stage.replica, []).append(stage)
    first_equal = []
    for replica, stages in sorted(pipelines.items()):
        content = [tuple(value for name, value in stage if name != "replica") for stage in stages]
        batches = plan.micro_batches_of(replica), plan.micro_batch_size_of(replica)
        first_equal.append(first_of.setdefault((*batches, *content), replica))
    return tuple(first_equal)


def _max_in_flight(memory: StageMemory, chip_bytes: int) -> int:
    """Return how many micro-batches in flight fit next to static memory and buffers, at least one.

    The allocator's reserve counts as free: it is released before an allocation fails.
    """
    free_bytes = chip_bytes - memory.static_bytes - memory.buffers_bytes
    each_bytes = memory.activations_bytes
    return max(1, int(free_bytes / each_bytes)) if each_bytes > 0 else 1 << 20


def replica_schedule(
    plan: Plan, costs: Sequence[StageCost], links: dict[tuple[str, str], SimulatedLink], replica: int
) -> Schedule:
    """Return the checked schedule of a replica; `overlapped` gets the fastest warm-up within memory.

    Raises `PlanError` for a schedule that is unknown or does not fit the stages.
    """
    count, micro_batches = len(costs), plan.micro_batches_of(replica)
    warm_up = plan.warm_up
    if plan.schedule == "overlapped" and not warm_up:
        warm_up = _best_warm_up(costs, links, micro_batches)
    schedule = make_schedule(plan.schedule, count, micro_batches, warm_up=warm_up, num_chunks=plan.num_chunks)
    check_schedule(schedule)
    return schedule


def _best_warm_up(
    costs: Sequence[StageCost], links: dict[tuple[str, str], SimulatedLink], micro_batches: int
) -> tuple[int, ...]:
    """Return the fastest warm-up within memory, where 1F1B's always counts as fitting."""
    times = [StageTime(forward_s=c.load.forward_s, backward_s=c.load.backward_s) for c in costs]
    between = {}
    for index in range(len(costs) - 1):
        a, b = costs[index].load.cluster, costs[index + 1].load.cluster
        if a != b:
            between[index, index + 1] = replace(links[a, b], jitter_s=0.0, interference=None)
            between[index + 1, index] = replace(links[b, a], jitter_s=0.0, interference=None)
    plain = [min(len(costs) - stage, micro_batches) for stage in range(len(costs))]
    limits = [max(least, min(c.max_in_flight, micro_batches)) for least, c in zip(plain, costs, strict=True)]
    return best_warm_up(times, between, costs[0].load.boundary_bytes, micro_batches, limits)[0]


def simulated_links(
    plan: Plan,
    pool: Pool,
    calibration: Calibration,
    interference: dict[tuple[str, str], Interference] | None = None,
) -> dict[tuple[str, str], SimulatedLink]:
    """Return the simulated links between all clusters of the plan, at the rate that the transport reaches.

    Raises `PlanError` if neighbouring stages have no link, `InputError` for unknown clusters or node groups.
    """
    for stage in plan.stages:
        node_group_of(pool, stage)
    links = {}
    for a in plan.clusters:
        for b in plan.clusters:
            link, back = pool.link(a, b), pool.link(b, a)
            if a == b or link is None:
                continue
            share = calibration.value("wan_share", f"{a}>{b}")
            simulated = simulated_link(link, back, (interference or {}).get((a, b)))
            rate = effective_bytes_per_s(link, back) * min(share, 1.0)
            delay_s = simulated.delay_s + calibration.value("message_s", f"{a}>{b}")
            links[a, b] = replace(simulated, bytes_per_s=rate, delay_s=delay_s)
    for replica in range(plan.dp):
        for a, b in plan.hops(replica):
            for ends in ((a, b), (b, a)):
                if ends not in links:
                    raise PlanError(f"no link from {ends[0]} to {ends[1]}", hint="add the link to the pool")
    return links
