"""`with_rollouts`: plans of a job with `task: rl`, with a rank that decodes at each cluster of `placement.rollouts`."""

from __future__ import annotations

from collections.abc import Mapping

from isthmus.control.placement.relay_sources import relay_sources
from isthmus.core.job import Job
from isthmus.core.plan import Plan, PlanPart, PlanSet, Refusal
from isthmus.core.plan_parts.rollout_place import RolloutPlace
from isthmus.core.pool import Pool


def with_rollouts(found: PlanSet, job: Job, pool: Pool, free_chips: Mapping[str, Mapping[str, int]]) -> PlanSet:
    """Return the plans with a chip for decoding at each cluster that the job names, and why some have none.

    The chip is of the node group with the most free chips beside those that train. A cluster without one joins the job
    once it has one, if `least_rollouts` others can start. Weights go from the cluster of rank
    0, over clusters that decode where their links are wider (`relay_sources`): a plan without a link from there, or
    back, is refused.
    """
    if not job.placement.rollouts:
        return found
    plans, refused = [], []
    for plan in found.plans:
        places, problem = _places(plan, job, pool, free_chips)
        if problem is not None:
            refused.append(problem)
            continue
        why = "; ".join([*([plan.why] if plan.why else []), *_told(places)])
        plans.append(plan.model_copy(update={"rollouts": places, "why": why}))
    return PlanSet(plans=tuple(plans), refused=tuple(dict.fromkeys((*refused, *found.refused))))


def _told(places: tuple[RolloutPlace, ...]) -> list[str]:
    """Return what joins a plan later; where it decodes is said with its prediction."""
    later = [one.cluster for one in places if one.joins]
    return [f"{', '.join(later)} join once their chips are free"] if later else []


def _places(
    plan: Plan, job: Job, pool: Pool, free_chips: Mapping[str, Mapping[str, int]]
) -> tuple[tuple[RolloutPlace, ...], Refusal | None]:
    """Return where a plan decodes; or what is missing, where it is without `least_rollouts` clusters."""
    holder, places, problems = plan.stage_of(0).cluster, list[RolloutPlace](), list[Refusal]()
    known = {one.name: one for one in pool.clusters}
    linked = {(one.source, one.target): one.bandwidth_gbps for one in pool.links}
    sources = relay_sources(holder, job.placement.rollouts, linked)
    trains = {stage.cluster for stage in plan.stages}
    for name in job.placement.rollouts:
        if name not in known:
            text = f"placement.rollouts: the pool has no cluster '{name}'; it has {', '.join(sorted(known))}"
            problems.append(Refusal(clusters=(name,), reason=text, stage="compute"))
            continue
        if name != holder and not {(holder, name), (name, holder)} <= linked.keys():
            text = f"no link between {holder} and {name} for the weights and trajectories"
            return (), Refusal(clusters=(holder, name), reason=text, stage="network")
        left = dict(free_chips.get(name, {}))
        for group, taken in PlanPart.from_plan(plan, name).chips.items():
            left[group] = left.get(group, 0) - taken
        group, count = max(left.items(), key=lambda item: item[1], default=("", 0))
        if count < 1:
            text = f"{name} has no free chip for rollouts"
            problems.append(Refusal(clusters=(name,), reason=text, stage="compute"))
            group = max(known[name].node_groups, key=lambda one: one.nodes * one.chips_per_node).name
        if count >= 1 or name not in trains:
            places.append(
                RolloutPlace(cluster=name, node_group=group, joins=count < 1, sources=sources.get(name, ()))
            )  # fmt: skip
    if problems and sum(not one.joins for one in places) < job.placement.least_rollouts:
        return (), problems[0]
    return tuple(places), None
