"""`propose_plans`: plans for a waiting job, made by the planner and relocated and filtered by placement.

Follows cross-domain pooling report 4.2.3: the requirement comes from the job's best plan, the compute search
finds other places for the same pipelines, and the storage and network filters reject those they cannot serve.
If no plan fits the free resources, the requirement comes from a plan on the whole pool, to report shortages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from isthmus.control.placement.bring_files import clusters_to_prefer, ready_to_end_s, with_bringing
from isthmus.control.placement.command_plans import command_plans
from isthmus.control.placement.place_plan import place_plan
from isthmus.control.placement.plan_request import PlanRequest
from isthmus.control.placement.planned_placement_refusals import planned_placement_refusals
from isthmus.control.placement.relocate_plan import relocate_plan
from isthmus.control.placement.resources.free_resources import ClusterPair, FreeResources
from isthmus.control.placement.resources.gradient_traffic import GradientTraffic
from isthmus.control.placement.resources.plan_requirement import plan_requirement_of
from isthmus.control.placement.resources.storage_requirement import storage_bytes_by_stage
from isthmus.control.placement.rollout_places import with_rollouts
from isthmus.core.errors import IsthmusError, PlanError
from isthmus.core.job import Job
from isthmus.core.plan import SEARCH_ENDED_EARLY, Plan, PlanSet, Refusal
from isthmus.core.pool import Pool
from isthmus.core.pool_resource import PoolResource
from isthmus.core.process.gc_pause import collection_paused
from isthmus.plan import (
    ModelProfile,
    RolloutRequest,
    SearchLimits,
    SearchRequest,
    choose_rollouts,
    profile_model,
    search_plans,
    training_choices,
)

MAX_REDUCTIONS, MAX_REDUCED_CHIPS = 4, 256
"""Attempts to find a template plan with fewer chips, and the largest template to reduce, in chips."""


MAX_REFUSALS = 128
"""Upper limit on the refusals in an answer."""


def propose_plans(request: PlanRequest, keep: int = 5, should_continue: Callable[[], bool] = lambda: True) -> PlanSet:
    """Return up to `keep` plans, first those that would end first, and the refusals of planner and placement.

    `should_continue` is called during the search; False ends it with the best plans so far, which say so.
    Raises `ModelError` for a model that cannot be profiled, `PlanError` for degrees that no pool allows.
    """
    if request.job.engine == "command":
        return command_plans(request.job, request.pool, request.free_chips)
    patience = _Patience(should_continue)
    with collection_paused():
        if request.job.rl is None:
            return _propose_plans(request, keep, patience)
        return _propose_rollouts(request, keep, patience)


def _propose_rollouts(request: PlanRequest, keep: int, patience: _Patience) -> PlanSet:
    """Return plans of a job with `task: rl`: who trains, and who decodes beside it."""
    found = [
        _propose_plans(request.model_copy(update={"job": job}), keep, patience)
        for number, job in enumerate(training_choices(request.job, request.pool))
        if not number or patience()
    ]
    placed = [with_rollouts(one, request.job, request.pool, request.free_chips) for one in found]
    plans = {plan.id: plan for one in reversed(placed) for plan in one.plans}
    rollouts = RolloutRequest(
        job=request.job, pool=request.pool, profile=profile_model(request.model), free_chips=request.free_chips
    )
    return choose_rollouts(rollouts, PlanSet(plans=tuple(plans.values()), refused=placed[0].refused), keep)


class _Patience:
    """Whether to continue, and whether the answer was ever no."""

    def __init__(self, should_continue: Callable[[], bool]) -> None:
        self._should_continue, self.ended = should_continue, False

    def __call__(self, *_: object) -> bool:
        self.ended = self.ended or not self._should_continue()
        return not self.ended


def _propose_plans(request: PlanRequest, keep: int, patience: _Patience) -> PlanSet:
    job, network = request.job, request.job.placement.network
    resources = FreeResources.from_pool(request.pool, request.free_chips, request.free_storage_bytes, request.free_gbps)
    pool = _pool_with_free_links(request.pool, request.free_gbps) if network else request.pool
    # Step 1: plan on the free chips; keep the plans that storage and network admit where they are.
    profile = profile_model(request.model)
    planned = search_plans(
        SearchRequest(
            job=job,
            model=profile,
            pool=pool,
            free_chips=request.free_chips,
            num_plans=keep,
            limits=SearchLimits(executable=request.executable),
            should_continue=patience,
        )
    )
    kept: list[Plan] = []
    refused: list[Refusal] = []
    for plan in _with_nearer_plans(planned.plans, request, profile, pool, keep, patience):
        refusals = _refusals(plan, request, profile, resources)
        refused += refusals
        kept += [] if refusals else [_with_gradient_reasons(plan, profile)]
    # Step 2: relocate the best plan to other clusters.
    for pattern in planned.plans[:1] or _template_plans(request, patience):
        moved, more = _relocate(pattern, kept, request, profile, resources, pool)
        kept += moved
        refused += more
    # Step 3: add the planner's refusals for other clusters.
    reported = {frozenset(one.clusters) for one in refused}
    refused += [one for one in planned.refused if frozenset(one.clusters) not in reported]
    if patience.ended and not kept:
        refused.append(Refusal(clusters=(), reason=f"{SEARCH_ENDED_EARLY} without a plan; narrow the job's placement"))
    notes = (f"{SEARCH_ENDED_EARLY}: these are the best plans until then",) if patience.ended else ()
    kept = [with_bringing(plan, job, profile, request.fetches) for plan in kept]
    chosen = _fastest_diverse(kept, keep, job.training.steps)
    plans = tuple(_with_resource_needs(plan, job, profile, notes) for plan in chosen)
    return PlanSet(plans=plans, refused=tuple(dict.fromkeys(refused))[:MAX_REFUSALS])


def _with_nearer_plans(
    plans: tuple[Plan, ...],
    request: PlanRequest,
    profile: ModelProfile,
    pool: Pool,
    keep: int,
    patience: _Patience,
) -> tuple[Plan, ...]:
    """Return `plans`, and the best plans on the clusters alone from which the job could start sooner."""
    nearer = clusters_to_prefer(plans, request.job, profile, request.fetches, tuple(request.free_chips))
    if not nearer or not patience():
        return plans
    found = search_plans(
        SearchRequest(
            job=request.job,
            model=profile,
            pool=pool,
            free_chips={name: request.free_chips[name] for name in nearer},
            num_plans=keep,
            explain=False,
            limits=SearchLimits(executable=request.executable),
            should_continue=patience,
        )
    )
    known = {plan.id for plan in plans}
    return (*plans, *(plan for plan in found.plans if plan.id not in known))


def _with_resource_needs(plan: Plan, job: Job, profile: ModelProfile, notes: tuple[str, ...]) -> Plan:
    """Return the plan with the storage of its stages, the traffic of its gradients, and the assumptions."""
    if plan.predicted is None:
        return plan
    notes = (*plan.predicted.assumptions, *notes)
    if job.data.max_bytes is None:
        notes = (*notes, "data.max_bytes is not given: the data is assumed to need no storage")
    update = {
        "storage_bytes": storage_bytes_by_stage(plan, job, profile),
        "gradient_gbps": {str(PoolResource.link(a, b)): gbps for (a, b), gbps in _gradient_gbps(plan, profile).items()},
        "assumptions": notes,
    }
    return plan.model_copy(update={"predicted": plan.predicted.model_copy(update=update)})


def _with_gradient_reasons(plan: Plan, profile: ModelProfile) -> Plan:
    """Return a plan of the planner with the gradient traffic in `why`, as in `Together.why`."""
    rates = _gradient_gbps(plan, profile)
    reasons = (f"; gradients from {a} to {b} need {gbps:.3g} Gbit/s" for (a, b), gbps in rates.items())
    return plan.model_copy(update={"why": plan.why + "".join(reasons)})


def _gradient_gbps(plan: Plan, profile: ModelProfile) -> dict[ClusterPair, float]:
    """Return the Gbit/s of gradients by pair of clusters; empty if all replicas use the same clusters."""
    rows = {tuple(stage.cluster for stage in plan.pipeline(replica)) for replica in range(plan.dp)}
    if plan.predicted is None or len(rows) == 1:
        return {}
    gradients = GradientTraffic.from_profile(profile, plan.predicted.iteration_s * plan.local_steps)
    return gradients.gbps_by_pair([(stage.layers, stage.cluster) for stage in plan.stages])


def _pool_with_free_links(pool: Pool, free_gbps: Mapping[str, float]) -> Pool:
    """Return the pool with the free bandwidth of its links; links without any are removed."""
    if not free_gbps:
        return pool
    links = []
    for link in pool.links:
        gbps = free_gbps.get(str(PoolResource.link(link.source, link.target)), link.bandwidth_gbps)
        if gbps >= link.bandwidth_gbps:
            links.append(link)
        elif gbps > 0:
            links.append(link.model_copy(update={"bandwidth_gbps": gbps}))
    return pool.model_copy(update={"links": tuple(links)})


def _template_plans(request: PlanRequest, patience: _Patience) -> tuple[Plan, ...]:
    """Return at most one plan on the whole pool, idle and with all owners combined.

    It determines the shortages to report and is never offered itself. To keep the reported shortages minimal,
    a bisection looks for a plan with few chips.
    """
    free = sum(chips for groups in request.free_chips.values() for chips in groups.values())
    max_chips, least = request.job.placement.max_chips, 0
    found = _on_whole_pool(request, min(free, max_chips or free), patience)
    found = found or _on_whole_pool(request, min(MAX_REDUCED_CHIPS, max_chips or MAX_REDUCED_CHIPS), patience)
    for _ in range(MAX_REDUCTIONS if found else 0):
        chips = _num_chips(found)
        middle = math.isqrt(max(1, least) * chips)
        if not least < middle < chips <= MAX_REDUCED_CHIPS:
            break
        fewer = _on_whole_pool(request, middle, patience)
        found, least = (fewer, least) if fewer else (found, middle)
    return found or _on_whole_pool(request, max_chips, patience)


def _on_whole_pool(request: PlanRequest, max_chips: int | None, patience: _Patience) -> tuple[Plan, ...]:
    """Return the best plan with at most `max_chips`, if there is one."""
    if max_chips == 0 or not patience():
        return ()
    update = {"several_owners": True, "network": False, "max_chips": max_chips}
    job = request.job.model_copy(update={"placement": request.job.placement.model_copy(update=update)})
    limits = SearchLimits(executable=request.executable)
    question = SearchRequest(
        job=job, model=request.model, pool=request.pool, num_plans=1, explain=False, limits=limits,
        should_continue=patience,
    )  # fmt: skip
    return search_plans(question).plans


def _num_chips(plans: Sequence[Plan]) -> int:
    return sum(stage.num_chips for stage in plans[0].stages) if plans else 0


def _refusals(plan: Plan, request: PlanRequest, profile: ModelProfile, resources: FreeResources) -> list[Refusal]:
    """Return the storage and network refusals of a plan at its planned places."""
    try:
        demand = plan_requirement_of(plan, request.job, profile, request.pool)
    except PlanError as error:
        return [Refusal(clusters=plan.clusters, stage="compute", reason=f"compute: {error}")]
    return planned_placement_refusals(demand, resources, network=request.job.placement.network)


def _relocate(
    template: Plan,
    kept: Sequence[Plan],
    request: PlanRequest,
    profile: ModelProfile,
    resources: FreeResources,
    pool: Pool,
) -> tuple[list[Plan], list[Refusal]]:
    """Return `template` relocated to sets of clusters that `kept` does not use, and the refusals."""
    try:
        demand = plan_requirement_of(template, request.job, profile, request.pool)
    except PlanError:
        return [], []
    known = {frozenset(plan.clusters) for plan in kept}
    placements = place_plan(demand, resources, request.job.placement)
    found, refused = [], list(placements.refused)
    for candidate in placements.candidates:
        if frozenset(candidate.clusters) in known:
            continue
        try:
            found.append(relocate_plan(template, candidate, demand, resources, request.job, profile, pool))
        except IsthmusError as error:
            refused.append(Refusal(clusters=candidate.clusters, stage="compute", reason=str(error)))
    return found, [one for one in refused if one.stage != "compute" or not (kept or found)]


def _fastest_diverse(plans: Sequence[Plan], keep: int, steps: int) -> tuple[Plan, ...]:
    """Return `keep` plans, first those that would end first, preferring the best of each set of clusters."""
    ordered = sorted(plans, key=lambda one: (ready_to_end_s(one, steps), one.id))
    first: dict[frozenset[str], Plan] = {}
    for one in ordered:
        first.setdefault(frozenset(one.clusters), one)
    others = [one for one in ordered if one is not first[frozenset(one.clusters)]]
    wanted = {one.id for one in [*first.values(), *others][:keep]}
    return tuple(one for one in ordered if one.id in wanted)
