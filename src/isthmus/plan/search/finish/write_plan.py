"""`write_plan`: a layout as a `Plan`; `predicted` adds the simulated prediction and its explanation."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.core.job import Job
from isthmus.core.plan import Plan, Prediction, Stage, StageTime
from isthmus.core.units import format_seconds
from isthmus.plan.memory.stage_memory import OUTER_BYTES
from isthmus.plan.search.compose.layout import Layout, Row
from isthmus.plan.search.costs.stage_costs import Seat, StageCut
from isthmus.plan.search.costs.task import Task
from isthmus.plan.time.predict import host_update_note
from isthmus.schedule import warm_up_counts
from isthmus.sim import TrainingRun


@dataclass(frozen=True)
class Scored:
    """A layout, its plan and its simulation result."""

    layout: Layout
    plan: Plan
    run: TrainingRun

    @property
    def time_s(self) -> float:
        """Simulated seconds of an iteration."""
        return self.run.iteration_s

    @property
    def cost(self) -> float:
        """Price of an iteration."""
        return self.layout.rate("price") * self.time_s

    @property
    def energy_j(self) -> float:
        """Joules of an iteration, with chips at their rated power."""
        return self.layout.rate("power") * self.time_s


def write_plan(layout: Layout, job: Job, task: Task, *, executable: bool) -> Plan:
    """Return the plan of a layout, without a prediction. Equal layouts get the same id."""
    stages: list[Stage] = []
    counts: list[int] = []
    for row in layout.rows:
        pattern = list(_stages(row))
        for count in row.counts:
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
        sequence_length=task.sequence_length,
        schedule=layout.schedule,
        local_steps=layout.local_steps,
        zero=max(row.shape.zero for row in layout.rows),
        optimizer_on_host=task.optimizer_on_host,
        replica_micro_batches=tuple(counts) if uneven else (),
        replica_micro_batch_sizes=_sizes(layout),
        warm_up=_warm_up(layout),
        precision=None if executable else job.training.precision,
        model=None if executable else job.model,
        compute=job.compute,
    )


def _sizes(layout: Layout) -> tuple[int, ...]:
    """Return the micro-batch size of every replica, empty if all are equal."""
    if not layout.unlike_sizes:
        return ()
    return tuple(row.shape.micro_batch_size for row in layout.rows for _ in row.counts)


def _stages(row: Row) -> Sequence[Stage]:
    found = []
    for spot, seat, cut in zip(row.shape.spots, row.shape.seats, row.cuts, strict=True):
        some = 0 < cut.recomputed < cut.last - cut.first
        found.append(
            Stage(
                cluster=spot.cluster,
                node_group=spot.group.name,
                layers=(cut.first, cut.last),
                tp=seat.degrees.tp,
                cp=seat.degrees.cp,
                ep=seat.degrees.ep,
                sp=seat.degrees.sp,
                recompute="full" if cut.recomputed else "none",
                recompute_layers=cut.recomputed if some else None,
            )
        )
    return found


def _warm_up(layout: Layout) -> tuple[int, ...]:
    """Return the warm-up of an overlapped schedule, within the memory that was checked for the stages."""
    if layout.schedule != "overlapped":
        return ()
    row = max(layout.rows, key=lambda one: one.end_s)
    shape, most = row.shape, max(row.counts)
    limits = [min(shape.in_flight(stage), most) for stage in range(shape.num_stages)]
    return warm_up_counts([cut.total_s for cut in row.cuts], shape.hops_s, most, limits)


def _plan_id(layout: Layout, stages: Sequence[Stage]) -> str:
    """Return an id that is a hash of the plan's content."""
    text = ";".join(
        f"{s.cluster}/{s.node_group}/{s.layers}/{s.tp}/{s.cp}/{s.ep}/{s.recompute}/{s.recompute_layers}"
        for s in stages
    )
    counts = ",".join(str(count) for row in layout.rows for count in row.counts)
    text += f"|{layout.micro_batch_size}|{layout.schedule}|{counts}"
    text += f"|{_sizes(layout)}" if layout.unlike_sizes else ""
    text += f"|{layout.local_steps} local steps" if layout.local_steps > 1 else ""
    return "plan-" + hashlib.sha256(text.encode()).hexdigest()[:8]


def predicted(one: Scored, task: Task) -> Plan:
    """Return the plan with its prediction and explanation."""
    plan, layout, run = one.plan, one.layout, one.run
    cards = sum(
        row.shape.dp * seat.num_chips / seat.chip.chips_per_card
        for row in layout.rows
        for seat in row.shape.seats
    )
    placed = [
        (row, seat, cut)
        for row in layout.rows
        for _ in row.counts
        for seat, cut in zip(row.shape.seats, row.cuts, strict=True)
    ]
    prediction = Prediction(
        iteration_s=run.iteration_s,
        tgs_tokens_per_card_s=plan.samples * plan.sequence_length / run.iteration_s / cards,
        samples_per_s=plan.samples / run.iteration_s,
        peak_memory_bytes=tuple(_peaks(layout)),
        wan_gbps=_wan_gbps(layout, run.iteration_s),
        cost_per_iteration=one.cost,
        stage_times=tuple(
            StageTime(forward_s=cut.forward_s, backward_s=cut.backward_s, update_s=_update_s(row, seat, cut))
            for row, seat, cut in placed
        ),
        assumptions=_assumptions(layout, task),
    )
    return plan.model_copy(update={"predicted": prediction, "why": why(one)})


def _update_s(row: Row, seat: Seat, cut: StageCut) -> float:
    """Return the seconds of a stage's gradient reduction inside its cluster and of its update."""
    return seat.last_s(seat.parameters(cut.first, cut.last), row.shape.dp, row.shape.zero)


def _peaks(layout: Layout) -> Sequence[int]:
    """Return the peak bytes of every stage."""
    found: list[int] = []
    for row in layout.rows:
        shape, most = row.shape, max(row.counts)
        each = []
        for stage, (seat, cut) in enumerate(zip(shape.seats, row.cuts, strict=True)):
            alive = min(shape.in_flight(stage), most)
            num_bytes = seat.stage_bytes(cut.first, cut.last, alive, cut.recomputed, shape.dp, shape.zero)
            each.append(round(num_bytes))
        found += each * len(row.counts)
    return found


def _wan_gbps(layout: Layout, iteration_s: float) -> tuple[float, ...]:
    """Return the mean rate that each hop of each replica needs, in plan order."""
    found: list[float] = []
    for row in layout.rows:
        hops = sum(1 for a, b in itertools.pairwise(row.shape.segments) if a.spot.cluster != b.spot.cluster)
        for count in row.counts:
            found += [count * row.shape.message_bytes * 8 / 1e9 / iteration_s] * hops
    return tuple(found)


def _assumptions(layout: Layout, task: Task) -> tuple[str, ...]:
    calibration = task.calibration
    notes = [f"calibration '{calibration.name}': {calibration.source}", "links otherwise idle"]
    if any(seat.virtual for row in layout.rows for seat in row.shape.seats):
        notes.append("virtual chips: computation is padded to the predicted time")
    if task.optimizer_on_host:
        notes.append(host_update_note())
    return tuple(notes)


def why(one: Scored) -> str:
    """Return what bounds the plan, and what the next faster one would need, as text."""
    layout, run = one.layout, one.run
    number = max(range(len(run.stages)), key=lambda i: run.stages[i].busy_s)
    slowest = run.stages[number]
    row = _row_of(layout, slowest.replica)
    cut, spot = row.cuts[slowest.stage], row.shape.spots[slowest.stage]
    text = (
        f"stage {slowest.stage} on {spot.cluster} ({spot.chip.name}) is the slowest: "
        f"{format_seconds(cut.total_s)} per micro-batch, "
        f"busy {slowest.busy_s / run.iteration_s:.0%} of the step"
    )
    if layout.dp > 1:
        text += f"; {layout.dp} replicas take {_counts(layout)}"
    if layout.local_steps > 1:
        text += f"; {averages(layout)}"
    seen = set()
    for each in layout.rows:
        for a, b in itertools.pairwise(each.shape.segments):
            ends = (a.spot.cluster, b.spot.cluster)
            if ends[0] == ends[1] or ends in seen:
                continue
            seen.add(ends)
            gbps = sum(each.counts) * each.shape.message_bytes * 8 / 1e9 / run.iteration_s
            way = each.shape.ways.way(*ends)
            offered = way.bytes_per_s * 8 / 1e9 if way else 0.0
            round_trip = 2e3 * each.shape.ways.exchange_s(*ends, 0.0)
            text += f"; {ends[0]} to {ends[1]} carries {gbps:.3g} of {offered:.3g} Gbit/s"
            text += f" at {round_trip:g} ms round trip"
    return text + "".join(f"; {need}" for need in needs(layout, run))


def averages(layout: Layout) -> str:
    """Return text on local steps: how often clusters average, the time it takes, and the effects."""
    steps = layout.local_steps
    each_s = layout.ring_s * steps
    return (
        f"clusters average their parameters every {steps} steps, {format_seconds(each_s)} each time "
        f"({format_seconds(layout.ring_s)} per step), instead of reducing gradients every step: "
        f"this changes the training result, and takes {OUTER_BYTES} more bytes per parameter"
    )


def needs(layout: Layout, run: TrainingRun) -> Sequence[str]:
    """Return what the next faster plan would need: memory, a better link, more micro-batches."""
    found = []
    again_s = max(_recomputed_s(row) for row in layout.rows)
    again = sum(cut.recomputed for row in layout.rows for cut in row.cuts)
    if again:
        found.append(
            f"memory for the {again} recomputed layers would save up to {format_seconds(again_s)} per step"
        )
    exposed_s = max(stage.exposed_communication_s for stage in run.stages)
    if exposed_s > 0.02 * run.iteration_s:
        found.append(f"computation waits up to {format_seconds(exposed_s)} per step for communication")
    bubble_s = max(stage.bubble_s for stage in run.stages)
    if bubble_s > 0.05 * run.iteration_s:
        found.append(
            f"a stage is idle for up to {bubble_s / run.iteration_s:.0%} of the step: more micro-batches "
            "or equal stages would use it"
        )
    return found


def _recomputed_s(row: Row) -> float:
    each = [
        cut.total_s - seat.timed(cut.first, cut.last, 0).total_s
        for seat, cut in zip(row.shape.seats, row.cuts, strict=True)
    ]
    return max(row.counts) * max(each)


def _row_of(layout: Layout, replica: int) -> Row:
    """Return the pipeline of a simulated replica; the simulator has one replica per kind."""
    kinds = [row for row in layout.rows for _ in sorted(set(row.counts), reverse=True)]
    return kinds[min(replica, len(kinds) - 1)]


def _counts(layout: Layout) -> str:
    """Return replicas, micro-batches and their size as text: `8 x 11 and 4 x 10 micro-batches of 1`."""
    parts: dict[int, list[str]] = {}
    for row in layout.rows:
        for count in sorted(set(row.counts), reverse=True):
            parts.setdefault(row.shape.micro_batch_size, []).append(f"{row.counts.count(count)} x {count}")
    return ", ".join(f"{' and '.join(each)} micro-batches of {size}" for size, each in parts.items())
