"""`forecast_rollouts`: a written plan of a job with `task: rl`, with the prediction of a whole step."""

from __future__ import annotations

from collections import Counter

from isthmus.core.errors import PlanError
from isthmus.core.plan import Plan, Prediction
from isthmus.plan.rollouts.decode_option import DecodeOption, decode_option
from isthmus.plan.rollouts.predict_rollouts import predict_rollouts
from isthmus.plan.rollouts.rollout_request import RolloutRequest
from isthmus.plan.time.predict import PlanForecast
from isthmus.sim import simulate_rollouts


def forecast_rollouts(request: RolloutRequest, plan: Plan, forecast: PlanForecast) -> Plan:
    """Return `plan`, whose training takes what `forecast` says, with its decoding predicted.

    Raises `PlanError` where a rank that decodes has no memory or no link.
    """
    trained = Prediction(
        iteration_s=forecast.iteration_s, tgs_tokens_per_card_s=forecast.tgs_tokens_per_card_s,
        samples_per_s=forecast.samples_per_s, cost_per_iteration=forecast.cost, mfu_fraction=forecast.mfu_fraction,
        peak_memory_bytes=tuple(round(one.total_bytes) for one in forecast.memory), currency=request.pool.currency,
    )  # fmt: skip
    ranks = Counter((one.cluster, one.node_group) for one in plan.rollouts)
    chosen = [(cluster, group, count) for (cluster, group), count in ranks.items()]
    option = decode_option(request, plan.model_copy(update={"predicted": trained, "why": ""}), chosen)
    if not isinstance(option, DecodeOption):
        raise PlanError(f"plan {plan.id}: {option}", hint="choose other clusters for its rollouts, or add the link")
    found = predict_rollouts(request, option, simulate_rollouts(option.pipeline), {})
    return found.model_copy(update={"id": plan.id})
