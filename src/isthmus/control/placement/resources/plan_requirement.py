"""`plan_requirement_of`: the requirement of a predicted plan, independent of its place.

Replicas with the same needs at the same clusters are equal pipelines with one `PipelineRequirement`. A plan with
different replicas (stages, chips or places) has several, and gradient traffic between their clusters.

**Bandwidth** of a boundary, each way: the messages of all pipelines (activations forward, gradients back)
divided by the iteration time on unlimited links, so that a plan predicted on a slow link does not require too
little. **Delay**: 1F1B keeps `n` micro-batches in flight at a stage, which takes `n` times the slowest stage;
the time that the later stages leave unused, plus a slowdown of `DELAY_TOLERANCE`, is available for one round trip.
**Jitter**: at most that share of the slowest stage's time. The links of the plan's own prediction are
accepted as they are. **Storage**: see `stored_bytes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.control.placement.resources.free_resources import chip_kind
from isthmus.control.placement.resources.gradient_traffic import GradientTraffic, LayerSpan
from isthmus.control.placement.resources.pipeline_requirement import (
    PipelineRequirement,
    StageRange,
    StageRequirement,
    WanRequirement,
)
from isthmus.control.placement.resources.storage_requirement import checkpoint_bytes, model_bytes
from isthmus.core.errors import PlanError
from isthmus.core.job import Job
from isthmus.core.link_throughput import WIRE_OVERHEAD
from isthmus.core.plan import Plan, Stage, StageTime
from isthmus.core.pool import Pool
from isthmus.plan import ModelProfile, iteration_estimate_s

DELAY_TOLERANCE = 0.25
"""Largest relative slowdown of a pipeline by delay."""


@dataclass(frozen=True, kw_only=True)
class EqualPipelines:
    """Replicas of a plan with the same needs at the same clusters."""

    replicas: tuple[int, ...]
    requirement: PipelineRequirement
    # Where the plan places their stages.
    ranges: tuple[StageRange, ...]
    # The layers of each stage.
    layer_spans: tuple[LayerSpan, ...]

    @property
    def label(self) -> str:
        """The replicas by number: `replica 2`, `replicas 0, 1`."""
        numbers = ", ".join(map(str, self.replicas))
        return f"replica{'s' if len(self.replicas) > 1 else ''} {numbers}"


@dataclass(frozen=True, kw_only=True)
class PlanRequirement:
    """The requirement of a plan: its groups of equal pipelines, and the gradient traffic between clusters."""

    groups: tuple[EqualPipelines, ...]
    gradients: GradientTraffic

    @property
    def num_devices(self) -> int:
        """Devices of all pipelines."""
        return sum(kind.requirement.num_devices for kind in self.groups)

    @property
    def largest_first(self) -> list[int]:
        """Indices into `groups` in the order of placement: largest stages first."""
        kinds = self.groups
        return sorted(
            range(len(kinds)),
            key=lambda i: (
                -max(cards for _, cards in kinds[i].requirement.sizes),
                -kinds[i].requirement.num_devices,
                i,
            ),
        )

    @property
    def chips(self) -> tuple[str, ...]:
        """The kinds of chips, each once."""
        return tuple(dict.fromkeys(chip for kind in self.groups for chip in kind.requirement.chips))


def plan_requirement_of(plan: Plan, job: Job, profile: ModelProfile, pool: Pool) -> PlanRequirement:
    """Return the requirement of `plan`, placed in `pool`; raise `PlanError` without a prediction."""
    times = _stage_times(plan)
    alike: dict[tuple[object, ...], list[int]] = {}
    for replica in range(plan.dp):
        stages = plan.pipeline(replica)
        needs = tuple(_stage_need(stage, job, profile, pool) for stage in stages)
        where = tuple(stage.cluster for stage in stages)
        alike.setdefault((needs, where), []).append(replica)
    kinds = tuple(_equal_pipelines(plan, replicas, times, job, profile, pool) for replicas in alike.values())
    predicted_s = plan.predicted.iteration_s if plan.predicted else 0.0
    iteration_s = max(predicted_s, _iteration_s(plan, times)) * plan.local_steps
    return PlanRequirement(groups=kinds, gradients=GradientTraffic.from_profile(profile, iteration_s))


def _equal_pipelines(
    plan: Plan,
    replicas: Sequence[int],
    times: Sequence[Sequence[StageTime]],
    job: Job,
    profile: ModelProfile,
    pool: Pool,
) -> EqualPipelines:
    """Return the requirement of equal pipelines."""
    stages, own = plan.pipeline(replicas[0]), times[replicas[0]]
    accepted = [link for ends in plan.hops(replicas[0]) if (link := pool.link(*ends))]
    bounds = _tolerated_delays_s(plan, own, plan.micro_batches_of(replicas[0]))
    jitter_s = max([DELAY_TOLERANCE * _slowest_stage_s(own), *(link.jitter_ms / 1e3 for link in accepted)])
    predicted_s = max((link.delay_s for link in accepted), default=0.0)
    gbps = _boundary_gbps(plan, replicas, job, profile, _iteration_s(plan, times))
    requirement = PipelineRequirement(
        stages=tuple(_stage_need(stage, job, profile, pool) for stage in stages),
        num_pipelines=len(replicas),
        boundaries=tuple(
            WanRequirement(gbps=gbps, delay_s=max(bound, predicted_s), jitter_s=jitter_s) for bound in bounds
        ),
        data_bytes=job.data.max_bytes or 0,
    )
    spans = tuple(stage.layers for stage in stages)
    return EqualPipelines(replicas=tuple(replicas), requirement=requirement, ranges=_ranges(stages), layer_spans=spans)


def _ranges(stages: Sequence[Stage]) -> tuple[StageRange, ...]:
    """Return the stages of a pipeline as ranges of one cluster each."""
    found: list[StageRange] = []
    for number, stage in enumerate(stages):
        if found and found[-1].cluster == stage.cluster:
            found[-1] = StageRange(found[-1].first, number + 1, stage.cluster)
        else:
            found.append(StageRange(number, number + 1, stage.cluster))
    return tuple(found)


def _stage_need(stage: Stage, job: Job, profile: ModelProfile, pool: Pool) -> StageRequirement:
    group = pool.node_group(stage.cluster, stage.node_group)
    return StageRequirement(
        chip=chip_kind(group),
        num_devices=stage.num_chips,
        devices_per_node=group.chips_per_node,
        checkpoint_bytes=checkpoint_bytes(stage, job, profile),
        model_bytes=model_bytes(stage, job, profile),
    )


def _stage_times(plan: Plan) -> list[list[StageTime]]:
    """Return the predicted stage times of every pipeline."""
    times = plan.predicted.stage_times if plan.predicted else ()
    if len(times) != len(plan.stages):
        raise PlanError(f"{plan.id} has no predicted stage times", hint="predict the plan first")
    found: list[list[StageTime]] = [[] for _ in range(plan.dp)]
    for stage, time in zip(plan.stages, times, strict=True):
        found[stage.replica].append(time)
    return found


def _iteration_s(plan: Plan, times: Sequence[Sequence[StageTime]]) -> float:
    """Return the iteration time on unlimited links."""
    return max(
        iteration_estimate_s(each, [0.0] * (len(each) - 1), plan.micro_batches_of(replica))
        for replica, each in enumerate(times)
    )


def _boundary_gbps(plan: Plan, replicas: Sequence[int], job: Job, profile: ModelProfile, iteration_s: float) -> float:
    """Return the Gbit/s that equal pipelines send over one boundary, each way."""
    precision_bytes = 4 if (plan.precision or job.training.precision) in ("fp32", "tf32") else 2
    sent = sum(
        plan.micro_batches_of(r)
        * profile.boundary_bytes(plan.micro_batch_size_of(r) * plan.sequence_length, precision_bytes)
        for r in replicas
    )
    return sent * 8 * WIRE_OVERHEAD / 1e9 / iteration_s if iteration_s else 0.0


def _slowest_stage_s(times: Sequence[StageTime]) -> float:
    return max(one.forward_s + one.backward_s for one in times)


def _tolerated_delays_s(plan: Plan, times: Sequence[StageTime], micro_batches: int) -> list[float]:
    """Return for each boundary the longest one-way delay that the schedule tolerates."""
    count, pace_s = len(times), _slowest_stage_s(times)
    found: list[float] = []
    later_s = sum(one.forward_s + one.backward_s for one in times)
    for stage, one in enumerate(times[:-1]):
        in_flight = min(_in_flight(plan.schedule, count - stage - 1), micro_batches)
        found.append(max(0.0, (1 + DELAY_TOLERANCE) * in_flight * pace_s - later_s) / 2)
        later_s -= one.forward_s + one.backward_s
    return found


def _in_flight(schedule: str, later_stages: int) -> int:
    """Return the micro-batches in flight at a stage with `later_stages` after it."""
    if schedule == "gpipe":
        return 10**9
    return 2 * later_stages + 1 if schedule in ("overlapped", "searched") else later_stages + 1
