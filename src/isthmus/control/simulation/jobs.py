"""Jobs of a trace as the pool knows them: what is submitted, and the plans that the planner would answer.

Their pipelines are planned already: a gang of W workers is S stages of W / S equal pipelines (S at most
`MOST_STAGES`), and the three stages of co-scheduling only look for a place (`placement.place`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from isthmus.control.events import MakePlans
from isthmus.control.placement import Requirement, Resources, StageNeed, WanNeed, place
from isthmus.control.placement.requirement import Range
from isthmus.control.placement.resources import Ends, FreeLink
from isthmus.control.simulation.trace import TraceJob
from isthmus.core.job import Checkpoints, Data, Job, Placement, Training
from isthmus.core.model import Model
from isthmus.core.plan import Plan, PlanSet, Prediction, Refusal, Stage
from isthmus.core.pool import Cluster, Pool
from isthmus.core.views import Submission

MOST_STAGES = 4
"""A gang is cut into so many pipeline stages at most: so many sites can share it."""

GBPS = 0.5
"""What one pipeline sends across the WAN, in Gbit/s; its schedule tolerates a delay of `DELAY_S`."""

DELAY_S = 0.05

_MODEL = Model(
    path="trace", architecture="LlamaForCausalLM", num_layers=64, hidden_size=8, vocab_size=8, config={}
)
_JOB = Job(
    name="trace",
    model="trace",
    data=Data(paths=("trace",)),
    training=Training(steps=1),
    checkpoints=Checkpoints(folder="trace"),
    output="trace",
    policy="auto",
    max_restarts=1_000_000,
)


def submission_of(job: TraceJob, placement: Placement) -> Submission:
    """Return what the owner's user submits; its key is the job's name."""
    changes = {"name": job.name, "priority": job.priority, "placement": placement}
    return Submission(job=_JOB.model_copy(update=changes), model=_MODEL, key=job.name)


class TracePlanner:
    """Answers requests for plans of `jobs`, by name, on the clusters and links of `pool`."""

    def __init__(self, jobs: Iterable[TraceJob], pool: Pool) -> None:
        self.jobs = {job.name: job for job in jobs}
        self._links = Resources.of(Pool(clusters=pool.clusters, chips=pool.chips, links=pool.links)).links
        self._ends = {f"{a}>{b}": (a, b) for a, b in self._links}
        self._kinds = {group.chip: group.chips_per_node for one in pool.clusters for group in one.node_groups}
        self._needs: dict[tuple[int, int, str], Requirement] = {}

    def __call__(self, request: MakePlans) -> PlanSet:
        """Return the best place for the job's pipelines, or why there is none."""
        job = self.jobs[request.submission.job.name]
        free = request.free_chips
        most = sum(sum(groups.values()) for groups in free.values())
        if most < job.chips:
            return PlanSet(plans=(), refused=(Refusal(clusters=(), reason=f"{most} of {job.chips} chips"),))
        resources = _resources(request.clusters, free)
        resources.links = self._left(request.free_gbps)
        refused: list[Refusal] = []
        for chip in self._kinds if job.chip not in self._kinds else (job.chip,):
            requirement = self.requirement(job, chip)
            found = place(requirement, resources, request.submission.job.placement, keep=1)
            if found.candidates:
                ranges = found.candidates[0].ranges
                return PlanSet(plans=(self._plan(job, requirement, ranges, resources),))
            refused += found.refused[:1]
        return PlanSet(plans=(), refused=tuple(refused))

    def _left(self, free_gbps: Mapping[str, float]) -> dict[Ends, FreeLink]:
        """Return what links have left: most have all."""
        links = dict(self._links)
        for name, ends in self._ends.items():
            gbps = free_gbps.get(name)
            if gbps is not None and gbps != links[ends].free_gbps:
                links[ends] = replace(links[ends], free_gbps=gbps)
        return links

    def requirement(self, job: TraceJob, chip: str) -> Requirement:
        """Return what the job's pipelines need of nodes of `chip`; a worker larger than a node is cut."""
        key = job.workers, job.chips_per_worker, chip
        if key not in self._needs:
            node = self._kinds[chip]
            cards = min(job.chips_per_worker, node)
            workers = job.workers * -(-job.chips_per_worker // node)
            stages = max(n for n in range(1, MOST_STAGES + 1) if workers % n == 0)
            pipelines = workers // stages
            need = WanNeed(gbps=GBPS * pipelines, delay_s=DELAY_S, jitter_s=DELAY_S)
            self._needs[key] = Requirement(
                stages=(StageNeed(chip=chip, cards=cards, cards_per_node=node),) * stages,
                pipelines=pipelines,
                boundaries=(need,) * (stages - 1),
            )
        return self._needs[key]

    def _plan(
        self, job: TraceJob, requirement: Requirement, ranges: tuple[Range, ...], resources: Resources
    ) -> Plan:
        taken = resources.take(requirement, ranges)
        stages: list[Stage] = []
        where = [one.cluster for one in ranges for _ in range(one.first, one.last)]
        for cluster, need, groups in zip(where, requirement.stages, taken, strict=True):
            for group, pipelines in groups:
                layers = (len(stages), len(stages) + 1)
                stages.append(
                    Stage(cluster=cluster, node_group=group, layers=layers, tp=need.cards, cp=pipelines)
                )
        return Plan(
            id="placed",
            stages=tuple(stages),
            micro_batches=1,
            micro_batch_size=1,
            sequence_length=1,
            predicted=Prediction(
                iteration_s=job.run_s, tgs_tokens_per_card_s=0, samples_per_s=0, peak_memory_bytes=()
            ),
        )


def _resources(clusters: tuple[Cluster, ...], free: dict[str, dict[str, int]]) -> Resources:
    return Resources.of(Pool(clusters=clusters), free)
