"""`choose_rollouts`: who decodes for which training plan, fastest step first.

Every set of up to `MAX_SETS` of the clusters that are free and linked decodes, or the chip of rank 0 in turns. All are
ranked in closed form (`estimate_step_s`); ranks that do not make a step faster are given back; the best are simulated.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

from isthmus.core.plan import Plan, PlanPart, PlanSet, Refusal
from isthmus.plan.rollouts.decode_option import DecodeOption, decode_option
from isthmus.plan.rollouts.estimate_step import estimate_step_s
from isthmus.plan.rollouts.predict_rollouts import TREND_STALENESS, predict_rollouts
from isthmus.plan.rollouts.rollout_request import RolloutRequest
from isthmus.sim import simulate_rollouts

Chosen = tuple[str, str, int]
"""Cluster, node group and ranks."""

MAX_SET_CLUSTERS = 6
"""Clusters of which all sets are tried; of more, the fastest one to all of them."""
MAX_RANKS = 64
"""Most ranks that decode at a cluster."""
NUM_SIMULATED = 6
"""Options that are simulated."""
NO_SLOWER = 1.005
"""Ranks are given back while a step takes at most this many times as long."""


def choose_rollouts(request: RolloutRequest, found: PlanSet, keep: int = 5) -> PlanSet:
    """Return up to `keep` plans with the ranks that decode and their predictions, and why some plans have none.

    Ranks of a plan that has some stay. Clusters of `placement.rollouts` all decode; with `placement.train` alone the
    chip of rank 0 does, in turns; with neither the planner chooses.
    """
    placement, options, refused = request.job.placement, list[DecodeOption](), list[Refusal]()
    for plan in found.plans:
        if plan.predicted is None:
            continue
        if plan.rollouts or placement.rollouts:
            places = _planned_places(plan) if plan.rollouts else _named_places(request, plan)
            option = places if isinstance(places, Refusal) else decode_option(request, plan, places)
            if isinstance(option, DecodeOption):
                options.append(option)
            else:
                names = (plan.stage_of(0).cluster, *placement.rollouts)
                refused.append(option if isinstance(option, Refusal) else _refusal(names, option))
            continue
        in_turns = decode_option(request, plan, ())
        options += [in_turns] if isinstance(in_turns, DecodeOption) else []
        options += () if placement.train else _chosen_options(request, plan)
    ranked = sorted(options, key=lambda one: (estimate_step_s(one.pipeline), len(one.places)))
    simulated = sorted(
        ((simulate_rollouts(one.pipeline), one) for one in ranked[: max(NUM_SIMULATED, keep)]),
        key=lambda one: (one[0].step_s, len(one[1].places)),
    )
    limit_s = simulated[0][0].step_s * NO_SLOWER if simulated else 0.0
    simulated.sort(key=lambda one: (one[0].step_s > limit_s, len(one[1].places) if one[0].step_s <= limit_s else 0))
    plans = [
        predict_rollouts(request, option, result, _other_staleness(request, option) if not place else {})
        for place, (result, option) in enumerate(simulated)
    ]
    unique = {plan.id: plan for plan in reversed(plans)}
    chosen = [plan for plan in plans if unique[plan.id] is plan][:keep]
    return PlanSet(plans=tuple(chosen), refused=tuple(dict.fromkeys((*refused, *found.refused))))


def _other_staleness(request: RolloutRequest, option: DecodeOption) -> dict[int, float]:
    """Return the seconds of a step under other bounds on staleness, of which the fastest plan tells."""
    if not option.groups:
        return {}
    chosen = [(one.cluster, one.node_group, one.ranks) for one in option.groups]
    found = {
        bound: decode_option(request, option.plan, chosen, bound)
        for bound in TREND_STALENESS
        if bound != request.rl.max_staleness
    }
    return {
        bound: simulate_rollouts(one.pipeline).step_s for bound, one in found.items() if isinstance(one, DecodeOption)
    }


def _refusal(clusters: Sequence[str], text: str) -> Refusal:
    stage = "network" if text.startswith("no link") else "compute"
    return Refusal(clusters=tuple(dict.fromkeys(clusters)), reason=text, stage=stage)


def _planned_places(plan: Plan) -> list[Chosen]:
    """Return the ranks that a plan has already and that start with the job."""
    counts = Counter((one.cluster, one.node_group) for one in plan.rollouts if not one.joins)
    return [(cluster, group, count) for (cluster, group), count in counts.items()]


def _named_places(request: RolloutRequest, plan: Plan) -> list[Chosen] | Refusal:
    """Return a rank at each cluster of `placement.rollouts`, on the node group with most free chips."""
    known, places = {one.name for one in request.pool.clusters}, list[Chosen]()
    for name in request.job.placement.rollouts:
        if name not in known:
            text = f"placement.rollouts: the pool has no cluster '{name}'; it has {', '.join(sorted(known))}"
            return _refusal((name,), text)
        free = _free_beside(request, plan, name)
        if free is None:
            return _refusal((name,), f"{name} has no free chip for rollouts")
        places.append((name, free[0], 1))
    return places


def _free_beside(request: RolloutRequest, plan: Plan, cluster: str) -> tuple[str, int] | None:
    """Return the node group of a cluster with most free chips beside those that train, and how many; None for none."""
    left = request.free(cluster)
    for group, taken in PlanPart.from_plan(plan, cluster).chips.items():
        left[group] = left.get(group, 0) - taken
    group, count = max(left.items(), key=lambda one: (one[1], one[0]), default=("", 0))
    return (group, count) if count >= 1 else None


def _chosen_options(request: RolloutRequest, plan: Plan) -> Iterator[DecodeOption]:
    """Yield an option for each set of clusters, with as few ranks as are as fast."""
    placement, holder = request.job.placement, plan.stage_of(0).cluster
    free: list[Chosen] = []
    for cluster in sorted(request.pool.clusters, key=lambda one: one.name):
        linked = cluster.name == holder or {(holder, cluster.name), (cluster.name, holder)} <= request.rates.keys()
        found = _free_beside(request, plan, cluster.name)
        if linked and found and placement.admits(cluster.name, cluster.owner, cluster.region):
            free.append((cluster.name, found[0], min(found[1], MAX_RANKS, request.num_in_flight)))
    alone = {one: decode_option(request, plan, (one,)) for one in free}
    usable = [one for one in free if isinstance(alone[one], DecodeOption)]
    if len(usable) <= MAX_SET_CLUSTERS:
        sets = [some for count in range(1, len(usable) + 1) for some in itertools.combinations(usable, count)]
    else:
        speed = {one: estimate_step_s(made.pipeline) for one in usable if isinstance(made := alone[one], DecodeOption)}
        order = sorted(usable, key=lambda one: speed[one])
        sets = [tuple(order[:count]) for count in range(1, len(order) + 1)]
    for some in sets:
        if option := _fewest_ranks(request, plan, some):
            yield option


def _fewest_ranks(request: RolloutRequest, plan: Plan, chosen: Sequence[Chosen]) -> DecodeOption | None:
    """Halve the ranks of each cluster while a step stays as fast."""
    best = decode_option(request, plan, chosen)
    if not isinstance(best, DecodeOption):
        return None
    limit_s, now, changed = estimate_step_s(best.pipeline) * NO_SLOWER, list(chosen), True
    while changed:
        changed = False
        for place, (cluster, group, ranks) in enumerate(now):
            fewer = [*now[:place], (cluster, group, ranks // 2), *now[place + 1 :]]
            tried = decode_option(request, plan, fewer) if ranks > 1 else None
            if isinstance(tried, DecodeOption) and estimate_step_s(tried.pipeline) <= limit_s:
                best, now, changed = tried, fewer, True
    return best
