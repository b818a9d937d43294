"""`TracePlanner`: plans for the jobs of a trace, in place of the planner; `trace_submission` makes submissions.

Pipelines are fixed in advance: a gang of W workers becomes W / S equal pipelines of S stages (S at most
`MAX_STAGES`), and only their placement is searched (`placement.place_plan`). A gang that accepts any chip
model and fits no single one is split into two gangs with heterogeneous pipelines.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from isthmus.control.placement import (
    FreeResources,
    PipelineRequirement,
    StageRequirement,
    WanRequirement,
)
from isthmus.control.placement.place_plan import PlanPlacement, gradient_gbps, place_plan
from isthmus.control.placement.resources.free_resources import ClusterPair, FreeLink, TakenNodeGroups
from isthmus.control.placement.resources.gradient_traffic import GradientTraffic
from isthmus.control.placement.resources.plan_requirement import EqualPipelines, PlanRequirement
from isthmus.control.simulation.traces.job_trace import TraceJob
from isthmus.control.state.events import MakePlans
from isthmus.core.chip import Chip
from isthmus.core.job import CheckpointConfig, DataConfig, Job, PlacementConstraints, TrainingConfig
from isthmus.core.model import Model
from isthmus.core.plan import Plan, PlanSet, Prediction, Refusal, Stage
from isthmus.core.pool import Cluster, Pool
from isthmus.core.pool_resource import PoolResource
from isthmus.core.views.api_views import Submission

MAX_STAGES = 4
"""Largest number of pipeline stages of a gang, and so of sites that share it."""

PIPELINE_GBPS = 0.5
"""WAN traffic of one pipeline in Gbit/s; heterogeneous pipelines exchange gradients at the same rate."""

MAX_DELAY_S = 0.05
"""WAN delay that a pipeline's schedule tolerates."""

_NUM_LAYERS = MAX_STAGES
_GRADIENTS = GradientTraffic(
    layer_bytes=(int(PIPELINE_GBPS * 1e9 / 8 / _NUM_LAYERS),) * _NUM_LAYERS,
    embedding_bytes=0,
    head_bytes=0,
    tied=False,
    iteration_s=1.0,
)

_MODEL = Model(path="trace", architecture="LlamaForCausalLM", num_layers=64, hidden_size=8, vocab_size=8, config={})
_JOB = Job(
    name="trace",
    model="trace",
    data=DataConfig(paths=("/trace/data",)),
    training=TrainingConfig(steps=1),
    checkpoints=CheckpointConfig(folder="/trace/checkpoints"),
    output="/trace/output",
    policy="auto",
    max_restarts=1_000_000,
)


def trace_submission(job: TraceJob, placement: PlacementConstraints) -> Submission:
    """Return the submission of a trace job; its key is the job's name."""
    changes = {"name": job.name, "priority": job.priority, "placement": placement}
    return Submission(job=_JOB.model_copy(update=changes), model=_MODEL, key=job.name)


class TracePlanner:
    """Answers planning requests for `jobs` on the clusters and links of `pool`."""

    def __init__(self, jobs: Iterable[TraceJob], pool: Pool) -> None:
        self.jobs = {job.name: job for job in jobs}
        self._chips = pool.chips
        self._links = FreeResources.from_pool(Pool(clusters=pool.clusters, chips=pool.chips, links=pool.links)).links
        self._link_ends = {str(PoolResource.link(a, b)): (a, b) for a, b in self._links}
        self._chips_per_node = {group.chip: group.chips_per_node for one in pool.clusters for group in one.node_groups}
        self._requirements: dict[tuple[int, int, str], PipelineRequirement] = {}

    def __call__(self, request: MakePlans) -> PlanSet:
        """Return a plan with the best placement of the job's pipelines, or the refusals."""
        job = self.jobs[request.submission.job.name]
        free = request.free_chips
        most = sum(sum(groups.values()) for groups in free.values())
        if most < job.chips:
            return PlanSet(plans=(), refused=(Refusal(clusters=(), reason=f"{most} of {job.chips} chips"),))
        resources = _resources(request.clusters, self._chips, free)
        resources.links = self._free_links(request.free_gbps)
        refused: list[Refusal] = []
        for chip in self._chips_per_node if job.chip not in self._chips_per_node else (job.chip,):
            demand = _demand(self.requirement(job.workers, job.chips_per_worker, chip))
            found = place_plan(demand, resources, request.submission.job.placement, keep=1)
            if found.candidates:
                return PlanSet(plans=(self._make_plan(job, demand, found.candidates[0], resources),))
            refused += found.refused[:1]
        for demand in self._mixed_demands(job, resources):
            found = place_plan(demand, resources, request.submission.job.placement, keep=1)
            if found.candidates:
                return PlanSet(plans=(self._make_plan(job, demand, found.candidates[0], resources),))
        return PlanSet(plans=(), refused=tuple(refused))

    def _mixed_demands(self, job: TraceJob, resources: FreeResources) -> Iterator[PlanRequirement]:
        """Yield splits of a gang over two chip models: the first takes as many workers as fit."""
        if job.chip in self._chips_per_node:
            return
        for first, second in itertools.permutations(self._chips_per_node, 2):
            cards = min(job.chips_per_worker, self._chips_per_node[first])
            each = -(-job.chips_per_worker // cards)
            groups = (group for site in resources.sites.values() for group in site.groups_with_chip(first))
            workers = sum(group.slots(cards) for group in groups) // each
            if 0 < workers < job.workers:
                yield _demand(
                    self.requirement(workers, job.chips_per_worker, first),
                    self.requirement(job.workers - workers, job.chips_per_worker, second),
                )

    def _free_links(self, free_gbps: Mapping[str, float]) -> dict[ClusterPair, FreeLink]:
        """Return the links with their free bandwidth."""
        links = dict(self._links)
        for name, ends in self._link_ends.items():
            gbps = free_gbps.get(name)
            if gbps is not None and gbps != links[ends].free_gbps:
                links[ends] = replace(links[ends], free_gbps=gbps)
        return links

    def requirement(self, gang: int, chips_per_worker: int, chip: str) -> PipelineRequirement:
        """Return the requirement of a gang's pipelines on `chip`; workers larger than a node are split."""
        key = gang, chips_per_worker, chip
        if key not in self._requirements:
            node = self._chips_per_node[chip]
            cards = min(chips_per_worker, node)
            workers = gang * -(-chips_per_worker // node)
            stages = max(n for n in range(1, MAX_STAGES + 1) if workers % n == 0)
            pipelines = workers // stages
            need = WanRequirement(gbps=PIPELINE_GBPS * pipelines, delay_s=MAX_DELAY_S, jitter_s=MAX_DELAY_S)
            self._requirements[key] = PipelineRequirement(
                stages=(StageRequirement(chip=chip, num_devices=cards, devices_per_node=node),) * stages,
                num_pipelines=pipelines,
                boundaries=(need,) * (stages - 1),
            )
        return self._requirements[key]

    def _make_plan(
        self, job: TraceJob, demand: PlanRequirement, together: PlanPlacement, resources: FreeResources
    ) -> Plan:
        rows = [list[Stage]() for _ in demand.groups]
        for number in demand.largest_first:
            needed, ranges = demand.groups[number].requirement, together.candidates[number].ranges
            taken = resources.take(needed, ranges)
            where = [one.cluster for one in ranges for _ in range(one.first, one.last)]
            rows[number] = _stages(number, needed, where, taken)
        layers = max(map(len, rows))
        ends = [row[-1].model_copy(update={"layers": (len(row) - 1, layers)}) for row in rows]
        return Plan(
            id="placed",
            stages=tuple(one for row, end in zip(rows, ends, strict=True) for one in (*row[:-1], end)),
            dp=len(rows),
            micro_batches=1,
            micro_batch_size=1,
            sequence_length=1,
            predicted=Prediction(
                iteration_s=job.run_s,
                tgs_tokens_per_card_s=0,
                samples_per_s=0,
                peak_memory_bytes=(),
                gradient_gbps=_gradient_gbps(demand, together),
            ),
        )


def _stages(replica: int, needed: PipelineRequirement, where: Sequence[str], taken: TakenNodeGroups) -> list[Stage]:
    """Return the stages of equal pipelines merged into one: a layer per stage, pipelines as `cp`."""
    found: list[Stage] = []
    for cluster, need, groups in zip(where, needed.stages, taken, strict=True):
        for group, pipelines in groups:
            layers = (len(found), len(found) + 1)
            found.append(
                Stage(
                    replica=replica,
                    cluster=cluster,
                    node_group=group,
                    layers=layers,
                    tp=need.num_devices,
                    cp=pipelines,
                )
            )
    return found


def _demand(*needed: PipelineRequirement) -> PlanRequirement:
    """Return the demand of one or several kinds of pipelines that exchange `PIPELINE_GBPS` of gradients per link."""
    kinds = []
    for number, one in enumerate(needed):
        spans = tuple((i, _NUM_LAYERS if i + 1 == one.num_stages else i + 1) for i in range(one.num_stages))
        kinds.append(EqualPipelines(replicas=(number,), requirement=one, ranges=(), layer_spans=spans))
    return PlanRequirement(groups=tuple(kinds), gradients=_GRADIENTS)


def _gradient_gbps(demand: PlanRequirement, together: PlanPlacement) -> dict[str, float]:
    if len(demand.groups) == 1:
        return {}
    rates = gradient_gbps(demand, dict(enumerate(together.candidates)))
    return {str(PoolResource.link(a, b)): gbps for (a, b), gbps in rates.items()}


def _resources(
    clusters: tuple[Cluster, ...], chips: tuple[Chip, ...], free: dict[str, dict[str, int]]
) -> FreeResources:
    return FreeResources.from_pool(Pool(clusters=clusters, chips=chips), free)
