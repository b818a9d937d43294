"""`plan_rollouts`: the search for plans of a job with `task: rl`: who trains, and who decodes beside it."""

from __future__ import annotations

from dataclasses import replace

from isthmus.core.model import Model
from isthmus.core.plan import PlanSet
from isthmus.plan.profile.model_profile import profile_model
from isthmus.plan.rollouts.choose_rollouts import choose_rollouts
from isthmus.plan.rollouts.rollout_request import RolloutRequest
from isthmus.plan.rollouts.training_choices import training_choices
from isthmus.plan.search.search_plans import SearchRequest, SearchResult, search_plans


def plan_rollouts(request: SearchRequest) -> SearchResult:
    """Return the plans of `search_plans` with their rollouts, fastest whole step first; the search's bound is 0.

    Training is searched on all clusters that the job admits, and on fewer of them so that others can decode.
    """
    profile = profile_model(request.model) if isinstance(request.model, Model) else request.model
    found = [
        search_plans(replace(request, job=job, explain=request.explain and not number))
        for number, job in enumerate(training_choices(request.job, request.pool))
    ]
    plans = {plan.id: plan for one in reversed(found) for plan in one.plans}
    decoding = RolloutRequest(job=request.job, pool=request.pool, profile=profile, free_chips=request.free_chips)
    made = choose_rollouts(decoding, PlanSet(plans=tuple(plans.values()), refused=found[0].refused), request.num_plans)
    return replace(
        found[0], plans=made.plans, refused=made.refused, optimal=False, bound_s=0.0, scored=(),
        evaluated=sum(one.evaluated for one in found), pruned=sum(one.pruned for one in found),
    )  # fmt: skip
