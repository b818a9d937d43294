"""`requirement_of`: from a plan with its prediction to what it needs of any place it might run at.

**WAN** of a boundary, each way: the messages of all pipelines (activations there, gradients back) over the
iteration as it would be on links that never bind, so that a plan made over a slow link does not ask for
little. **Delay**: 1F1B keeps `n` micro-batches under way at a stage, `n` times the pace of the slowest; what
the later stages do not use of that, and a share `TOLERATED` of slowing down, may go to one round trip.
**Jitter**: a message may be late by that share of the pace. Links that the plan was predicted on are
tolerated: their delay is in its prediction. **Storage**: see `stored`.
"""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.control.placement.requirement import Range, Requirement, StageNeed, WanNeed
from isthmus.control.placement.resources import chip_kind
from isthmus.control.placement.stored import checkpoint_bytes, model_bytes
from isthmus.core.errors import PlanError
from isthmus.core.job import Job
from isthmus.core.link_physics import WIRE_OVERHEAD
from isthmus.core.plan import Plan, Stage, StageTime
from isthmus.core.pool import Pool
from isthmus.plan import ModelProfile
from isthmus.plan.time.estimate import iteration_estimate_s

TOLERATED = 0.25
"""Share of its pace by which a delay may slow a pipeline down."""


def requirement_of(plan: Plan, job: Job, profile: ModelProfile, pool: Pool) -> Requirement:
    """Return what `plan` (predicted, its places in `pool`) needs.

    Raises `PlanError` for a plan without a prediction, or whose pipelines are not alike: then no equal
    pipelines can be placed.
    """
    pipelines = [plan.pipeline(replica) for replica in range(plan.dp)]
    needs = [tuple(_stage_need(stage, job, profile, pool) for stage in one) for one in pipelines]
    if any(one != needs[0] for one in needs):
        raise PlanError(
            f"{plan.id}: its {plan.dp} pipelines differ in layers or chips; equal ones can be placed",
            hint="fix parallel.dp, which makes all pipelines alike",
        )
    times = _times(plan)
    accepted = [link for r in range(plan.dp) for ends in plan.hops(r) if (link := pool.link(*ends))]
    bounds = _delays_s(plan, times[0])
    jitter_s = max([TOLERATED * _pace_s(times[0]), *(link.jitter_ms / 1e3 for link in accepted)])
    predicted_s = max((link.delay_s for link in accepted), default=0.0)
    gbps = _gbps(plan, job, profile, times)
    return Requirement(
        stages=needs[0],
        pipelines=plan.dp,
        boundaries=tuple(
            WanNeed(gbps=gbps, delay_s=max(bound, predicted_s), jitter_s=jitter_s) for bound in bounds
        ),
        data_bytes=job.data.max_bytes or 0,
    )


def ranges_of(plan: Plan) -> tuple[Range, ...]:
    """Return the ranges of a plan; raise `PlanError` where a stage's replicas are at several clusters."""
    rows = {tuple(stage.cluster for stage in plan.pipeline(replica)) for replica in range(plan.dp)}
    if len(rows) != 1:
        raise PlanError(f"{plan.id}: data parallelism crosses clusters; pipelines may, replicas may not")
    found: list[Range] = []
    for stage, cluster in enumerate(rows.pop()):
        if found and found[-1].cluster == cluster:
            found[-1] = Range(found[-1].first, stage + 1, cluster)
        else:
            found.append(Range(stage, stage + 1, cluster))
    return tuple(found)


def _stage_need(stage: Stage, job: Job, profile: ModelProfile, pool: Pool) -> StageNeed:
    group = pool.cluster(stage.cluster).group(stage.node_group)
    return StageNeed(
        chip=chip_kind(group),
        cards=stage.num_chips,
        cards_per_node=group.chips_per_node,
        checkpoint_bytes=checkpoint_bytes(stage, job, profile),
        model_bytes=model_bytes(stage, job, profile),
    )


def _times(plan: Plan) -> list[list[StageTime]]:
    """Return the predicted stage times of every pipeline."""
    times = plan.predicted.stage_times if plan.predicted else ()
    if len(times) != len(plan.stages):
        raise PlanError(f"{plan.id} says nothing of the time of its stages", hint="have it predicted first")
    found: list[list[StageTime]] = [[] for _ in range(plan.dp)]
    for stage, time in zip(plan.stages, times, strict=True):
        found[stage.replica].append(time)
    return found


def _gbps(plan: Plan, job: Job, profile: ModelProfile, times: Sequence[Sequence[StageTime]]) -> float:
    """Return what all pipelines send over one boundary, each way, on links that never bind."""
    counts = [plan.micro_batches_of(replica) for replica in range(plan.dp)]
    iteration_s = max(
        iteration_estimate_s(each, [0.0] * (len(each) - 1), count)
        for each, count in zip(times, counts, strict=True)
    )
    precision_bytes = 4 if (plan.precision or job.training.precision) in ("fp32", "tf32") else 2
    sent = sum(
        count * profile.boundary_bytes(plan.micro_batch_size_of(r) * plan.sequence_length, precision_bytes)
        for r, count in enumerate(counts)
    )
    return sent * 8 * WIRE_OVERHEAD / 1e9 / iteration_s if iteration_s else 0.0


def _pace_s(times: Sequence[StageTime]) -> float:
    return max(one.forward_s + one.backward_s for one in times)


def _delays_s(plan: Plan, times: Sequence[StageTime]) -> list[float]:
    """Return for each boundary the longest one-way delay that the schedule tolerates."""
    count, pace_s = len(times), _pace_s(times)
    found: list[float] = []
    later_s = sum(one.forward_s + one.backward_s for one in times)
    for stage, one in enumerate(times[:-1]):
        under_way = min(_in_flight(plan.schedule, count - stage - 1), plan.micro_batches_of(0))
        found.append(max(0.0, (1 + TOLERATED) * under_way * pace_s - later_s) / 2)
        later_s -= one.forward_s + one.backward_s
    return found


def _in_flight(schedule: str, later_stages: int) -> int:
    """Return the micro-batches that a stage with so many later ones has under way."""
    if schedule == "gpipe":
        return 10**9
    return 2 * later_stages + 1 if schedule == "overlapped" else later_stages + 1
