"""What is to be seen of a job with `task: rl`: measures of its samples, and where its sites that decode spend time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from isthmus.cli.job_statistics import JobStatistics
from isthmus.core.plan import Plan


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


MEASURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "reward": ("reward", "{:.3f}".format),
    "validation_reward": ("held-out reward", "{:.3f}".format),
    "entropy": ("entropy", "{:.3f} nats".format),
    "clipped_share": ("clipped", _share),
    "kl_rollout": ("train/rollout KL", "{:.2g}".format),
    "kl_reference": ("KL to the first weights", "{:.2g}".format),
    "effective_samples": ("effective sample size", _share),
    "staleness": ("staleness", "{:.2f} versions".format),
    "response_tokens": ("response length", "{:.1f} tokens".format),
    "turns": ("turns", "{:.2f}".format),
    "cut_share": ("cut off", _share),
    "filtered_groups": ("filtered groups", "{:.0f}".format),
}
"""Metric of a step: what people call it, and how it is written."""


@dataclass(frozen=True, kw_only=True)
class RolloutSite:
    """A rank that decodes: tokens by second, and its time by cause (s), means over its last steps."""

    rank: int
    cluster: str
    tokens_per_s: float
    decode_s: float
    wait_samples_s: float
    wait_weights_s: float
    wait_link_s: float

    @property
    def waits_s(self) -> tuple[float, float, float]:
        """Seconds without decoding: without samples, without weights, without a connection."""
        return self.wait_samples_s, self.wait_weights_s, self.wait_link_s

    @property
    def total_s(self) -> float:
        """Seconds of all."""
        return self.decode_s + sum(self.waits_s)


def latest_measures(stats: JobStatistics) -> dict[str, float]:
    """Return the latest value of each of `MEASURES` that the job has reported."""
    found = {name: stats.latest(name) for name in MEASURES}
    return {name: value for name, value in found.items() if value is not None}


def measures_text(stats: JobStatistics) -> dict[str, str]:
    """Return the latest measures as text, by what people call them."""
    return {MEASURES[name][0]: MEASURES[name][1](value) for name, value in latest_measures(stats).items()}


def rollout_sites(plan: Plan | None, stats: JobStatistics, last_steps: int) -> list[RolloutSite]:
    """Return the ranks of `plan` that decode and have reported, each with means over its `last_steps` steps."""
    found = []
    for rank, place in enumerate(plan.rollouts, len(plan.ranks)) if plan is not None else ():
        lines = [one.values for step in stats.steps for one in stats.step_metrics(step) if one.rank == rank]
        if not lines:
            continue
        taken = lines[-last_steps:]

        def mean(name: str, taken: list[dict[str, float | None]] = taken) -> float:
            return fmean(values.get(name) or 0.0 for values in taken)

        found.append(
            RolloutSite(
                rank=rank, cluster=place.cluster, tokens_per_s=mean("rollout_tokens_per_s"), decode_s=mean("decode_s"),
                wait_samples_s=mean("wait_samples_s"), wait_weights_s=mean("wait_weights_s"),
                wait_link_s=mean("wait_link_s"),
            )
        )  # fmt: skip
    return found
