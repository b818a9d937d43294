"""`search_plans` and `make_plans`: candidate plans for a job on a pool, best first, with reasons."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from isthmus.core.job import Job
from isthmus.core.model import Model
from isthmus.core.plan import Plan, PlanSet, Refusal
from isthmus.core.pool import Pool
from isthmus.plan.profile.model_profile import ModelProfile, profile_model
from isthmus.plan.search.bound.prove_bound import MET, prove_bound
from isthmus.plan.search.chains.space import Space
from isthmus.plan.search.compose.best_found import Found
from isthmus.plan.search.compose.branch import BranchKey, branch_of
from isthmus.plan.search.compose.layout import Layout
from isthmus.plan.search.costs.fixed_degrees import pinned
from isthmus.plan.search.costs.limits import Limits
from isthmus.plan.search.costs.routes import Ways
from isthmus.plan.search.costs.slots import FreeChips, Spot, eligible_clusters, spots_of
from isthmus.plan.search.costs.task import Task
from isthmus.plan.search.explore.branch_and_bound import Explorer, Tally
from isthmus.plan.search.explore.mixed_sizes import UnlikeSizes
from isthmus.plan.search.finish.choose import Objective, choose, unmet
from isthmus.plan.search.finish.explain_refusals import refusals
from isthmus.plan.search.finish.score import calibration_for
from isthmus.plan.search.finish.simulate_finalists import LARGE, SMALL, Effort, by_time, finals
from isthmus.plan.search.finish.write_plan import Scored, predicted

SMALL_POOL = 32
"""Pools of at most this many chips get the larger simulation effort: their plans are cheap to simulate."""

PROOF = 800_000
"""Upper limit on the stages checked while proving `bound_s`."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A plan search request: a job on a pool, an objective and limits."""

    job: Job
    model: Model | ModelProfile
    pool: Pool
    # Free chips by cluster and node group; None: all chips are free.
    free: FreeChips | None = None
    objective: Objective = "time"
    # Longest time of the whole job; the objective decides among plans within it.
    deadline_s: float | None = None
    # Highest price of the whole job.
    budget: float | None = None
    limits: Limits = field(default_factory=Limits)
    # Most plans to return.
    keep: int = 5
    # Whether to explain the refused combinations of clusters.
    explain: bool = True
    # Layouts of an earlier search: only their replica groups, micro-batch sizes and schedules are searched.
    near: tuple[Layout, ...] = ()
    # Called with (stats, best layout) after each evaluated option; False stops the search with the best plans
    # so far.
    go_on: Callable[[Tally, Layout | None], bool] = lambda *_: True


@dataclass(frozen=True, kw_only=True)
class Answer:
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
    scored: tuple[Scored, ...] = ()

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layouts of the plans: pass them as `near` to replan after a small change."""
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
    free: FreeChips | None = None,
    *,
    keep: int = 5,
    executable: bool = True,
) -> PlanSet:
    """Return up to `keep` plans for `job`, predicted fastest first, and the refused cluster combinations.

    `free` maps cluster and node group to free chips; None means an empty pool. A job without any plan gets an
    empty list and the reasons. `executable` restricts the search to plans that the Isthmus runtime supports.

    Raises `ModelError` for a model that cannot be profiled, and `PlanError` for degrees (`job.parallel`) that
    no pool can satisfy.
    """
    question = Question(
        job=job, model=model, pool=pool, free=free, keep=keep, limits=Limits(executable=executable)
    )
    answer = search_plans(question)
    return PlanSet(plans=answer.plans, refused=answer.refused)


def search_plans(question: Question) -> Answer:
    """Return the best plans for a request, simulated.

    The result is deterministic and independent of the order of clusters in the pool. Raises `ModelError` for
    a model without a profile, and `PlanError` for degrees that no pool can satisfy.
    """
    job, placement = question.job, question.job.placement
    # Step 1: collect the free slots that the placement admits.
    task = _task(question)
    clusters = sorted(eligible_clusters(question.pool, placement), key=lambda one: one.name)
    slots = {one.name: spots_of(question.pool, one, placement, question.free) for one in clusters}
    every = [slot for one in slots.values() for slot in one]
    effort = SMALL if sum(slot.chips for slot in every) <= SMALL_POOL else LARGE
    # Step 2: search by the closed-form estimate, then simulate the best layouts.
    explorers = _searched(question, task, slots, effort)
    explorer, tally = explorers[0], explorers[0].tally
    scored = sorted((one for some in explorers for one in _finals(question, some, task, effort)), key=by_time)
    # Step 3: explain refusals and select by the objective.
    refused: tuple[Refusal, ...] = ()
    if question.explain:
        total = job.training.global_batch_size // job.training.micro_batch_size
        refused = refusals(explorer, clusters, slots, placement, total)
    steps, deadline_s, budget = job.training.steps, question.deadline_s, question.budget
    chosen = choose(scored, question.objective, steps, deadline_s, budget, question.keep)
    if scored and not chosen:
        refused += (unmet(scored, steps),)
    # Step 4: prove the lower bound; `whole` is True where the search was exhaustive.
    best_s = min((one.time_s for one in scored), default=math.inf)
    partial = tally.stopped or bool(question.near)
    proof = 0 if partial else PROOF
    bound_s = min(
        prove_bound(one.space, every, one.samples, one.asked_size, best_s, proof) for one in explorers
    )
    whole = all(one.space.whole for one in explorers) and not partial
    layouts = (layout for one in explorers for layout in one.found.layouts)
    return Answer(
        plans=tuple(predicted(one, task) for one in chosen),
        refused=refused,
        evaluated=tally.evaluated,
        pruned=tally.pruned,
        optimal=bool(chosen) and (whole or best_s <= bound_s * (1 + 2 * MET)),
        bound_s=bound_s,
        estimate_s=min((one.estimate_s for one in layouts), default=math.inf),
        scored=tuple(chosen),
    )


def _searched(
    question: Question, task: Task, spots: dict[str, tuple[Spot, ...]], effort: Effort
) -> list[Explorer]:
    """Search the space and, where the job allows local steps, a second space that uses them."""
    job = question.job
    training, placement, limits = job.training, job.placement, pinned(question.limits, job, task)
    thrifty = question.objective != "time" or question.deadline_s is not None or question.budget is not None
    space = Space(task, Ways(question.pool, task.calibration), limits, thrifty=thrifty)
    width = effort.width * (4 if thrifty and effort is LARGE else 1)
    groups = _owner_groups(spots, placement.several_owners)
    explorer = Explorer(
        space,
        training.global_batch_size,
        training.micro_batch_size,
        Found(width),
        go_on=question.go_on,
        link_bound=not (limits.executable and placement.network),
        near=_near(question, 1),
    )
    explorers = [_explored(explorer, groups)]
    if training.local_steps > 1 and not limits.executable:
        apart = replace(space, task=replace(task, local_steps=training.local_steps), _seats={})
        near, found = _near(question, training.local_steps), Found(width, explorer.found.best)
        explorers.append(_explored(explorer.anew(apart, found, near), groups))
    return explorers


def _task(question: Question) -> Task:
    model, training = question.model, question.job.training
    profile = profile_model(model) if isinstance(model, Model) else model
    return Task(
        profile=profile,
        sequence_length=training.sequence_length,
        precision=training.precision,
        calibration=calibration_for(question.pool),
        optimizer_on_host=training.optimizer_on_host,
    )


def _owner_groups(spots: dict[str, tuple[Spot, ...]], several_owners: bool) -> list[list[Spot]]:
    """Return the slots that one plan may combine: all, or those of each owner."""
    every = [slot for one in spots.values() for slot in one]
    if several_owners:
        return [every]
    return [[s for s in every if s.owner == owner] for owner in sorted({s.owner for s in every})]


def _explored(explorer: Explorer, groups: Sequence[Sequence[Spot]]) -> Explorer:
    """Search with one micro-batch size, then with mixed sizes; return the search with the layouts of both."""
    for group in groups:
        explorer.run(group)
    unlike = UnlikeSizes.after(explorer)
    for group in groups:
        unlike.run(group)
    unlike.forget()
    return unlike


def _near(question: Question, local_steps: int) -> frozenset[BranchKey] | None:
    """Return the branches of the warm-start layouts with `local_steps`; None: search all branches."""
    if not question.near:
        return None
    return frozenset(branch_of(one) for one in question.near if one.local_steps == local_steps)


def _finals(question: Question, explorer: Explorer, task: Task, effort: Effort) -> list[Scored]:
    """Return the simulated plans of one search."""
    layouts, executable = explorer.found.layouts, question.limits.executable
    return finals(layouts, question.job, question.pool, task, effort, question.keep, executable=executable)
