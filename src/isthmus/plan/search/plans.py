"""`search_plans` and `make_plans`: candidate plans for a job on a pool, best first, with their reasons."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from isthmus.core.job import Job
from isthmus.core.model import Model
from isthmus.core.plan import Plan, PlanSet, Refusal
from isthmus.core.pool import Pool
from isthmus.plan.profile.model import ModelProfile, profile_model
from isthmus.plan.search.bound import MET, prove_bound
from isthmus.plan.search.explore import BranchKey, Explorer, Tally, branch_of
from isthmus.plan.search.layout import Layout
from isthmus.plan.search.limits import Limits
from isthmus.plan.search.pinned import pinned
from isthmus.plan.search.refine import cells, refine
from isthmus.plan.search.refuse import refusals
from isthmus.plan.search.score import calibration_for, score
from isthmus.plan.search.space import Space
from isthmus.plan.search.spots import FreeChips, Spot, eligible_clusters, spots_of
from isthmus.plan.search.task import Task
from isthmus.plan.search.unlike import UnlikeSizes
from isthmus.plan.search.ways import Ways
from isthmus.plan.search.write import Scored, predicted, write_plan

Objective = Literal["time", "cost", "energy", "pareto"]

SMALL_POOL = 32
"""Pools of at most so many chips are cheap to simulate: there the simulator sees more."""


@dataclass(frozen=True)
class Effort:
    """How much the simulator is asked.

    `width` layouts are kept by their estimate, beside the best of each set of clusters. They are simulated in
    that order until `cells` (stages x micro-batches) are spent or an estimate is `close` times the best time.
    Of the best `refined` layers are then moved one by one, for as many cells again.
    """

    width: int
    cells: int
    close: float
    refined: int


PROOF = 800_000
"""Stages that the proof of `bound_s` looks at, at most."""

LARGE, SMALL = Effort(8, 2000, 1.1, 2), Effort(64, 5000, 1.25, 16)


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
    job, pool, placement = question.job, question.pool, question.job.placement
    task = _task(question)
    limits = pinned(question.limits, job, task)
    thrifty = question.objective != "time" or question.deadline_s is not None or question.budget is not None
    space = Space(task, Ways(pool, task.calibration), limits, thrifty=thrifty)
    clusters = sorted(eligible_clusters(pool, placement), key=lambda one: one.name)
    spots = {cluster.name: spots_of(pool, cluster, placement, question.free) for cluster in clusters}
    chips = sum(spot.chips for one in spots.values() for spot in one)
    effort = SMALL if chips <= SMALL_POOL else LARGE
    explorer = Explorer(
        space,
        job.training.global_batch_size,
        job.training.micro_batch_size,
        width=effort.width * (4 if thrifty and effort is LARGE else 1),
        go_on=question.go_on,
        link_bound=not (limits.executable and placement.network),
        near=_near(question, 1),
    )
    explorers = [explorer]
    if job.training.local_steps > 1 and not limits.executable:
        apart = replace(space, task=replace(task, local_steps=job.training.local_steps), _seats={})
        near = _near(question, job.training.local_steps)
        explorers.append(replace(explorer, space=apart, near=near, _options={}, _top=[], _best_of={}))
    for place, one in enumerate(explorers):
        one.best = explorers[0].best
        explorers[place] = _explored(one, _owner_groups(spots, placement.several_owners))
    explorer = explorers[0]
    scored = sorted(
        (final for one in explorers for final in _finals(question, one.found, task, effort)), key=_by_time
    )
    refused: tuple[Refusal, ...] = ()
    if question.explain:
        total = job.training.global_batch_size // job.training.micro_batch_size
        refused = refusals(explorer, clusters, spots, placement, total)
    chosen = _varied(_choose(question, scored), question.keep)
    every = [spot for one in spots.values() for spot in one]
    best_s = min((one.time_s for one in scored), default=math.inf)
    partial = explorer.tally.stopped or bool(question.near)
    bound_s = min(
        prove_bound(
            one.space, every, job.training.global_batch_size, job.training.micro_batch_size, best_s,
            0 if partial else PROOF,
        )
        for one in explorers
    )  # fmt: skip
    whole = all(one.space.whole for one in explorers) and not partial
    return Answer(
        plans=tuple(predicted(one, task) for one in chosen),
        refused=refused + _unmet(question, scored, chosen),
        evaluated=explorer.tally.evaluated,
        pruned=explorer.tally.pruned,
        optimal=bool(chosen) and (whole or best_s <= bound_s * (1 + 2 * MET)),
        bound_s=bound_s,
        estimate_s=min((layout.estimate_s for one in explorers for layout in one.found), default=math.inf),
        scored=tuple(chosen),
    )


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
    return unlike


def _near(question: Question, local_steps: int) -> frozenset[BranchKey] | None:
    """Return the branches of the old layouts with so many local steps, None where all are searched."""
    if not question.near:
        return None
    return frozenset(branch_of(one) for one in question.near if one.local_steps == local_steps)


def _finals(question: Question, layouts: Sequence[Layout], task: Task, effort: Effort) -> list[Scored]:
    """Write, simulate and refine the best layouts; return them by simulated time.

    The effort is spent on these alone: what else is searched for does not change what they come to.
    """
    executable = question.limits.executable

    def scored(layout: Layout) -> Scored:
        plan = write_plan(layout, question.job, task, executable=executable)
        return Scored(layout, plan, score(plan, question.pool, task))

    finals: list[Scored] = []
    spent, known = 0, set[tuple[str, ...]]()
    for layout in sorted(layouts, key=lambda one: (one.estimate_s, one.num_chips)):
        best_s = min((one.time_s for one in finals), default=math.inf)
        new = layout.clusters not in known and len(known) < question.keep
        poor = spent > effort.cells or layout.estimate_s > effort.close * best_s
        if len(finals) >= 3 and poor and not new:
            continue
        finals.append(scored(layout))
        spent += cells(layout)
        known.add(layout.clusters)
    finals.sort(key=_by_time)
    left = max(0, effort.cells - spent) + effort.cells
    for place, one in enumerate(finals[: effort.refined]):
        finals[place] = refine(one, scored, left // effort.refined // cells(one.layout))
    unique = {one.plan.id: one for one in finals}
    return list(unique.values())


def _by_time(one: Scored) -> tuple[float, int, str]:
    return one.time_s, one.layout.num_chips, one.plan.id


def _choose(question: Question, scored: Sequence[Scored]) -> list[Scored]:
    """Return the plans that meet deadline and budget, by the objective (Pareto: none is worse in all)."""
    steps = question.job.training.steps
    kept = [
        one
        for one in scored
        if (question.deadline_s is None or steps * one.time_s <= question.deadline_s)
        and (question.budget is None or steps * one.cost <= question.budget)
    ]
    if question.objective == "cost":
        return sorted(kept, key=lambda one: (one.cost, one.time_s, one.plan.id))
    if question.objective == "energy":
        return sorted(kept, key=lambda one: (one.energy_j, one.time_s, one.plan.id))
    if question.objective == "pareto":
        return [one for one in kept if not any(_beats(other, one) for other in kept)]
    return kept


def _varied(ordered: Sequence[Scored], keep: int) -> list[Scored]:
    """Return `keep` plans in the same order: the best, the best of others, then the next best.

    Others use other clusters, or reduce gradients every step where the best does not.
    """
    first: dict[tuple[tuple[str, ...], int], Scored] = {}
    for one in ordered:
        first.setdefault((one.layout.clusters, one.layout.local_steps), one)
    best = {id(one) for one in first.values()}
    others = [one for one in ordered if id(one) not in best]
    wanted = {one.plan.id for one in [*first.values(), *others][:keep]}
    return [one for one in ordered if one.plan.id in wanted]


def _beats(one: Scored, other: Scored) -> bool:
    mine, others = (one.time_s, one.cost, one.energy_j), (other.time_s, other.cost, other.energy_j)
    return all(a <= b for a, b in zip(mine, others, strict=True)) and mine != others


def _unmet(question: Question, scored: Sequence[Scored], chosen: Sequence[Scored]) -> tuple[Refusal, ...]:
    """Say how far deadline or budget are from what there is, where nothing keeps them."""
    if chosen or not scored:
        return ()
    steps = question.job.training.steps
    fastest, cheapest = scored[0], min(scored, key=lambda one: one.cost)
    reason = (
        f"no plan keeps deadline and budget: the fastest takes {steps * fastest.time_s:.0f} s for {steps} "
        f"steps, the cheapest costs {steps * cheapest.cost:.2f}"
    )
    return (Refusal(clusters=fastest.layout.clusters, reason=reason),)
