"""`write_plan`: a layout as a `Plan`; `add_prediction` adds the simulated prediction and its explanation."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from isthmus.core.job import Job, TrainingConfig
from isthmus.core.plan import Plan, Prediction, Stage, StageTime
from isthmus.core.pool import Pool
from isthmus.core.units import format_seconds
from isthmus.plan.memory.stage_memory import OUTER_OPTIMIZER_BYTES
from isthmus.plan.search.compose.plan_layout import PlacedPipeline, PlanLayout
from isthmus.plan.search.costs.stage_cost_table import StageCostTable, TimedStage
from isthmus.plan.search.costs.workload import TrainingWorkload
from isthmus.plan.search.finish.plan_energy import plan_energy_j
from isthmus.plan.time.model_flops import mfu_fraction
from isthmus.plan.time.predict import host_update_note
from isthmus.schedule import check_schedule, make_schedule, warm_up_counts
from isthmus.sim import SimulationResult


@dataclass(frozen=True)
class ScoredPlan:
    """A layout, its plan and its simulation result."""

    layout: PlanLayout
    plan: Plan
    result: SimulationResult
    pool: Pool

    @property
    def time_s(self) -> float:
        """Simulated seconds of an iteration."""
        return self.result.iteration_s

    @property
    def cost(self) -> float:
        """Price of an iteration."""
        return self.layout.price_per_s * self.time_s

    @cached_property
    def energy_j(self) -> float:
        """Joules of an iteration: each chip at its power while it is busy, at its idle power while it waits."""
        return plan_energy_j(self.plan, self.pool, self.result)


def write_plan(layout: PlanLayout, job: Job, workload: TrainingWorkload, *, executable: bool) -> Plan:
    """Return the plan of a layout, without a prediction. Equal layouts get the same id."""
    stages: list[Stage] = []
    counts: list[int] = []
    for pipeline in layout.pipelines:
        pattern = list(_stages(pipeline))
        for count in pipeline.micro_batch_counts:
            replica = len(counts)
            counts.append(count)
            stages += [one.model_copy(update={"replica": replica}) for one in pattern]
    uneven = len(set(counts)) > 1
    return Plan(
        id=_plan_id(layout, stages),
        stages=tuple(stages),
        dp=len(counts),
        micro_batches=max(counts),
        micro_batch_size=layout.micro_batch_size,
        sequence_length=workload.sequence_length,
        schedule=layout.schedule,
        local_steps=layout.local_steps,
        zero=max(pipeline.shape.zero for pipeline in layout.pipelines),
        optimizer_on_host=workload.optimizer_on_host,
        reference_model=workload.reference_model,
        replica_micro_batches=tuple(counts) if uneven else (),
        replica_micro_batch_sizes=_replica_sizes(layout),
        warm_up=_warm_up(layout),
        precision=None if executable else job.training.precision,
        **({} if executable else _chosen_kernels(job.training)),
        model=None if executable else job.model,
        compute=job.compute,
        stack=job.stack,
    )


def _chosen_kernels(training: TrainingConfig) -> dict[str, Any]:
    """Return the kernels that differ from the defaults of a job."""
    fields = TrainingConfig.model_fields
    names = ("attention", "compile", "deterministic")
    return {name: one for name in names if (one := getattr(training, name)) != fields[name].default}


def _replica_sizes(layout: PlanLayout) -> tuple[int, ...]:
    """Return the micro-batch size of every replica, empty if all are equal."""
    if not layout.mixed_sizes:
        return ()
    return tuple(pipeline.shape.micro_batch_size for pipeline in layout.pipelines for _ in pipeline.micro_batch_counts)


def _stages(pipeline: PlacedPipeline) -> Sequence[Stage]:
    found = []
    for slot, cost_table, cut in zip(pipeline.shape.slots, pipeline.shape.cost_tables, pipeline.stages, strict=True):
        some = 0 < cut.recomputed < cut.last - cut.first
        found.append(
            Stage(
                cluster=slot.cluster,
                node_group=slot.group.name,
                layers=(cut.first, cut.last),
                tp=cost_table.degrees.tp,
                cp=cost_table.degrees.cp,
                ep=cost_table.degrees.ep,
                sp=cost_table.degrees.sp,
                recompute="full" if cut.recomputed else "none",
                recompute_layers=cut.recomputed if some else None,
            )
        )
    return found


def _warm_up(layout: PlanLayout) -> tuple[int, ...]:
    """Return the warm-up of an overlapped schedule, within the memory that was checked for the stages."""
    if layout.schedule != "overlapped":
        return ()
    pipeline = max(layout.pipelines, key=lambda one: one.end_s)
    shape, most = pipeline.shape, max(pipeline.micro_batch_counts)
    limits = [min(shape.max_in_flight(stage), most) for stage in range(shape.num_stages)]
    return warm_up_counts([cut.total_s for cut in pipeline.stages], shape.hops_s, most, limits)


def _plan_id(layout: PlanLayout, stages: Sequence[Stage]) -> str:
    """Return an id that is a hash of the plan's content."""
    text = ";".join(
        f"{s.cluster}/{s.node_group}/{s.layers}/{s.tp}/{s.cp}/{s.ep}/{s.recompute}/{s.recompute_layers}" for s in stages
    )
    counts = ",".join(str(count) for pipeline in layout.pipelines for count in pipeline.micro_batch_counts)
    text += f"|{layout.micro_batch_size}|{layout.schedule}|{counts}"
    text += f"|{_replica_sizes(layout)}" if layout.mixed_sizes else ""
    text += f"|{layout.local_steps} local steps" if layout.local_steps > 1 else ""
    return "plan-" + hashlib.sha256(text.encode()).hexdigest()[:8]


def add_prediction(scored: ScoredPlan, workload: TrainingWorkload, pool: Pool) -> Plan:
    """Return the plan on `pool` with its prediction and explanation."""
    plan, layout, run = scored.plan, scored.layout, scored.result
    cards = sum(
        pipeline.shape.dp * cost_table.num_chips / cost_table.chip.chips_per_card
        for pipeline in layout.pipelines
        for cost_table in pipeline.shape.cost_tables
    )
    placed = [
        (pipeline, cost_table, cut)
        for pipeline in layout.pipelines
        for _ in pipeline.micro_batch_counts
        for cost_table, cut in zip(pipeline.shape.cost_tables, pipeline.stages, strict=True)
    ]
    prediction = Prediction(
        iteration_s=run.iteration_s,
        tgs_tokens_per_card_s=plan.num_samples * plan.sequence_length / run.iteration_s / cards,
        samples_per_s=plan.num_samples / run.iteration_s,
        peak_memory_bytes=tuple(_peak_bytes(layout, plan)),
        wan_gbps=_wan_gbps(layout, run.iteration_s),
        cost_per_iteration=scored.cost,
        currency=pool.currency,
        mfu_fraction=mfu_fraction(plan, pool, workload.profile, workload.precision, run.iteration_s),
        stage_times=tuple(
            StageTime(
                forward_s=cut.forward_s,
                backward_s=cut.backward_s,
                update_s=_update_s(pipeline, cost_table, cut),
            )
            for pipeline, cost_table, cut in placed
        ),
        assumptions=_assumptions(layout, workload),
    )
    return plan.model_copy(update={"predicted": prediction, "why": explain_plan(scored)})


def _update_s(pipeline: PlacedPipeline, cost_table: StageCostTable, cut: TimedStage) -> float:
    """Return the seconds of a stage's gradient reduction inside its cluster and of its update."""
    return cost_table.reduce_and_update_s(
        cost_table.parameters(cut.first, cut.last), pipeline.shape.dp, pipeline.shape.zero
    )


def _peak_bytes(layout: PlanLayout, plan: Plan) -> Sequence[int]:
    """Return the peak bytes of every stage."""
    found: list[int] = []
    if plan.orders:
        return _searched_peak_bytes(layout, plan)
    for pipeline in layout.pipelines:
        shape, most = pipeline.shape, max(pipeline.micro_batch_counts)
        each = []
        for stage, (cost_table, cut) in enumerate(zip(shape.cost_tables, pipeline.stages, strict=True)):
            in_flight = min(shape.max_in_flight(stage), most)
            num_bytes = cost_table.stage_bytes(cut.first, cut.last, in_flight, cut.recomputed, shape.dp, shape.zero)
            each.append(round(num_bytes))
        found += each * len(pipeline.micro_batch_counts)
    return found


def _searched_peak_bytes(layout: PlanLayout, plan: Plan) -> Sequence[int]:
    """Return the peak bytes of every stage under the plan's own orders."""
    found: list[int] = []
    replica = 0
    for pipeline in layout.pipelines:
        shape = pipeline.shape
        for count in pipeline.micro_batch_counts:
            orders, replica = plan.orders_of(replica), replica + 1
            peaks = check_schedule(make_schedule(plan.schedule, shape.num_stages, count, orders=orders))
            found += [
                round(cost_table.stage_bytes(cut.first, cut.last, peak, cut.recomputed, shape.dp, shape.zero))
                for cost_table, cut, peak in zip(shape.cost_tables, pipeline.stages, peaks, strict=True)
            ]
    return found


def _wan_gbps(layout: PlanLayout, iteration_s: float) -> tuple[float, ...]:
    """Return the mean rate that each hop of each replica needs, in plan order."""
    found: list[float] = []
    for pipeline in layout.pipelines:
        hops = sum(1 for a, b in itertools.pairwise(pipeline.shape.segments) if a.slot.cluster != b.slot.cluster)
        for count in pipeline.micro_batch_counts:
            found += [count * pipeline.shape.message_bytes * 8 / 1e9 / iteration_s] * hops
    return tuple(found)


def _assumptions(layout: PlanLayout, workload: TrainingWorkload) -> tuple[str, ...]:
    calibration = workload.calibration
    notes = [f"calibration '{calibration.name}': {calibration.source}", "links otherwise idle"]
    if any(cost_table.virtual for pipeline in layout.pipelines for cost_table in pipeline.shape.cost_tables):
        notes.append("virtual chips: computation is padded to the predicted time")
    if workload.optimizer_on_host:
        notes.append(host_update_note())
    return tuple(notes)


def explain_plan(scored: ScoredPlan) -> str:
    """Return what bounds the plan, and what the next faster one would need, as text."""
    layout, run = scored.layout, scored.result
    number = max(range(len(run.stages)), key=lambda i: run.stages[i].busy_s)
    slowest = run.stages[number]
    pipeline = _pipeline_of(layout, slowest.replica)
    cut, slot = pipeline.stages[slowest.stage], pipeline.shape.slots[slowest.stage]
    text = (
        f"stage {slowest.stage} on {slot.cluster} ({slot.chip.name}) is the slowest: "
        f"{format_seconds(cut.total_s)} per micro-batch, "
        f"busy {slowest.busy_s / run.iteration_s:.0%} of the step"
    )
    if layout.dp > 1:
        text += f"; {layout.dp} replicas take {_describe_counts(layout)}"
    if layout.local_steps > 1:
        text += f"; {explain_averages(layout)}"
    seen = set()
    for each in layout.pipelines:
        for a, b in itertools.pairwise(each.shape.segments):
            ends = (a.slot.cluster, b.slot.cluster)
            if ends[0] == ends[1] or ends in seen:
                continue
            seen.add(ends)
            gbps = sum(each.micro_batch_counts) * each.shape.message_bytes * 8 / 1e9 / run.iteration_s
            route = each.shape.routes.route(*ends)
            offered = route.bytes_per_s * 8 / 1e9 if route else 0.0
            round_trip = 2e3 * each.shape.routes.exchange_s(*ends, 0.0)
            text += f"; {ends[0]} to {ends[1]} carries {gbps:.3g} of {offered:.3g} Gbit/s"
            text += f" at {round_trip:g} ms round trip"
    return text + "".join(f"; {need}" for need in suggest_improvements(layout, run))


def explain_averages(layout: PlanLayout) -> str:
    """Return text on local steps: how often clusters average, the time it takes, and the effects."""
    steps = layout.local_steps
    each_s = layout.ring_s * steps
    return (
        f"clusters average their parameters every {steps} steps, {format_seconds(each_s)} each time "
        f"({format_seconds(layout.ring_s)} per step), instead of reducing gradients every step: "
        f"this changes the training result, and takes {OUTER_OPTIMIZER_BYTES} more bytes per parameter"
    )


def suggest_improvements(layout: PlanLayout, result: SimulationResult) -> Sequence[str]:
    """Return what the next faster plan would need: memory, a better link, more micro-batches."""
    found = []
    recompute_s = max(_recomputed_s(pipeline) for pipeline in layout.pipelines)
    count = sum(cut.recomputed for pipeline in layout.pipelines for cut in pipeline.stages)
    if count:
        found.append(f"memory for {count} recomputed layers would save up to {format_seconds(recompute_s)} per step")
    exposed_s = max(stage.exposed_communication_s for stage in result.stages)
    if exposed_s > 0.02 * result.iteration_s:
        found.append(f"computation waits up to {format_seconds(exposed_s)} per step for communication")
    bubble_s = max(stage.bubble_s for stage in result.stages)
    if bubble_s > 0.05 * result.iteration_s:
        found.append(
            f"a stage is idle for up to {bubble_s / result.iteration_s:.0%} of the step: more micro-batches "
            "or equal stages would use it"
        )
    return found


def _recomputed_s(pipeline: PlacedPipeline) -> float:
    each = [
        cut.total_s - cost_table.time_stage(cut.first, cut.last, 0).total_s
        for cost_table, cut in zip(pipeline.shape.cost_tables, pipeline.stages, strict=True)
    ]
    return max(pipeline.micro_batch_counts) * max(each)


def _pipeline_of(layout: PlanLayout, replica: int) -> PlacedPipeline:
    """Return the pipeline of a simulated replica; the simulator has one replica per kind."""
    kinds = [pipeline for pipeline in layout.pipelines for _ in sorted(set(pipeline.micro_batch_counts), reverse=True)]
    return kinds[min(replica, len(kinds) - 1)]


def _describe_counts(layout: PlanLayout) -> str:
    """Return replicas, micro-batches and their size as text: `8 x 11 and 4 x 10 micro-batches of 1`."""
    parts: dict[int, list[str]] = {}
    for pipeline in layout.pipelines:
        for count in sorted(set(pipeline.micro_batch_counts), reverse=True):
            parts.setdefault(pipeline.shape.micro_batch_size, []).append(
                f"{pipeline.micro_batch_counts.count(count)} x {count}"
            )
    return ", ".join(f"{' and '.join(each)} micro-batches of {size}" for size, each in parts.items())
