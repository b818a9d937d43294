"""`predict_rollouts`: a training plan with its ranks that decode, and the prediction of a whole step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from isthmus.core.plan import Plan, Prediction
from isthmus.core.plan_parts.rollout_prediction import RolloutPrediction, SitePrediction
from isthmus.core.units import format_seconds
from isthmus.plan.rollouts.decode_option import DecodeOption
from isthmus.plan.rollouts.rollout_request import RolloutRequest
from isthmus.sim import RolloutResult

TOKEN_BYTES, SAMPLE_BYTES = 12, 200
"""Bytes of a token and its log-probability on a link, and of the orders and reports of a sample beside them."""
TREND_STALENESS = (0, 1, 2)
"""Bounds on staleness whose steps a prediction names beside the job's."""


def predict_rollouts(
    request: RolloutRequest, option: DecodeOption, found: RolloutResult, others: Mapping[int, float]
) -> Plan:
    """Return the plan of an option with the prediction of its simulation; `others` are steps under other staleness."""
    plan = option.plan
    if plan.predicted is None:
        raise ValueError(f"plan {plan.id} has no prediction")
    price = plan.predicted.cost_per_iteration / max(plan.predicted.iteration_s, 1e-12)
    for one in option.groups:
        group = request.pool.node_group(one.cluster, one.node_group)
        price += one.ranks * group.price_per_chip_hour / 3600
    decoding = RolloutPrediction(
        train_s=option.pipeline.train_s, wait_samples_s=found.wait_samples_s, staleness=found.staleness,
        sites=_sites(option, found), weights_bytes=round(request.version_bytes),
        link_bytes=_link_bytes(request, option, found),
        other_staleness_s=dict(others),
    )  # fmt: skip
    return plan.model_copy(
        update={
            "id": _plan_id(option),
            "rollouts": option.places,
            "why": "; ".join(part for part in (plan.why, explain_rollouts(option, decoding, found.step_s)) if part),
            "predicted": _whole_step(plan.predicted, request, decoding, found.step_s, price),
        }
    )


def _whole_step(
    trained: Prediction, request: RolloutRequest, decoding: RolloutPrediction, step_s: float, price: float
) -> Prediction:
    """Return the prediction of training as one of whole steps, in which its rates are lower."""
    share = trained.iteration_s / step_s if step_s else 1.0
    measured = "measured (rl.lengths)" if request.rl.lengths else "not known: a mean of a quarter of the longest"
    notes = [f"lengths of responses are {measured}", "rewards take no time", "sites relay weights"]
    if request.num_passes:
        notes.append(f"{request.num_passes} forward passes beside training, for rl.kl and rl.old, in closed form")
    return trained.model_copy(
        update={
            "iteration_s": step_s,
            "samples_per_s": request.num_samples / step_s,
            "tgs_tokens_per_card_s": trained.tgs_tokens_per_card_s * share,
            "mfu_fraction": trained.mfu_fraction * share,
            "wan_gbps": tuple(one * share for one in trained.wan_gbps),
            "cost_per_iteration": price * step_s,
            "rollouts": decoding,
            "assumptions": (*trained.assumptions, *notes),
        }
    )


def _sites(option: DecodeOption, found: RolloutResult) -> tuple[SitePrediction, ...]:
    """Return the seconds of each group, the mean of its ranks."""
    groups = option.groups
    if not groups:
        one, cluster, slots = found.sites[0], option.plan.stage_of(0).cluster, option.pipeline.sites[0].slots
        return (
            SitePrediction(
                cluster=cluster, ranks=1, sequences=slots, tokens_per_s=one.tokens / found.step_s,
                decode_s=one.decode_s, wait_samples_s=0.0, wait_weights_s=0.0,
            ),
        )  # fmt: skip
    made, place = [], 0
    for group in groups:
        here = found.sites[place : place + group.ranks]
        place += group.ranks
        made.append(
            SitePrediction(
                cluster=group.cluster, ranks=group.ranks, sequences=group.sequences,
                tokens_per_s=sum(one.tokens for one in here) / found.step_s,
                decode_s=sum(one.decode_s for one in here) / group.ranks,
                wait_samples_s=sum(one.wait_samples_s for one in here) / group.ranks,
                wait_weights_s=sum(one.wait_weights_s for one in here) / group.ranks,
                weights_way=group.weights_way if len(group.weights_way) > 1 else (),
            )
        )  # fmt: skip
    return tuple(made)


def _link_bytes(request: RolloutRequest, option: DecodeOption, found: RolloutResult) -> dict[str, float]:
    """Return the bytes of a step over each link: versions once over each, prompts down and tokens up."""
    sent: defaultdict[tuple[str, str], float] = defaultdict(float)
    versions: dict[tuple[str, str], float] = {}
    holder, place = option.plan.stage_of(0).cluster, 0
    mean = sum(request.lengths) / len(request.lengths)
    for group in option.groups:
        here = found.sites[place : place + group.ranks]
        place += group.ranks
        for ends in zip(group.weights_way, group.weights_way[1:], strict=False):
            versions[ends] = max(versions.get(ends, 0.0), *(one.versions for one in here))
        if group.cluster != holder:
            tokens = sum(one.tokens for one in here)
            samples = tokens / mean
            sent[group.cluster, holder] += tokens * TOKEN_BYTES + samples * SAMPLE_BYTES
            sent[holder, group.cluster] += samples * (4 * request.rl.max_prompt_tokens + SAMPLE_BYTES)
    for ends, count in versions.items():
        sent[ends] += count * request.version_bytes
    return {f"{a}>{b}": num for (a, b), num in sorted(sent.items())}


def _plan_id(option: DecodeOption) -> str:
    """Return an id that tells apart options of one training plan."""
    if not option.groups or option.plan.rollouts:
        return option.plan.id
    ranks = "-".join(f"{one.cluster}{one.ranks}" for one in option.groups)
    return f"{option.plan.id}-{ranks}"[:63]


def explain_rollouts(option: DecodeOption, decoding: RolloutPrediction, step_s: float) -> str:
    """Return who decodes and what bounds a step, as text."""
    if option.groups:
        who = ", ".join(f"{one.cluster} ({one.ranks} x {one.sequences} sequences)" for one in option.groups)
        text = f"decodes at {who}"
    else:
        one = decoding.sites[0]
        text = f"decodes in turns at {one.cluster}, {one.sequences} sequences at once"
    share = decoding.train_s / step_s
    text += f"; training is {share:.0%} of a step"
    if share < 0.97:
        busiest = max(decoding.sites, key=lambda one: one.decode_s)
        cause = "weights" if busiest.wait_weights_s > busiest.decode_s else "decoding"
        text += f", {format_seconds(decoding.wait_samples_s)} wait for samples, mostly for {cause}"
    slower = [one for one in decoding.sites if one.wait_samples_s > 0.5 * step_s]
    if slower:
        text += f"; {', '.join(one.cluster for one in slower)} idle for more than half of it"
    for bound, other_s in sorted(decoding.other_staleness_s.items()):
        text += f"; at max_staleness {bound} a step would take {format_seconds(other_s)}"
    return text
