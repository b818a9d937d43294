"""`JobStatistics`: statistics over a job's step metrics: loss by step, time per stage, traffic per link.

After a restart some steps are repeated; metrics of the later attempt replace those of the earlier one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from isthmus.core.messages.agent_messages import StepMetrics
from isthmus.core.plan import Plan

Series = list[tuple[int, float]]
"""Points (step, value) in step order."""


@dataclass(frozen=True, kw_only=True)
class StepBreakdown:
    """Mean time breakdown of one step of a rank, in seconds."""

    compute_s: float
    # Waiting for messages, not overlapped with computation.
    exposed_communication_s: float
    # Without work: pipeline bubbles.
    idle_s: float

    @property
    def total_s(self) -> float:
        """Sum of the three, in seconds."""
        return self.compute_s + self.exposed_communication_s + self.idle_s


class JobStatistics:
    """Step metrics of one job by (step, rank), with derived statistics."""

    def __init__(self, metrics: Iterable[StepMetrics] = ()) -> None:
        self._by_step: dict[int, dict[int, StepMetrics]] = {}
        self.add(metrics)

    def add(self, metrics: Iterable[StepMetrics]) -> None:
        """Add metrics, in any order."""
        for one in metrics:
            ranks = self._by_step.setdefault(one.step, {})
            known = ranks.get(one.rank)
            if known is None or known.attempt <= one.attempt:
                ranks[one.rank] = one

    @property
    def metrics(self) -> list[StepMetrics]:
        """The latest metrics of each step and rank, in that order."""
        return [one for step in self.steps for one in self.step_metrics(step)]

    @property
    def steps(self) -> list[int]:
        """Steps with metrics of at least one rank, in order."""
        return sorted(self._by_step)

    def mean_overrun_s(self) -> float | None:
        """Return by how much real computation overran virtual chips, mean per step of the slowest stage, or None."""
        overrun_s = [value for _, value in self.series("overrun_s")]
        return fmean(overrun_s) if overrun_s else None

    def num_steps_done(self, num_steps: int) -> int:
        """Return the number of finished steps, at most `num_steps`."""
        return min(num_steps, self.steps[-1] + 1) if self._by_step else 0

    @property
    def ranks(self) -> list[int]:
        """Ranks that have reported."""
        return sorted({rank for ranks in self._by_step.values() for rank in ranks})

    def step_metrics(self, step: int) -> list[StepMetrics]:
        """Return the metrics of one step in rank order."""
        return [one for _, one in sorted(self._by_step.get(step, {}).items())]

    def series(self, key: str, combine: Callable[[list[float]], float] = max) -> Series:
        """Return the metric `key` by step, `combine`d over the ranks that reported it."""
        points = ((step, self._values(step, key)) for step in self.steps)
        return [(step, combine(values)) for step, values in points if values]

    def latest(self, key: str) -> float | None:
        """Return the latest value of `key` (maximum over ranks), or None."""
        for step in reversed(self.steps):
            values = self._values(step, key)
            if values:
                return max(values)
        return None

    def iteration_s(self) -> float | None:
        """Return the median step time in seconds without the first step (cold caches), or None."""
        times = [value for _, value in self.series("step_s")]
        steady = times[1:] or times
        return median(steady) if steady else None

    def tokens_per_s(self) -> float | None:
        """Return the median tokens per second of the whole job without the first step, or None."""
        rates = [value for _, value in self.series("tokens_per_s")]
        steady = rates[1:] or rates
        return median(steady) if steady else None

    def step_breakdown(self, rank: int, *, last_steps: int | None = None) -> StepBreakdown | None:
        """Return the mean time breakdown of `rank` over its `last_steps` steps (None: all), or None."""
        steps = [step for step in self.steps if rank in self._by_step[step]]
        taken = [self._by_step[step][rank].values for step in steps[-(last_steps or len(steps)) :]]
        if not taken:
            return None
        means = {
            key: fmean(values.get(key) or 0.0 for values in taken)
            for key in ("compute_s", "exposed_communication_s", "idle_s")
        }
        return StepBreakdown(**means)

    def link_traffic_mbps(self, plan: Plan, *, last_steps: int | None = None) -> dict[tuple[str, str], float]:
        """Return the mean traffic of each link that `plan` uses, in 1e6 bit/s.

        A rank reports bytes sent over all its links; they are divided equally among its targets. Between two
        stages in other clusters, activations one way and gradients the other have equal size. Clusters that
        reduce gradients of the same layers count as one target each.
        """
        sent = dict.fromkeys(wan_links(plan), 0.0)
        total_s = 0.0
        for step in self.steps[-(last_steps or len(self.steps)) :]:
            ranks = self._by_step[step]
            total_s += max((one.values.get("step_s") or 0.0 for one in ranks.values()), default=0.0)
            for rank, one in ranks.items():
                if rank >= len(plan.ranks):
                    continue
                targets = _wan_targets(plan, plan.ranks[rank].stage)
                for target in targets:
                    link = (plan.stage_of(rank).cluster, target)
                    sent[link] += (one.values.get("wan_bytes") or 0.0) / len(targets)
        return {link: num_bytes * 8 / 1e6 / total_s if total_s else 0.0 for link, num_bytes in sent.items()}

    def eta_s(self, num_steps: int) -> float | None:
        """Return the estimated seconds until `num_steps` steps are finished, or None before the first."""
        step_s = self.iteration_s()
        if step_s is None:
            return None
        return (num_steps - self.num_steps_done(num_steps)) * step_s

    def _values(self, step: int, key: str) -> list[float]:
        found = (one.values.get(key) for one in self._by_step[step].values())
        return [value for value in found if value is not None]


def pipeline_neighbours(plan: Plan, rank: int) -> tuple[int | None, int | None]:
    """Return the previous and next rank of `rank` in its pipeline; None at an end or for an unknown rank.

    Only first tensor-parallel ranks exchange messages; the others have no neighbours. A rank's neighbour has the same
    context-parallel rank, or the last one of a stage that has fewer.
    """
    if not 0 <= rank < len(plan.ranks) or plan.ranks[rank].tp > 0:
        return None, None
    replica = plan.stage_of(rank).replica
    own, stages = plan.ranks[rank].cp, [at for at, stage in enumerate(plan.stages) if stage.replica == replica]
    shares = [plan.cp_ranks_of(at) for at in stages]
    ranks = [of_stage[min(own, len(of_stage) - 1)] for of_stage in shares]
    index = ranks.index(rank)
    return (ranks[index - 1] if index else None), (ranks[index + 1] if index + 1 < len(ranks) else None)


def wan_neighbours(plan: Plan, rank: int) -> list[int]:
    """Return the pipeline neighbours of `rank` in other clusters."""
    return [
        other
        for other in pipeline_neighbours(plan, rank)
        if other is not None and plan.stage_of(other).cluster != plan.stage_of(rank).cluster
    ]


def wan_links(plan: Plan) -> list[tuple[str, str]]:
    """Return the directed links (source, target) that `plan` uses, forward direction first at each hop."""
    links: dict[tuple[str, str], None] = {}
    for replica in range(plan.dp):
        for source, target in plan.hops(replica):
            links[source, target] = links[target, source] = None
    for place, stage in enumerate(plan.stages):
        links |= dict.fromkeys((stage.cluster, other) for other in plan.gradient_peer_clusters(place))
    return list(links)


def _wan_targets(plan: Plan, stage: int) -> list[str]:
    """Return the other clusters that a stage sends to: pipeline neighbours, then gradient reduction peers."""
    near = wan_neighbours(plan, plan.ranks_of(stage)[0])
    return [*(plan.stage_of(one).cluster for one in near), *plan.gradient_peer_clusters(stage)]


def predicted_tokens_per_s(plan: Plan) -> float | None:
    """Return the predicted tokens per second of the whole job, or None without a prediction."""
    if plan.predicted is None or not plan.predicted.iteration_s:
        return None
    return plan.num_samples * plan.sequence_length / plan.predicted.iteration_s


def downsample(series: Sequence[tuple[int, float]], limit: int) -> Series:
    """Return at most `limit` evenly spaced points of a series, including the first and the last."""
    if len(series) <= limit or limit < 2:
        return list(series)
    return [series[round(i * (len(series) - 1) / (limit - 1))] for i in range(limit)]
