"""`search_plans` and `make_plans`: candidate plans for a job on a pool, best first, with their reasons."""

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
"""Pools of at most so many chips are cheap to simulate: there the simulator sees more."""

PROOF = 800_000
"""Stages that the proof of `bound_s` looks at, at most."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked: a job on a pool, by which objective, within which limits.

    `free` maps cluster and node group to free chips (None: all). `deadline_s` bounds the seconds of the whole
    job, `budget` its price; within either the objective decides. `go_on(tally, best)` is asked at every chain
    that is cut and ends the search by returning False: the best so far is the answer. `near` plans again
    after a small change: only the islands, micro-batches and schedules of these layouts are searched.
    """

    job: Job
    model: Model | ModelProfile
    pool: Pool
    free: FreeChips | None = None
    objective: Objective = "time"
    deadline_s: float | None = None
    budget: float | None = None
    limits: Limits = field(default_factory=Limits)
    keep: int = 5
    explain: bool = True
    near: tuple[Layout, ...] = ()
    go_on: Callable[[Tally, Layout | None], bool] = lambda *_: True


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Plans, best first, and what the search did.

    `bound_s` is below the iteration of every plan of the space, thinned nowhere. `optimal`: no dimension of
    the space was thinned or left out, or the bound meets the fastest plan.
    """

    plans: tuple[Plan, ...]
    refused: tuple[Refusal, ...]
    evaluated: int
    pruned: int
    optimal: bool
    bound_s: float
    estimate_s: float
    scored: tuple[Scored, ...] = ()

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layouts of the plans: what to plan `near` after a small change."""
        return tuple(one.layout for one in self.scored)

    def as_dict(self, seconds: float) -> dict[str, Any]:
        """Return the answer as `isthmus plan --json` prints it; `seconds` is what the search took."""
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

    `free` maps cluster and node group to free chips; None plans on an empty pool. A job without any plan gets
    an empty list and the reasons. `executable` keeps to what our runtime runs. Raises `ModelError` for a
    model that cannot be profiled, `PlanError` for degrees (`job.parallel`) that no pool could keep.
    """
    question = Question(
        job=job, model=model, pool=pool, free=free, keep=keep, limits=Limits(executable=executable)
    )
    answer = search_plans(question)
    return PlanSet(plans=answer.plans, refused=answer.refused)


def search_plans(question: Question) -> Answer:
    """Return the best plans for a question, simulated.

    Raises `ModelError` for a model without a profile, `PlanError` for degrees that no pool could keep. The
    same question has the same answer, whatever the order of clusters in the pool.
    """
    job, placement = question.job, question.job.placement
    task = _task(question)
    clusters = sorted(eligible_clusters(question.pool, placement), key=lambda one: one.name)
    spots = {one.name: spots_of(question.pool, one, placement, question.free) for one in clusters}
    every = [spot for one in spots.values() for spot in one]
    effort = SMALL if sum(spot.chips for spot in every) <= SMALL_POOL else LARGE
    explorers = _searched(question, task, spots, effort)
    explorer, tally = explorers[0], explorers[0].tally
    scored = sorted((one for some in explorers for one in _finals(question, some, task, effort)), key=by_time)
    refused: tuple[Refusal, ...] = ()
    if question.explain:
        total = job.training.global_batch_size // job.training.micro_batch_size
        refused = refusals(explorer, clusters, spots, placement, total)
    steps, deadline_s, budget = job.training.steps, question.deadline_s, question.budget
    chosen = choose(scored, question.objective, steps, deadline_s, budget, question.keep)
    if scored and not chosen:
        refused += (unmet(scored, steps),)
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
    """Return the search of the space, and that of the space with local steps where the job admits them."""
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
    """Return the spots that may be used together: all, or those of each owner."""
    every = [spot for one in spots.values() for spot in one]
    if several_owners:
        return [every]
    return [[s for s in every if s.owner == owner] for owner in sorted({s.owner for s in every})]


def _explored(explorer: Explorer, groups: Sequence[Sequence[Spot]]) -> Explorer:
    """Search with one micro-batch size for all islands, then with unlike ones; return what found all."""
    for group in groups:
        explorer.run(group)
    unlike = UnlikeSizes.after(explorer)
    for group in groups:
        unlike.run(group)
    unlike.forget()
    return unlike


def _near(question: Question, local_steps: int) -> frozenset[BranchKey] | None:
    """Return the branches of the old layouts with so many local steps, None where all are searched."""
    if not question.near:
        return None
    return frozenset(branch_of(one) for one in question.near if one.local_steps == local_steps)


def _finals(question: Question, explorer: Explorer, task: Task, effort: Effort) -> list[Scored]:
    """Return the plans of one search by simulated time."""
    layouts, executable = explorer.found.layouts, question.limits.executable
    return finals(layouts, question.job, question.pool, task, effort, question.keep, executable=executable)
