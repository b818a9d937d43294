"""`export_plan`: exports a plan to a framework.

`command_job_text`: a job that runs the export in the pool. `framework_request`: searches only plans that export there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from isthmus.core.errors import PlanError
from isthmus.core.job import Job
from isthmus.core.job_parts.command_job import CommandConfig
from isthmus.core.model import Model
from isthmus.core.plan import Plan
from isthmus.core.pool import Pool
from isthmus.core.runs.check_plan import require_possible
from isthmus.core.runs.planned_sizes import ModelSizes
from isthmus.plan.export.incompatibility import Incompatibility, require_compatible
from isthmus.plan.export.isthmus_runtime import NAME as ISTHMUS
from isthmus.plan.export.isthmus_runtime import to_isthmus_runtime
from isthmus.plan.export.megatron import megatron_model_incompatibilities, to_megatron
from isthmus.plan.export.node_launches import no_devices_text
from isthmus.plan.export.plan_export import PlanExport
from isthmus.plan.export.torchtitan import to_torchtitan, torchtitan_model_incompatibilities
from isthmus.plan.search.costs.framework_rules import FRAMEWORKS, MEGATRON, TORCHTITAN, FrameworkRules
from isthmus.plan.search.costs.slots import cluster_slots, eligible_clusters

if TYPE_CHECKING:
    from isthmus.plan.search.search_plans import SearchRequest

_WRITERS = {"megatron": to_megatron, "torchtitan": to_torchtitan}
_PROGRAMS = {MEGATRON.name: "bash", TORCHTITAN.name: "python"}
EXPORT_TARGETS = (*_WRITERS, ISTHMUS)
"""The frameworks to export to."""


def export_plan(
    framework: str, plan: Plan, model: Model, pool: Pool | None, *, job: Job | None = None, data: str | None = None
) -> PlanExport:
    """Return the export of `plan` to one of `EXPORT_TARGETS`; all but `isthmus` need the pool.

    Raises `PlanError` with all reasons why the framework cannot run it. The hint names what does work: a new search,
    or another framework that takes this very plan. A plan that no chips can run is refused by `require_possible`.
    """
    require_possible(plan, ModelSizes.of(model), pool)
    try:
        return _write(framework, plan, model, pool, job, data)
    except PlanError as error:
        others = [one for one in EXPORT_TARGETS if one != framework and _takes(one, plan, model, pool, job)]
        if not others:
            raise
        also = " or ".join(f"`isthmus export PLAN --to {one} --pool POOL`" for one in others)
        raise PlanError(error.message, hint=f"{error.hint}; {also} takes this plan") from error


def _write(
    framework: str, plan: Plan, model: Model, pool: Pool | None, job: Job | None = None, data: str | None = None
) -> PlanExport:
    if framework == ISTHMUS:
        return to_isthmus_runtime(plan, model, job=job)
    if pool is None:
        raise PlanError(f"an export for {framework} needs the pool", hint="name the pool file")
    if plan.precision is None and job is not None:  # plans for the runtime leave it to the job
        plan = plan.model_copy(update={"precision": job.training.precision})
    return _WRITERS[framework](plan, model, pool, job=job, data=data)


def _takes(framework: str, plan: Plan, model: Model, pool: Pool | None, job: Job | None = None) -> bool:
    if framework != ISTHMUS and pool is None:
        return False
    try:
        _write(framework, plan, model, pool, job)
    except PlanError:
        return False
    return True


def command_job_text(made: PlanExport, file: Path) -> str:
    """Return the job that runs the export written to `file`, one rank per device, as a job file.

    The pool gives each cluster consecutive ranks on one node group, in the order of the job. Raises `PlanError` if the
    framework needs another order of ranks, or is the Isthmus runtime, which needs no program.
    """
    if made.framework not in _PROGRAMS:
        raise PlanError(
            "the Isthmus runtime runs its plans without a program", hint="submit the job with `isthmus submit`"
        )
    places = [(one.cluster, one.node_group) for one in made.launches]
    segments = [place for place, _ in itertools.groupby(places)]
    clusters = [cluster for cluster, _ in segments]
    if repeated := [one for one in dict.fromkeys(clusters) if clusters.count(one) > 1]:
        raise PlanError(
            f"the ranks of plan '{made.plan}' are not consecutive on one node group of {', '.join(repeated)}",
            hint="a command job has one segment of ranks at each cluster: launch the export on each node instead",
        )
    ranks = dict.fromkeys(clusters, 0)
    for one in made.launches:
        ranks[one.cluster] += len(one.devices)
    command = CommandConfig(
        arguments=(_PROGRAMS[made.framework], str(file.resolve())), ranks=ranks, node_groups=dict(segments)
    )
    job = {
        "version": 1,
        "name": f"{made.plan}-{made.framework.lower()}",
        "engine": "command",
        "command": command.model_dump(mode="json", include={"arguments", "ranks", "node_groups"}),
        "policy": "auto",
    }
    return yaml.safe_dump(job, sort_keys=False)


def framework_request(request: SearchRequest, framework: str) -> SearchRequest:
    """Return `request` restricted to plans that export to `framework` (a key of `FRAMEWORKS`).

    Raises `PlanError` if no plan of this job can: for its model, its settings or the chips of the pool.
    """
    rules, model, job = FRAMEWORKS[framework], request.model, request.job
    if not isinstance(model, Model):
        raise TypeError("a search for a framework needs the model, not its profile")
    found = (*_model_incompatibilities(rules, model, job), *_request_incompatibilities(rules, request))
    require_compatible(rules.name, framework, f"job '{job.name}'", found)
    limits = replace(request.limits, framework=rules)
    if model.tied_embeddings and not rules.tied_pipeline:
        limits = replace(limits, pp=1)
    accepts = request.accepts

    def exports(plan: Plan) -> bool:
        return accepts(plan) and _takes(framework, plan, model, request.pool)

    return replace(request, limits=limits, accepts=exports)


def _model_incompatibilities(rules: FrameworkRules, model: Model, job: Job) -> Iterator[Incompatibility]:
    if rules is MEGATRON:
        return megatron_model_incompatibilities(model)
    return torchtitan_model_incompatibilities(model, job.training.sequence_length)


def _request_incompatibilities(rules: FrameworkRules, request: SearchRequest) -> Iterator[Incompatibility]:
    """Yield each demand of a request, its model apart, that no plan for the framework can satisfy."""
    job, limits, model = request.job, request.limits, request.model
    if limits.schedule is not None and limits.schedule not in rules.schedules:
        yield Incompatibility(f"it has no schedule '{limits.schedule}'", change="remove --schedule")
    if job.training.optimizer_on_host and not rules.host_optimizer:
        yield Incompatibility(
            "the optimizer on the host: it also offloads the weights", change="set training.optimizer_on_host to false"
        )
    pp = limits.pp or job.parallel.pp or 1
    if isinstance(model, Model) and model.tied_embeddings and pp > 1 and not rules.tied_pipeline:
        yield Incompatibility(
            f"tied embedding and head in a pipeline of {pp} stages", change="remove pp, or set it to 1"
        )
    slots = (
        slot
        for cluster in eligible_clusters(request.pool, job.placement)
        for slot in cluster_slots(request.pool, cluster, job.placement, request.free_chips)
    )
    if not any(rules.runs_on(slot.chip, slot.group) for slot in slots):
        yield Incompatibility("no free chip that the job may use has a device for it", final=no_devices_text(rules))
