"""`TracePlanner`: plans for the jobs of a trace, in place of the planner; `submission_of` makes submissions.

Pipelines are fixed in advance: a gang of W workers becomes W / S equal pipelines of S stages (S at most
`MOST_STAGES`), and only their placement is searched (`placement.place_all`). A gang that accepts any chip
model and fits no single one is split into two gangs with heterogeneous pipelines.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from isthmus.control.placement import Demand, Requirement, Resources, StageNeed, WanNeed, place_all
from isthmus.control.placement.place_mixed import Together, gradient_gbps
from isthmus.control.placement.resources.demand import Alike
from isthmus.control.placement.resources.free_resources import Ends, FreeLink, Taken
from isthmus.control.placement.resources.gradient_traffic import Gradients
from isthmus.control.simulation.traces.trace import TraceJob
from isthmus.control.state.events import MakePlans
from isthmus.core.job import Checkpoints, Data, Job, Placement, Training
from isthmus.core.messages.api_views import Submission
from isthmus.core.model import Model
from isthmus.core.plan import Plan, PlanSet, Prediction, Refusal, Stage
from isthmus.core.pool import Cluster, Pool

MOST_STAGES = 4
"""Largest number of pipeline stages of a gang, and so of sites that share it."""

GBPS = 0.5
"""WAN traffic of one pipeline in Gbit/s; heterogeneous pipelines exchange gradients at the same rate."""

DELAY_S = 0.05
"""WAN delay that a pipeline's schedule tolerates."""

_LAYERS = MOST_STAGES
_GRADIENTS = Gradients(
    layer_bytes=(int(GBPS * 1e9 / 8 / _LAYERS),) * _LAYERS,
    embedding_bytes=0,
    head_bytes=0,
    tied=False,
    iteration_s=1.0,
)

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
    """Return the submission of a trace job; its key is the job's name."""
    changes = {"name": job.name, "priority": job.priority, "placement": placement}
    return Submission(job=_JOB.model_copy(update=changes), model=_MODEL, key=job.name)


class TracePlanner:
    """Answers planning requests for `jobs` on the clusters and links of `pool`."""

    def __init__(self, jobs: Iterable[TraceJob], pool: Pool) -> None:
        self.jobs = {job.name: job for job in jobs}
        self._links = Resources.of(Pool(clusters=pool.clusters, chips=pool.chips, links=pool.links)).links
        self._ends = {f"{a}>{b}": (a, b) for a, b in self._links}
        self._kinds = {group.chip: group.chips_per_node for one in pool.clusters for group in one.node_groups}
        self._needs: dict[tuple[int, int, str], Requirement] = {}

    def __call__(self, request: MakePlans) -> PlanSet:
        """Return a plan with the best placement of the job's pipelines, or the refusals."""
        job = self.jobs[request.submission.job.name]
        free = request.free_chips
        most = sum(sum(groups.values()) for groups in free.values())
        if most < job.chips:
            return PlanSet(plans=(), refused=(Refusal(clusters=(), reason=f"{most} of {job.chips} chips"),))
        resources = _resources(request.clusters, free)
        resources.links = self._left(request.free_gbps)
        refused: list[Refusal] = []
        for chip in self._kinds if job.chip not in self._kinds else (job.chip,):
            demand = _demand(self.requirement(job.workers, job.chips_per_worker, chip))
            found = place_all(demand, resources, request.submission.job.placement, keep=1)
            if found.candidates:
                return PlanSet(plans=(self._plan(job, demand, found.candidates[0], resources),))
            refused += found.refused[:1]
        for demand in self._unlike(job, resources):
            found = place_all(demand, resources, request.submission.job.placement, keep=1)
            if found.candidates:
                return PlanSet(plans=(self._plan(job, demand, found.candidates[0], resources),))
        return PlanSet(plans=(), refused=tuple(refused))

    def _unlike(self, job: TraceJob, resources: Resources) -> Iterator[Demand]:
        """Yield splits of a gang over two chip models: the first takes as many workers as fit."""
        if job.chip in self._kinds:
            return
        for first, second in itertools.permutations(self._kinds, 2):
            cards = min(job.chips_per_worker, self._kinds[first])
            each = -(-job.chips_per_worker // cards)
            groups = (group for site in resources.sites.values() for group in site.of_chip(first))
            workers = sum(group.slots(cards) for group in groups) // each
            if 0 < workers < job.workers:
                yield _demand(
                    self.requirement(workers, job.chips_per_worker, first),
                    self.requirement(job.workers - workers, job.chips_per_worker, second),
                )

    def _left(self, free_gbps: Mapping[str, float]) -> dict[Ends, FreeLink]:
        """Return the links with their free bandwidth."""
        links = dict(self._links)
        for name, ends in self._ends.items():
            gbps = free_gbps.get(name)
            if gbps is not None and gbps != links[ends].free_gbps:
                links[ends] = replace(links[ends], free_gbps=gbps)
        return links

    def requirement(self, gang: int, chips_per_worker: int, chip: str) -> Requirement:
        """Return the requirement of a gang's pipelines on `chip`; workers larger than a node are split."""
        key = gang, chips_per_worker, chip
        if key not in self._needs:
            node = self._kinds[chip]
            cards = min(chips_per_worker, node)
            workers = gang * -(-chips_per_worker // node)
            stages = max(n for n in range(1, MOST_STAGES + 1) if workers % n == 0)
            pipelines = workers // stages
            need = WanNeed(gbps=GBPS * pipelines, delay_s=DELAY_S, jitter_s=DELAY_S)
            self._needs[key] = Requirement(
                stages=(StageNeed(chip=chip, cards=cards, cards_per_node=node),) * stages,
                pipelines=pipelines,
                boundaries=(need,) * (stages - 1),
            )
        return self._needs[key]

    def _plan(self, job: TraceJob, demand: Demand, together: Together, resources: Resources) -> Plan:
        rows = [list[Stage]() for _ in demand.kinds]
        for number in demand.largest_first:
            needed, ranges = demand.kinds[number].requirement, together.candidates[number].ranges
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


def _stages(replica: int, needed: Requirement, where: Sequence[str], taken: Taken) -> list[Stage]:
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
                    tp=need.cards,
                    cp=pipelines,
                )
            )
    return found


def _demand(*needed: Requirement) -> Demand:
    """Return the demand of one or several kinds of pipelines that exchange `GBPS` of gradients per link."""
    kinds = []
    for number, one in enumerate(needed):
        spans = tuple((i, _LAYERS if i + 1 == one.num_stages else i + 1) for i in range(one.num_stages))
        kinds.append(Alike(replicas=(number,), requirement=one, ranges=(), spans=spans))
    return Demand(kinds=tuple(kinds), gradients=_GRADIENTS)


def _gradient_gbps(demand: Demand, together: Together) -> dict[str, float]:
    if len(demand.kinds) == 1:
        return {}
    rates = gradient_gbps(demand, dict(enumerate(together.candidates)))
    return {f"{a}>{b}": gbps for (a, b), gbps in rates.items()}


def _resources(clusters: tuple[Cluster, ...], free: dict[str, dict[str, int]]) -> Resources:
    return Resources.of(Pool(clusters=clusters), free)
