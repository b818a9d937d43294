"""`DecodeOption`: one way to decode for a training plan: in turns, or by ranks at clusters; and its pipeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.core.plan import Plan
from isthmus.core.plan_parts.rollout_place import RolloutPlace
from isthmus.plan.rollouts.rollout_request import RolloutRequest
from isthmus.plan.rollouts.weights_ways import weights_ways
from isthmus.sim import DecodeSite, RolloutPipeline, WeightsWay

MOST_STEPS, MOST_SAMPLES = 6, 4096
"""Steps that are simulated, and samples after which it is two."""
LOCAL_DELAY_S = 1e-4
"""Delay inside a cluster."""


@dataclass(frozen=True, kw_only=True)
class DecodeGroup:
    """`ranks` ranks of one node group that decode `sequences` at once each, with the way of the weights to them."""

    cluster: str
    node_group: str
    ranks: int
    sequences: int
    cache_tokens: int
    weights_way: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class DecodeOption:
    """A training plan with the groups that decode for it; without any the chip of rank 0 does, in turns."""

    plan: Plan
    pipeline: RolloutPipeline
    groups: tuple[DecodeGroup, ...] = ()

    @property
    def places(self) -> tuple[RolloutPlace, ...]:
        """Return the ranks that decode; those that the plan had keep what it says of them."""
        if self.plan.rollouts:
            sizes = {
                (one.cluster, one.node_group): {"sequences": one.sequences, "cache_tokens": one.cache_tokens}
                for one in self.groups
            }
            return tuple(
                one.model_copy(update=sizes.get((one.cluster, one.node_group), {})) for one in self.plan.rollouts
            )
        return tuple(
            RolloutPlace(
                cluster=one.cluster, node_group=one.node_group, sequences=one.sequences, cache_tokens=one.cache_tokens,
                sources=one.weights_way[-2:0:-1],
            )
            for one in self.groups
            for _ in range(one.ranks)
        )  # fmt: skip


def decode_option(
    request: RolloutRequest, plan: Plan, chosen: Sequence[tuple[str, str, int]], max_staleness: int | None = None
) -> DecodeOption | str:
    """Return the option in which `chosen` (cluster, node group, ranks) decode for `plan`, or why there is none."""
    if plan.predicted is None:
        raise ValueError(f"plan {plan.id} has no prediction")
    holder, rl = plan.stage_of(0).cluster, request.rl
    rated: list[tuple[str, str, int, int, float]] = []  # with advice, and rows a second
    for cluster, group, ranks in chosen:
        chip = request.pool.chip(request.pool.node_group(cluster, group))
        if not (advised := request.advised(chip)):
            return f"{chip.name} of {cluster} has no memory for two versions of the weights and one sequence"
        step_s = request.decode_rates(chip, advised).step_s(advised, 0.0)
        rated.append((cluster, group, ranks, advised, advised / step_s))
    names = {cluster for cluster, *_ in rated} - {holder}
    ways = weights_ways(holder, names, request.rates, request.version_bytes, request.coding_s)
    missing = [one for one in names if one not in ways or not {(holder, one), (one, holder)} <= request.rates.keys()]
    if missing:
        return f"no link between {holder} and {min(missing)} for the weights and trajectories"
    total, sites, groups = sum(rate * ranks for *_, ranks, _, rate in rated), [], []
    for cluster, group, ranks, advised, rate in rated:
        wanted = math.ceil(request.num_in_flight * rate / total)
        sequences = max(1, min(advised, wanted))
        way = ways.get(cluster)
        link = request.rates.get((holder, cluster))
        chip = request.pool.chip(request.pool.node_group(cluster, group))
        sites += [
            DecodeSite(
                name=f"{cluster}.{group}.{number}", slots=sequences, rates=request.decode_rates(chip, sequences),
                way=way.way if way else WeightsWay(occupied_s=0.0, delay_s=LOCAL_DELAY_S),
                delay_s=link.delay_s if link else LOCAL_DELAY_S,
            )
            for number in range(ranks)
        ]  # fmt: skip
        clusters = way.clusters if way else (cluster,)
        groups.append(
            DecodeGroup(
                cluster=cluster, node_group=group, ranks=ranks, sequences=sequences, weights_way=clusters,
                cache_tokens=min(request.cache_tokens(chip), sequences * request.longest_tokens),
            )
        )  # fmt: skip
    if not sites:
        stage = plan.stage_of(0)
        chip = request.pool.chip(request.pool.node_group(stage.cluster, stage.node_group))
        taken = plan.predicted.peak_memory_bytes[0] if plan.predicted.peak_memory_bytes else 0
        slots = max(1, min(request.advised(chip, taken), request.num_in_flight))
        sites = [DecodeSite(name=f"{stage.cluster}.0", slots=slots, rates=request.decode_rates(chip, slots))]
    pipeline = RolloutPipeline(
        train_s=request.train_s(plan), steps=_num_steps(request), group=rl.group,
        batch_prompts=request.num_samples // rl.group,
        max_staleness=rl.max_staleness if max_staleness is None else max_staleness,
        lengths=request.lengths, prompt_tokens=rl.max_prompt_tokens, sites=tuple(sites), on_update=rl.on_update,
    )  # fmt: skip
    return DecodeOption(plan=plan, pipeline=pipeline, groups=tuple(groups))


def _num_steps(request: RolloutRequest) -> int:
    return max(2, min(MOST_STEPS, MOST_SAMPLES // request.num_samples))
