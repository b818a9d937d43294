"""From a plan to what the simulator runs: a load per stage, a schedule per replica, a wire per link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from isthmus.core.errors import InputError, PlanError
from isthmus.core.link_physics import effective_bytes_per_s
from isthmus.core.plan import Plan, Stage, StageTime
from isthmus.core.pool import NodeGroup, Pool
from isthmus.plan.memory.stage_memory import Degrees, StageMemory, beside, stage_memory
from isthmus.plan.profile.component import Recompute
from isthmus.plan.profile.model_profile import ModelProfile
from isthmus.plan.time.calibration import Calibration
from isthmus.plan.time.collectives import all_gather_s, all_reduce_bytes_per_s, send_s
from isthmus.plan.time.stage_time import (
    GRADIENT_BYTES,
    Batch,
    Host,
    PassTime,
    host_update_s,
    stage_pass,
    update_s,
)
from isthmus.schedule import Schedule, check_schedule, make_schedule
from isthmus.sim import Interference, StageLoad, Wire, wire_of
from isthmus.sim.pipeline.warm_up import best_warm_up


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """One stage of one replica: what it takes and what it keeps, per chip.

    Its gradients are reduced every step with those of `reducing` replicas, its own among them.
    """

    stage: Stage
    host: Host
    time: PassTime
    load: StageLoad
    memory: StageMemory
    in_flight_limit: int
    reducing: int


def group_of(pool: Pool, stage: Stage) -> NodeGroup:
    """Return the node group of a stage; raise `InputError` for a cluster or group the pool does not have."""
    known = {cluster.name: cluster for cluster in pool.clusters}
    if stage.cluster not in known:
        raise InputError(f"the pool has no cluster '{stage.cluster}'", hint="it has " + ", ".join(known))
    groups = {group.name: group for group in known[stage.cluster].node_groups}
    if stage.node_group not in groups:
        raise InputError(
            f"cluster '{stage.cluster}' has no node group '{stage.node_group}'",
            hint="it has " + ", ".join(groups),
        )
    return groups[stage.node_group]


def stage_costs(
    plan: Plan, pool: Pool, profile: ModelProfile, calibration: Calibration, replica: int = 0
) -> tuple[StageCost, ...]:
    """Return the cost of every stage of a replica.

    Raises `PlanError` where the plan does not cut the model's layers, `InputError` for unknown places.
    """
    if plan.num_layers != profile.num_layers:
        raise PlanError(
            f"the plan cuts {plan.num_layers} layers, the model has {profile.num_layers}",
            hint="the last stage must end at the model's last layer",
        )
    stages = plan.pipeline(replica)
    return tuple(_cost(plan, pool, profile, calibration, stages, index) for index in range(len(stages)))


def _cost(
    plan: Plan,
    pool: Pool,
    profile: ModelProfile,
    calibration: Calibration,
    stages: Sequence[Stage],
    index: int,
) -> StageCost:
    stage = stages[index]
    group = group_of(pool, stage)
    host = Host.of(group, pool.chip(group), calibration)
    batch = batch_of(plan, stage.replica)
    degrees = _degrees(plan, stage)
    time = stage_pass(
        profile, stage.layers, host, batch, degrees,
        recompute=stage.recompute, recompute_layers=stage.recompute_layers,
        experts_hidden=plan.schedule == "dualpipe",
    )  # fmt: skip
    return _with_load(plan, profile, stages, index, _Placed(host, batch, degrees, time))


def _degrees(plan: Plan, stage: Stage) -> Degrees:
    dp = replicas_reducing(plan, stage.replica)
    return Degrees(tp=stage.tp, cp=stage.cp, ep=stage.ep, dp=dp, sp=stage.sp, zero=plan.zero)


def replicas_reducing(plan: Plan, replica: int) -> int:
    """Return how many replicas reduce gradients with `replica` every step: all, or those of its group."""
    if plan.local_steps == 1:
        return plan.dp
    return plan.replica_groups.count(plan.replica_groups[replica])


@dataclass(frozen=True)
class _Placed:
    host: Host
    batch: Batch
    degrees: Degrees
    time: PassTime


def _with_load(
    plan: Plan, profile: ModelProfile, stages: Sequence[Stage], index: int, placed: _Placed
) -> StageCost:
    stage, host, degrees = stages[index], placed.host, placed.degrees
    memory = _memory(plan, profile, stages, index, in_flight=1)
    parameters = memory.weights_bytes / memory_bytes(plan)
    if plan.zero == 3:
        parameters *= degrees.dealt(3)
    dealt = degrees.dealt(1)
    boundary = profile.boundary_bytes(
        placed.batch.micro_batch_size * plan.sequence_length, placed.batch.precision_bytes
    )
    dp = degrees.dp
    near = 2 * stage.num_chips * dp <= host.topology.chips_per_node
    rate = all_reduce_bytes_per_s(host.topology, max(2, dp), stage.num_chips)
    load = StageLoad(
        cluster=stage.cluster,
        forward_s=placed.time.forward_s + _gathered_s(degrees, host, memory, placed.time.forward_s),
        backward_s=placed.time.backward_s + _gathered_s(degrees, host, memory, placed.time.backward_s),
        update_s=host.rates.step_s + _update_s(plan, host, parameters / dealt, placed.batch.precision_bytes),
        boundary_bytes=boundary,
        hop_s=send_s(host.topology, boundary / stage.num_chips, same_node=near),
        static_bytes=memory.static_bytes + memory.buffers_bytes + memory.reserve_bytes,
        activation_bytes=memory.activations_bytes,
        layers=stage.layers,
        gradient_bytes=stage.num_chips * _shown_gradients(plan, dp, parameters, rate, placed.time.backward_s),
        averaged_bytes=stage.num_chips * parameters * GRADIENT_BYTES if plan.local_steps > 1 else 0.0,
        local_bytes_per_s=rate * stage.num_chips,
    )
    return StageCost(
        stage=stage,
        host=host,
        time=placed.time,
        load=load,
        memory=memory,
        in_flight_limit=_in_flight_limit(memory, host.chip.memory_bytes),
        reducing=dp,
    )


def _update_s(plan: Plan, host: Host, parameters: float, precision_bytes: int) -> float:
    if plan.optimizer_on_host:
        return host_update_s(parameters, precision_bytes)
    return update_s(host, parameters, precision_bytes)


def _shown_gradients(plan: Plan, dp: int, parameters: float, rate: float, backward_s: float) -> float:
    """Return the bytes of gradients per chip whose reduction takes time of its own.

    ZeRO reduces gradients and gathers weights of half their size. Reduced bucket by bucket, they hide behind
    the backward of the last micro-batch.
    """
    whole = parameters * GRADIENT_BYTES * (0.75 if plan.zero else 1.0)
    reduce_s = 2 * (dp - 1) / dp * whole / rate
    if not plan.overlap_gradients or dp < 2:
        return whole
    return whole * max(0.0, 1 - backward_s / reduce_s)


def _gathered_s(degrees: Degrees, host: Host, memory: StageMemory, pass_s: float) -> float:
    """Return the seconds of ZeRO 3's gathering of weights that the pass does not hide."""
    if degrees.zero < 3:
        return 0.0
    gathered_s = all_gather_s(host.topology, memory.weights_bytes * degrees.dp, degrees.dp)
    return max(0.0, gathered_s - pass_s)


def batch_of(plan: Plan, replica: int) -> Batch:
    """Return the micro-batch of one replica of a plan."""
    return Batch(
        micro_batch_size=plan.micro_batch_size_of(replica),
        sequence_length=plan.sequence_length,
        precision=plan.precision or "bf16",
    )


def memory_bytes(plan: Plan) -> int:
    """Return the bytes of a weight that is multiplied."""
    return 4 if plan.precision in ("fp32", "tf32") else 2


def _memory(
    plan: Plan, profile: ModelProfile, stages: Sequence[Stage], index: int, in_flight: int
) -> StageMemory:
    """Return the memory of a stage, of both copies that it holds in a bidirectional schedule."""
    own = _memory_of_copy(plan, profile, stages, index, index, in_flight)
    if plan.num_copies == 1:
        return own
    return beside(own, _memory_of_copy(plan, profile, stages, index, len(stages) - 1 - index, in_flight))


def _memory_of_copy(
    plan: Plan, profile: ModelProfile, stages: Sequence[Stage], place: int, index: int, in_flight: int
) -> StageMemory:
    """Return the memory of the layers of stage `index` where stage `place` is."""
    stage = stages[place].model_copy(update={"layers": stages[index].layers})
    return _memory_of(
        profile,
        stage.layers,
        (index == 0, index == len(stages) - 1),
        (plan.micro_batch_size_of(stage.replica), plan.sequence_length, in_flight),
        _degrees(plan, stage),
        "fp32" if memory_bytes(plan) == 4 else "bf16",
        (plan.local_steps > 1, plan.optimizer_on_host),
        (stage.recompute, stage.recompute_layers),
    )


@lru_cache(maxsize=4096)
def _memory_of(
    profile: ModelProfile,
    layers: tuple[int, int],
    ends: tuple[bool, bool],
    sizes: tuple[int, int, int],
    degrees: Degrees,
    precision: Literal["fp32", "bf16"],
    optimizer: tuple[bool, bool],
    recompute: tuple[Recompute, int | None],
) -> StageMemory:
    """Return the memory of a stage, `optimizer` being (an outer one beside it, on the host).

    It depends on no calibration, so fits ask for it many times over.
    """
    return stage_memory(
        profile, layers, is_first=ends[0], is_last=ends[1],
        micro_batch_size=sizes[0], sequence_length=sizes[1], in_flight=sizes[2], precision=precision,
        tp=degrees.tp, cp=degrees.cp, ep=degrees.ep, dp=degrees.dp, sp=degrees.sp, zero=degrees.zero,
        recompute=recompute[0], recompute_layers=recompute[1],
        outer_optimizer=optimizer[0], optimizer_on_host=optimizer[1],
    )  # fmt: skip


def distinct_replicas(plan: Plan) -> tuple[int, ...]:
    """Return for each replica the first one that is like it."""
    found: dict[tuple[object, ...], int] = {}
    pipelines: dict[int, list[Stage]] = {}
    for stage in plan.stages:
        pipelines.setdefault(stage.replica, []).append(stage)
    kinds = []
    for replica, stages in sorted(pipelines.items()):
        alike = [tuple(value for name, value in stage if name != "replica") for stage in stages]
        batches = plan.micro_batches_of(replica), plan.micro_batch_size_of(replica)
        kinds.append(found.setdefault((*batches, *alike), replica))
    return tuple(kinds)


def _in_flight_limit(memory: StageMemory, chip_bytes: int) -> int:
    """Return how many micro-batches fit at once beside what is always held, at least one.

    The allocator's reserve is not held back: it is freed before an allocation fails.
    """
    room = chip_bytes - memory.static_bytes - memory.buffers_bytes
    each = memory.activations_bytes
    return max(1, int(room / each)) if each > 0 else 1 << 20


def schedule_of(
    plan: Plan, costs: Sequence[StageCost], wires: dict[tuple[str, str], Wire], replica: int
) -> Schedule:
    """Return the checked schedule of a replica; an overlapped one warms up as memory allows and pays.

    Raises `PlanError` for an unknown schedule, or one that does not fit its stages.
    """
    count, micro_batches = len(costs), plan.micro_batches_of(replica)
    warm_up = plan.warm_up
    if plan.schedule == "overlapped" and not warm_up:
        warm_up = _warm_up(costs, wires, micro_batches)
    schedule = make_schedule(plan.schedule, count, micro_batches, warm_up=warm_up, num_chunks=plan.num_chunks)
    check_schedule(schedule)
    return schedule


def _warm_up(
    costs: Sequence[StageCost], wires: dict[tuple[str, str], Wire], micro_batches: int
) -> tuple[int, ...]:
    """Return the best warm-up within memory, and never less than 1F1B's."""
    times = [StageTime(forward_s=c.load.forward_s, backward_s=c.load.backward_s) for c in costs]
    between = {}
    for index in range(len(costs) - 1):
        a, b = costs[index].load.cluster, costs[index + 1].load.cluster
        if a != b:
            between[index, index + 1] = replace(wires[a, b], jitter_s=0.0, interference=None)
            between[index + 1, index] = replace(wires[b, a], jitter_s=0.0, interference=None)
    plain = [min(len(costs) - stage, micro_batches) for stage in range(len(costs))]
    limits = [
        max(least, min(c.in_flight_limit, micro_batches)) for least, c in zip(plain, costs, strict=True)
    ]
    return best_warm_up(times, between, costs[0].load.boundary_bytes, micro_batches, limits)[0]


def wires_of(
    plan: Plan,
    pool: Pool,
    calibration: Calibration,
    interference: dict[tuple[str, str], Interference] | None = None,
) -> dict[tuple[str, str], Wire]:
    """Return the wires of every pair of clusters the plan uses, at the rate the transport reaches.

    Raises `PlanError` where neighbouring stages are not joined, `InputError` for unknown places.
    """
    for stage in plan.stages:
        group_of(pool, stage)
    wires = {}
    for a in plan.clusters:
        for b in plan.clusters:
            link, back = pool.link(a, b), pool.link(b, a)
            if a == b or link is None:
                continue
            share = calibration.value("wan_share", f"{a}>{b}")
            wire = wire_of(link, back, (interference or {}).get((a, b)))
            rate = effective_bytes_per_s(link, back) * min(share, 1.0)
            delay_s = wire.delay_s + calibration.value("message_s", f"{a}>{b}")
            wires[a, b] = replace(wire, bytes_per_s=rate, delay_s=delay_s)
    for replica in range(plan.dp):
        for a, b in plan.hops(replica):
            for ends in ((a, b), (b, a)):
                if ends not in wires:
                    raise PlanError(f"no link from {ends[0]} to {ends[1]}", hint="the pool must join them")
    return wires
