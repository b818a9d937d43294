"""`Figures`: what the metrics of a job add up to: loss by step, each stage's time, each link's traffic.

A job that was restarted computes some steps again: the later attempt's figures replace the earlier one's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from isthmus.core.messages.agent_messages import StepMetrics
from isthmus.core.plan import Plan

Series = list[tuple[int, float]]
"""Points (step, value) in the order of steps."""


@dataclass(frozen=True, kw_only=True)
class StageShare:
    """Mean seconds a rank spent in one step: computing, waiting for bytes, and with nothing to do."""

    compute_s: float
    exposed_communication_s: float
    idle_s: float

    @property
    def total_s(self) -> float:
        """Seconds of the step that are accounted for."""
        return self.compute_s + self.exposed_communication_s + self.idle_s


class Figures:
    """Step metrics of one job by (step, rank), and what follows from them."""

    def __init__(self, metrics: Iterable[StepMetrics] = ()) -> None:
        self._by_step: dict[int, dict[int, StepMetrics]] = {}
        self.add(metrics)

    def add(self, metrics: Iterable[StepMetrics]) -> None:
        """Take in more metrics, in any order."""
        for one in metrics:
            ranks = self._by_step.setdefault(one.step, {})
            known = ranks.get(one.rank)
            if known is None or known.attempt <= one.attempt:
                ranks[one.rank] = one

    @property
    def metrics(self) -> list[StepMetrics]:
        """What counts of all that was added, by step and rank."""
        return [one for step in self.steps for one in self.of_step(step)]

    @property
    def steps(self) -> list[int]:
        """Steps with at least one rank's figures, in order."""
        return sorted(self._by_step)

    def done(self, num_steps: int) -> int:
        """Return how many of `num_steps` steps are finished; steps are counted from 0."""
        return min(num_steps, self.steps[-1] + 1) if self._by_step else 0

    @property
    def ranks(self) -> list[int]:
        """Ranks that have reported."""
        return sorted({rank for ranks in self._by_step.values() for rank in ranks})

    def of_step(self, step: int) -> list[StepMetrics]:
        """Return what the ranks reported of one step, by rank."""
        return [one for _, one in sorted(self._by_step.get(step, {}).items())]

    def series(self, key: str, combine: Callable[[list[float]], float] = max) -> Series:
        """Return the value `key` by step, `combine`d over the ranks that gave it."""
        points = ((step, self._values(step, key)) for step in self.steps)
        return [(step, combine(values)) for step, values in points if values]

    def last(self, key: str) -> float | None:
        """Return the latest value of `key`, None where no rank gave one."""
        for step in reversed(self.steps):
            values = self._values(step, key)
            if values:
                return max(values)
        return None

    def iteration_s(self) -> float | None:
        """Return the median seconds of a step over all but the first, whose caches are cold; None before."""
        times = [value for _, value in self.series("step_s")]
        steady = times[1:] or times
        return median(steady) if steady else None

    def tokens_per_s(self) -> float | None:
        """Return the median tokens a second of the whole job over all steps but the first; None before."""
        rates = [value for _, value in self.series("tokens_per_s")]
        steady = rates[1:] or rates
        return median(steady) if steady else None

    def share(self, rank: int, *, last_steps: int | None = None) -> StageShare | None:
        """Return how `rank` spent a step, the mean over the `last_steps` (None: all) it reported, or None."""
        steps = [step for step in self.steps if rank in self._by_step[step]]
        taken = [self._by_step[step][rank].values for step in steps[-(last_steps or len(steps)) :]]
        if not taken:
            return None
        means = {
            key: fmean(values.get(key) or 0.0 for values in taken)
            for key in ("compute_s", "exposed_communication_s", "idle_s")
        }
        return StageShare(**means)

    def link_mbps(self, plan: Plan, *, last_steps: int | None = None) -> dict[tuple[str, str], float]:
        """Return the mean traffic of each link that `plan` uses, in 1e6 bit/s.

        A rank reports the bytes it sent across all its links. A stage between two others of other clusters
        sends activations one way and gradients of the same shape the other: each gets half. Clusters that
        hold its layers too, to add gradients up, get an equal part beside them.
        """
        sent = dict.fromkeys(wan_links(plan), 0.0)
        total_s = 0.0
        for step in self.steps[-(last_steps or len(self.steps)) :]:
            ranks = self._by_step[step]
            total_s += max((one.values.get("step_s") or 0.0 for one in ranks.values()), default=0.0)
            for rank, one in ranks.items():
                if rank >= len(plan.ranks):
                    continue
                targets = _targets(plan, plan.ranks[rank].stage)
                for target in targets:
                    link = (plan.stage_of(rank).cluster, target)
                    sent[link] += (one.values.get("wan_bytes") or 0.0) / len(targets)
        return {link: num_bytes * 8 / 1e6 / total_s if total_s else 0.0 for link, num_bytes in sent.items()}

    def eta_s(self, num_steps: int) -> float | None:
        """Return the seconds until `num_steps` steps are finished at this pace; None before the first."""
        pace_s = self.iteration_s()
        if pace_s is None:
            return None
        return (num_steps - self.done(num_steps)) * pace_s

    def _values(self, step: int, key: str) -> list[float]:
        found = (one.values.get(key) for one in self._by_step[step].values())
        return [value for value in found if value is not None]


def neighbours(plan: Plan, rank: int) -> tuple[int | None, int | None]:
    """Return the ranks before and after `rank` in its pipeline, None at an end (or for an unknown rank).

    Stages exchange messages by their first ranks; the others of a stage have no neighbours.
    """
    if not 0 <= rank < len(plan.ranks) or plan.ranks[rank].tp > 0:
        return None, None
    replica = plan.stage_of(rank).replica
    line = [plan.ranks_of(at)[0] for at, stage in enumerate(plan.stages) if stage.replica == replica]
    place = line.index(rank)
    return (line[place - 1] if place else None), (line[place + 1] if place + 1 < len(line) else None)


def wan_neighbours(plan: Plan, rank: int) -> list[int]:
    """Return the neighbours of `rank` that are in another cluster."""
    return [
        other
        for other in neighbours(plan, rank)
        if other is not None and plan.stage_of(other).cluster != plan.stage_of(rank).cluster
    ]


def wan_links(plan: Plan) -> list[tuple[str, str]]:
    """Return the directed links (source, target) that `plan` sends over, forward ones first at each hop."""
    links: dict[tuple[str, str], None] = {}
    for replica in range(plan.dp):
        for source, target in plan.hops(replica):
            links[source, target] = links[target, source] = None
    for place, stage in enumerate(plan.stages):
        links |= dict.fromkeys((stage.cluster, other) for other in plan.adding_clusters(place))
    return list(links)


def _targets(plan: Plan, stage: int) -> list[str]:
    """Return the other clusters that a stage sends to: its neighbours', then those that hold its layers."""
    near = wan_neighbours(plan, plan.ranks_of(stage)[0])
    return [*(plan.stage_of(one).cluster for one in near), *plan.adding_clusters(stage)]


def predicted_tokens_per_s(plan: Plan) -> float | None:
    """Return the tokens a second of the whole job that `plan` predicts, None without a prediction."""
    if plan.predicted is None or not plan.predicted.iteration_s:
        return None
    return plan.samples * plan.sequence_length / plan.predicted.iteration_s


def thin(series: Sequence[tuple[int, float]], limit: int) -> Series:
    """Return at most `limit` points of a series, evenly chosen, the first and the last among them."""
    if len(series) <= limit or limit < 2:
        return list(series)
    return [series[round(i * (len(series) - 1) / (limit - 1))] for i in range(limit)]
