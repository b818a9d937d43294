"""`search_plans` and `make_plans`: candidate plans for a job on a pool, best first, with reasons."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any

from isthmus.core.job import Job
from isthmus.core.model import Model
from isthmus.core.plan import Plan, PlanSet, Refusal
from isthmus.core.pool import Cluster, Pool
from isthmus.core.process.gc_pause import collection_paused
from isthmus.core.stack import find_stack
from isthmus.plan.profile.layer_profile import ModelProfile
from isthmus.plan.profile.model_profile import profile_model
from isthmus.plan.profile.stack_tensors import stacked_profile
from isthmus.plan.search.bound.prove_bound import OPTIMALITY_GAP, prove_bound
from isthmus.plan.search.compose.best_layouts import BestLayouts
from isthmus.plan.search.compose.plan_layout import PlanLayout
from isthmus.plan.search.compose.search_branch import BranchKey, branch_key
from isthmus.plan.search.costs.job_limits import job_limits
from isthmus.plan.search.costs.plan_value import ObjectiveWeights, PlanValue
from isthmus.plan.search.costs.routes import Routes
from isthmus.plan.search.costs.search_limits import SearchLimits
from isthmus.plan.search.costs.slots import ChipSlot, FreeChips, cluster_slots, eligible_clusters
from isthmus.plan.search.costs.workload import TrainingWorkload
from isthmus.plan.search.explore.branch_and_bound import BranchAndBound, SearchStats
from isthmus.plan.search.explore.mixed_size_search import MixedSizeSearch
from isthmus.plan.search.explore.weighted_search import WeightedSearch
from isthmus.plan.search.finish.explain_refusals import explain_refusals
from isthmus.plan.search.finish.runtime_support import runtime_incompatibility
from isthmus.plan.search.finish.score_plan import calibration_for
from isthmus.plan.search.finish.select_plans import Objective, explain_unmet_limits, scored_value, select_plans
from isthmus.plan.search.finish.simulate_finalists import (
    LARGE_POOL_EFFORT,
    SMALL_POOL_EFFORT,
    SimulationEffort,
    simulate_finalists,
    time_order,
)
from isthmus.plan.search.finish.write_plan import ScoredPlan, add_prediction
from isthmus.plan.search.pipelines.search_space import SearchSpace
from isthmus.plan.time.chip_rates import complete_calibration

SMALL_POOL_CHIPS = 32
"""Pools of at most this many chips get the larger simulation effort: their plans are cheap to simulate."""

PROOF_EFFORT = 800_000
"""Upper limit on the stages checked while proving `bound_s`."""


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """A plan search request: a job on a pool, an objective and limits."""

    job: Job
    model: Model | ModelProfile
    pool: Pool
    # Free chips by cluster and node group; None: all chips are free.
    free_chips: FreeChips | None = None
    objective: Objective = "time"
    # Weights of time, cost and energy, which replace the objective.
    weights: ObjectiveWeights | None = None
    # Longest time of the whole job; the objective decides among plans within it.
    deadline_s: float | None = None
    # Highest price of the whole job.
    budget: float | None = None
    limits: SearchLimits = field(default_factory=SearchLimits)
    # Most plans to return.
    num_plans: int = 5
    # Whether to explain the refused combinations of clusters.
    explain: bool = True
    # Layouts of an earlier search: only their replica groups, micro-batch sizes and schedules are searched.
    warm_start: tuple[PlanLayout, ...] = ()
    # Called with (stats, best layout) after each evaluated option; False stops the search with the best plans
    # so far.
    should_continue: Callable[[SearchStats, PlanLayout | None], bool] = lambda *_: True
    # Whether a finished plan may be returned.
    accepts: Callable[[Plan], bool] = lambda _: True


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Plans, best first, with statistics of the search."""

    plans: tuple[Plan, ...]
    # Combinations of clusters without a plan, and why.
    refused: tuple[Refusal, ...]
    # Pipelines whose layers were split.
    evaluated: int
    # Pipelines and branches that a bound excluded.
    pruned: int
    # The search thinned and skipped nothing, or `bound_s` meets the fastest plan.
    optimal: bool
    # A proven lower bound on iteration time over the complete search space.
    bound_s: float
    # Closed-form iteration time of the best layout.
    estimate_s: float
    scored: tuple[ScoredPlan, ...] = ()

    @property
    def layouts(self) -> tuple[PlanLayout, ...]:
        """The layouts of the plans: pass them as `warm_start` to replan after a small change."""
        return tuple(one.layout for one in self.scored)

    def as_dict(self, seconds: float) -> dict[str, Any]:
        """Return the result as `isthmus plan --json` prints it; `seconds` is the duration of the search."""
        return {
            "plans": [plan.model_dump(mode="json") for plan in self.plans],
            "refused": [one.model_dump(mode="json") for one in self.refused],
            "search": {
                "seconds": seconds,
                "evaluated": self.evaluated,
                "pruned": self.pruned,
                "optimal": self.optimal,
                "bound_s": self.bound_s,
            },
        }


def make_plans(
    job: Job,
    model: Model,
    pool: Pool,
    free_chips: FreeChips | None = None,
    *,
    num_plans: int = 5,
    executable: bool = True,
) -> PlanSet:
    """Return up to `num_plans` plans for `job`, predicted fastest first, and the refused cluster combinations.

    `free_chips` maps cluster and node group to free chips; None means an empty pool. A job without any plan gets an
    empty list and the reasons. `executable` restricts the search to plans that the Isthmus runtime supports.

    Raises `ModelError` for a model that cannot be profiled, and `PlanError` for degrees (`job.parallel`) that
    no pool can satisfy.
    """
    question = SearchRequest(
        job=job,
        model=model,
        pool=pool,
        free_chips=free_chips,
        num_plans=num_plans,
        limits=SearchLimits(executable=executable),
    )
    answer = search_plans(question)
    return PlanSet(plans=answer.plans, refused=answer.refused)


def search_plans(request: SearchRequest) -> SearchResult:
    """Return the best plans for a request, simulated.

    The result is deterministic and independent of the order of clusters in the pool. Where no plan fits, plans with
    ZeRO 3 are searched. Raises `ModelError` for
    a model without a profile, and `PlanError` for degrees that no pool can satisfy.
    """
    with collection_paused():
        found = _search_plans(request)
        for sharded in () if found.plans else _sharded_further(request):
            again = _search_plans(sharded)
            if again.plans:
                return again
        return found


def _sharded_further(request: SearchRequest) -> Iterator[SearchRequest]:
    """Yield the request with the stages of ZeRO that fit where ZeRO 1 does not: for the runtime 2 and 3, else 3."""
    if request.limits.zero == 1 and request.limits.executable:
        limits = replace(request.limits, zero=2, equal_micro_batches=True)
        request = replace(request, accepts=partial(_runs_and_is_accepted, request.accepts))
        yield replace(request, limits=limits)
    sharded = _fully_sharded(request)
    if sharded is not None:
        yield sharded


def _runs_and_is_accepted(accepts: Callable[[Plan], bool], plan: Plan) -> bool:
    return accepts(plan) and runtime_incompatibility(plan) is None


def _fully_sharded(request: SearchRequest) -> SearchRequest | None:
    """Return the request with ZeRO 3 (FSDP), which fits where nothing else does; None if no such plan can be run.

    Without a pipeline, where its weights would stay gathered in one.
    """
    limits, parallel = request.limits, request.job.parallel
    framework = limits.framework
    if limits.zero != 1 or (framework is not None and framework.key != "torchtitan"):
        return None
    pp = limits.pp or parallel.pp
    if framework is not None or find_stack(request.job.stack).gathered.whole_stage_with_pipeline:
        if pp not in (None, 1):
            return None
        pp = 1
    equal = limits.equal_micro_batches or limits.executable
    return replace(request, limits=replace(limits, zero=3, pp=pp, equal_micro_batches=equal))


def _search_plans(request: SearchRequest) -> SearchResult:
    job, placement = request.job, request.job.placement
    # Step 1: collect the free slots that the placement admits.
    task = _make_workload(request)
    clusters = sorted(eligible_clusters(request.pool, placement), key=lambda one: one.name)
    slots = {one.name: _slots_for(request, one) for one in clusters}
    every = [slot for one in slots.values() for slot in one]
    effort = SMALL_POOL_EFFORT if sum(slot.chips for slot in every) <= SMALL_POOL_CHIPS else LARGE_POOL_EFFORT
    # Step 2: search by the closed-form estimate, then simulate the best layouts.
    explorers = _run_searches(request, task, slots, effort)
    explorer, tally = explorers[0], explorers[0].stats
    scored = sorted(
        (one for some in explorers for one in _simulate_finalists(request, some, task, effort)), key=time_order
    )
    # Step 3: where another objective or a limit counts, search the same spaces by it.
    value, weighted = None, list[WeightedSearch]()
    if scored and _is_thrifty(request) and not explorer.stats.stopped:
        fastest = scored[0].time_s, scored[0].cost, scored[0].energy_j
        value = request.weights.value(*fastest) if request.weights else None
        for each in [value] if value else _objective_values(request.objective, *fastest):
            some = _run_weighted_searches(request, explorers, every, each)
            weighted += some
            scored += (one for search in some for one in _simulate_finalists(request, search, task, effort))
        scored = sorted({one.plan.id: one for one in scored}.values(), key=time_order)
    # Step 4: explain refusals and select by the objective.
    refused: tuple[Refusal, ...] = ()
    if request.explain:
        total = job.training.global_batch_size // job.training.micro_batch_size
        refused = explain_refusals(explorer, clusters, slots, placement, total)
    steps, deadline_s, budget = job.training.steps, request.deadline_s, request.budget
    chosen = select_plans(scored, request.objective, steps, deadline_s, budget, request.num_plans, value)
    if scored and not chosen:
        refused += (explain_unmet_limits(scored, steps),)
    # Step 5: prove the lower bound; `whole` is True where the search was exhaustive.
    best_s = min((one.time_s for one in scored), default=math.inf)
    cut_short = tally.stopped or bool(request.warm_start)
    proof = 0 if cut_short else PROOF_EFFORT
    bound_s = min(prove_bound(one.space, every, one.samples, one.requested_size, best_s, proof) for one in explorers)
    whole = all(one.space.exhaustive for one in (*explorers, *weighted)) and not cut_short
    whole = whole and not any(one.left_out for one in weighted)
    layouts = (layout for one in explorers for layout in one.best_layouts.layouts)
    return SearchResult(
        plans=tuple(add_prediction(one, task, request.pool) for one in chosen),
        refused=refused,
        evaluated=tally.evaluated,
        pruned=tally.pruned,
        optimal=bool(chosen) and (whole or (not weighted and best_s <= bound_s * (1 + 2 * OPTIMALITY_GAP))),
        bound_s=bound_s,
        estimate_s=min((one.estimate_s for one in layouts), default=math.inf),
        scored=tuple(chosen),
    )


def _run_searches(
    request: SearchRequest,
    workload: TrainingWorkload,
    slots: dict[str, tuple[ChipSlot, ...]],
    effort: SimulationEffort,
) -> list[BranchAndBound]:
    """Search the space and, where the job allows local steps, a second space that uses them."""
    job = request.job
    training, placement, limits = job.training, job.placement, job_limits(request.limits, job, workload)
    thrifty = _is_thrifty(request)
    space = SearchSpace(
        workload,
        Routes(request.pool, workload.calibration),
        limits,
        minimise_cost=thrifty,
        needed_cluster=job.output_site,
    )
    width = effort.num_layouts * (4 if thrifty and effort is LARGE_POOL_EFFORT else 1)
    groups = _slot_sets(request, [slot for one in slots.values() for slot in one])
    explorer = BranchAndBound(
        space,
        training.global_batch_size,
        training.micro_batch_size,
        BestLayouts(width, max_cells=effort.max_cells),
        should_continue=request.should_continue,
        allow_link_bound=not (limits.executable and placement.network),
        warm_start=_warm_start_branches(request, 1),
    )
    explorers = [_run_search(explorer, groups)]
    if training.local_steps > 1 and limits.framework is None:
        apart = replace(space, workload=replace(workload, local_steps=training.local_steps), _cost_tables={})
        near, found = (
            _warm_start_branches(request, training.local_steps),
            BestLayouts(width, explorer.best_layouts.best, max_cells=effort.max_cells),
        )
        explorers.append(_run_search(explorer.for_space(apart, found, near), groups))
    return explorers


def _is_thrifty(request: SearchRequest) -> bool:
    """Return whether more than the time of a step counts."""
    limited = request.deadline_s is not None or request.budget is not None
    return request.objective != "time" or request.weights is not None or limited


def _objective_values(objective: Objective, time_s: float, cost: float, energy_j: float) -> list[PlanValue]:
    """Return what to search by for an objective, given the figures of the fastest plan."""
    by_cost, by_energy = PlanValue(per_cost=1.0), PlanValue(per_j=1.0)
    if objective == "pareto":
        both = PlanValue(per_s=1 / time_s, per_cost=1 / cost if cost else 0, per_j=1 / energy_j if energy_j else 0)
        found = [by_cost, by_energy, both]
    else:
        found = [{"cost": by_cost, "energy": by_energy}.get(objective, PlanValue(per_s=1.0))]
    return [one for one in found if one.of(time_s, cost, energy_j) > 0]


def _run_weighted_searches(
    request: SearchRequest, explorers: Sequence[BranchAndBound], slots: Sequence[ChipSlot], value: PlanValue
) -> list[WeightedSearch]:
    """Search the spaces of `explorers` by `value`, within deadline and budget."""
    steps, found = request.job.training.steps, list[WeightedSearch]()
    most_s = math.inf if request.deadline_s is None else request.deadline_s / steps
    most_cost = math.inf if request.budget is None else request.budget / steps
    for explorer in explorers:
        search = WeightedSearch.continue_from(explorer, value, most_s, most_cost)
        for group in _slot_sets(request, slots):
            search.run(group)
        search.clear_caches()
        found.append(search)
    return found


def _make_workload(request: SearchRequest) -> TrainingWorkload:
    model, training = request.model, request.job.training
    profile = profile_model(model) if isinstance(model, Model) else model
    chips = [request.pool.chip(group) for cluster in request.pool.clusters for group in cluster.node_groups]
    return TrainingWorkload(
        profile=stacked_profile(profile, request.job.stack, training.precision),
        sequence_length=training.sequence_length,
        precision=training.precision,
        calibration=complete_calibration(calibration_for(request.pool), chips, request.job.stack),
        optimizer_on_host=training.optimizer_on_host,
        reference_model=request.job.rl is not None and request.job.rl.kl > 0,
    )


def _slot_sets(request: SearchRequest, slots: Sequence[ChipSlot]) -> list[list[ChipSlot]]:
    """Return the slots that one plan may combine: all or those of each owner, for a framework of each library."""
    groups = [list(slots)]
    if not request.job.placement.several_owners:
        groups = [[slot for slot in slots if slot.owner == owner] for owner in sorted({slot.owner for slot in slots})]
    if request.limits.executable and request.limits.zero > 1:  # the runtime shards inside a cluster
        names = sorted({slot.cluster for slot in slots})
        groups = [[slot for slot in some if slot.cluster == name] for some in groups for name in names]
        groups = [some for some in groups if some]
    if request.limits.framework is None:
        return groups
    return [some for group in groups for some in _slots_by_library(group)]


def _slots_for(request: SearchRequest, cluster: Cluster) -> tuple[ChipSlot, ...]:
    """Return the slots of a cluster that the job allows and that the framework, if there is one, runs on."""
    found = cluster_slots(request.pool, cluster, request.job.placement, request.free_chips)
    rules = request.limits.framework
    return found if rules is None else tuple(slot for slot in found if rules.runs_on(slot.chip, slot.group))


def _slots_by_library(slots: Sequence[ChipSlot]) -> list[list[ChipSlot]]:
    """Return the slots by collective library: the ranks of a framework use one."""
    libraries = sorted({slot.chip.collective_library for slot in slots})
    return [[slot for slot in slots if slot.chip.collective_library == one] for one in libraries]


def _run_search(search: BranchAndBound, slot_sets: Sequence[Sequence[ChipSlot]]) -> BranchAndBound:
    """Search with one micro-batch size, then with mixed sizes; return the search with the layouts of both."""
    for group in slot_sets:
        search.run(group)
    unlike = MixedSizeSearch.continue_from(search)
    for group in slot_sets:
        unlike.run(group)
    unlike.clear_caches()
    return unlike


def _warm_start_branches(request: SearchRequest, local_steps: int) -> frozenset[BranchKey] | None:
    """Return the branches of the warm-start layouts with `local_steps`; None: search all branches."""
    if not request.warm_start:
        return None
    return frozenset(branch_key(one) for one in request.warm_start if one.local_steps == local_steps)


def _simulate_finalists(
    request: SearchRequest, search: BranchAndBound, workload: TrainingWorkload, effort: SimulationEffort
) -> list[ScoredPlan]:
    """Return the simulated plans of one search that the request accepts, the best by what it searched for first."""
    job, value_of = request.job, search.best_layouts.value_of
    rank = partial(scored_value, value=search.value) if isinstance(search, WeightedSearch) else attrgetter("time_s")
    found = simulate_finalists(
        search.best_layouts.layouts, job, request.pool, workload, effort, request.num_plans,
        limits=request.limits, value_of=value_of, scored_rank=rank,
    )  # fmt: skip
    site = job.output_site
    return [one for one in found if request.accepts(one.plan) and (site is None or site in one.plan.clusters)]
