"""`search_plans` and `make_plans`: candidate plans for a job on a pool, best first, with reasons."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from isthmus.core.job import Job
from isthmus.core.model import Model
from isthmus.core.plan import Plan, PlanSet, Refusal
from isthmus.core.pool import Cluster, Pool
from isthmus.core.process.gc_pause import collection_paused
from isthmus.core.stack import find_stack
from isthmus.plan.profile.model_profile import ModelProfile, profile_model
from isthmus.plan.profile.stack_tensors import stacked_profile
from isthmus.plan.search.bound.prove_bound import OPTIMALITY_GAP, prove_bound
from isthmus.plan.search.compose.best_layouts import BestLayouts
from isthmus.plan.search.compose.plan_layout import PlanLayout
from isthmus.plan.search.compose.search_branch import BranchKey, branch_key
from isthmus.plan.search.costs.job_limits import job_limits
from isthmus.plan.search.costs.routes import Routes
from isthmus.plan.search.costs.search_limits import SearchLimits
from isthmus.plan.search.costs.slots import ChipSlot, FreeChips, cluster_slots, eligible_clusters
from isthmus.plan.search.costs.workload import TrainingWorkload
from isthmus.plan.search.explore.branch_and_bound import BranchAndBound, SearchStats
from isthmus.plan.search.explore.mixed_size_search import MixedSizeSearch
from isthmus.plan.search.finish.explain_refusals import explain_refusals
from isthmus.plan.search.finish.score_plan import calibration_for
from isthmus.plan.search.finish.select_plans import Objective, explain_unmet_limits, select_plans
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
        sharded = None if found.plans else _fully_sharded(request)
        again = found if sharded is None else _search_plans(sharded)
        return again if again.plans else found


def _fully_sharded(request: SearchRequest) -> SearchRequest | None:
    """Return the request with ZeRO 3 (FSDP), which fits where nothing else does; None if no such plan can be run.

    Without a pipeline, where its weights would stay gathered in one.
    """
    limits, parallel = request.limits, request.job.parallel
    framework = limits.framework
    if limits.zero != 1 or limits.executable or (framework is not None and framework.key != "torchtitan"):
        return None
    pp = limits.pp or parallel.pp
    if framework is not None or find_stack(request.job.stack).gathered.whole_stage_with_pipeline:
        if pp not in (None, 1):
            return None
        pp = 1
    return replace(request, limits=replace(limits, zero=3, pp=pp))


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
        (
            one
            for some in explorers
            for one in _simulate_finalists(request, some, task, effort)
            if request.accepts(one.plan) and (job.output_site is None or job.output_site in one.plan.clusters)
        ),
        key=time_order,
    )
    # Step 3: explain refusals and select by the objective.
    refused: tuple[Refusal, ...] = ()
    if request.explain:
        total = job.training.global_batch_size // job.training.micro_batch_size
        refused = explain_refusals(explorer, clusters, slots, placement, total)
    steps, deadline_s, budget = job.training.steps, request.deadline_s, request.budget
    chosen = select_plans(scored, request.objective, steps, deadline_s, budget, request.num_plans)
    if scored and not chosen:
        refused += (explain_unmet_limits(scored, steps),)
    # Step 4: prove the lower bound; `whole` is True where the search was exhaustive.
    best_s = min((one.time_s for one in scored), default=math.inf)
    partial = tally.stopped or bool(request.warm_start)
    proof = 0 if partial else PROOF_EFFORT
    bound_s = min(prove_bound(one.space, every, one.samples, one.requested_size, best_s, proof) for one in explorers)
    whole = all(one.space.exhaustive for one in explorers) and not partial
    layouts = (layout for one in explorers for layout in one.best_layouts.layouts)
    return SearchResult(
        plans=tuple(add_prediction(one, task, request.pool) for one in chosen),
        refused=refused,
        evaluated=tally.evaluated,
        pruned=tally.pruned,
        optimal=bool(chosen) and (whole or best_s <= bound_s * (1 + 2 * OPTIMALITY_GAP)),
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
    thrifty = request.objective != "time" or request.deadline_s is not None or request.budget is not None
    space = SearchSpace(
        workload,
        Routes(request.pool, workload.calibration),
        limits,
        minimise_cost=thrifty,
        needed_cluster=job.output_site,
    )
    width = effort.num_layouts * (4 if thrifty and effort is LARGE_POOL_EFFORT else 1)
    groups = _slots_by_owner(slots, placement.several_owners)
    if limits.framework is not None:
        groups = [some for group in groups for some in _slots_by_library(group)]
    explorer = BranchAndBound(
        space,
        training.global_batch_size,
        training.micro_batch_size,
        BestLayouts(width),
        should_continue=request.should_continue,
        allow_link_bound=not (limits.executable and placement.network),
        warm_start=_warm_start_branches(request, 1),
    )
    explorers = [_run_search(explorer, groups)]
    if training.local_steps > 1 and not limits.executable and limits.framework is None:
        apart = replace(space, workload=replace(workload, local_steps=training.local_steps), _cost_tables={})
        near, found = (
            _warm_start_branches(request, training.local_steps),
            BestLayouts(width, explorer.best_layouts.best),
        )
        explorers.append(_run_search(explorer.for_space(apart, found, near), groups))
    return explorers


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
    )


def _slots_by_owner(slots: dict[str, tuple[ChipSlot, ...]], several_owners: bool) -> list[list[ChipSlot]]:
    """Return the slots that one plan may combine: all, or those of each owner."""
    every = [slot for one in slots.values() for slot in one]
    if several_owners:
        return [every]
    return [[s for s in every if s.owner == owner] for owner in sorted({s.owner for s in every})]


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
    """Return the simulated plans of one search."""
    layouts, limits = search.best_layouts.layouts, request.limits
    return simulate_finalists(layouts, request.job, request.pool, workload, effort, request.num_plans, limits=limits)
