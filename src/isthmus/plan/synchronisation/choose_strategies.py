"""`choose_strategies`: the fastest possible strategy for each group of a plan that sums gradients, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from isthmus.core.model import Model
from isthmus.core.plan import Plan
from isthmus.core.pool import Pool
from isthmus.core.runs.check_plan import require_possible
from isthmus.core.units import format_bytes, format_seconds
from isthmus.plan.profile.layer_profile import ModelProfile
from isthmus.plan.profile.model_profile import profile_model
from isthmus.plan.time.calibration import DATA_SHEET, Calibration
from isthmus.plan.time.model_sizes import model_sizes
from isthmus.plan.time.predict import simulated_training
from isthmus.sim import GroupPrices, SyncTime, price_strategies

DEFAULT = "default"
"""The sum that the runtime executes unless told otherwise: inside each cluster first, then between clusters."""

MIN_GAIN = 0.02
"""Share of the default's time that a strategy must save to be chosen: below it the two count as equal."""

_ENDS = {
    "aggregator": "the aggregators' network cards bind",
    "worker": "the workers' network cards bind",
    "ring": "the rings inside hosts bind",
    "slots": "the slots of the switches bind",
    "delay": "message delays bind",
}


@dataclass(frozen=True, kw_only=True)
class StrategyChoice:
    """The choice for one group: `prices` of all strategies, and the fastest."""

    prices: GroupPrices

    @property
    def fastest(self) -> SyncTime:
        """The possible strategy with the least time; the first of the list where several take it."""
        return min(self.prices.times, key=lambda time: time.total_s)

    @property
    def name(self) -> str:
        """The fastest strategy, or `DEFAULT` where that is as fast."""
        return self.fastest.strategy if self.seconds < self.prices.default_s else DEFAULT

    @property
    def seconds(self) -> float:
        """Seconds of the choice."""
        gains = self.fastest.total_s < (1 - MIN_GAIN) * self.prices.default_s
        return self.fastest.total_s if gains else self.prices.default_s

    @property
    def why(self) -> str:
        """One sentence with the group, the choice, its time, what binds, and what is impossible."""
        one, best = self.prices, self.fastest
        head = f"Layers {one.layers[0]} to {one.layers[1] - 1}: {one.num_replicas} replicas on "
        head += f"{', '.join(one.clusters)} sum {format_bytes(one.num_bytes)} of gradients"
        took = f"{format_seconds(best.total_s)}, {_ENDS[best.bound]}"
        if self.name == DEFAULT:
            text = f"{head} in {format_seconds(one.default_s)}; no strategy is faster (best: {best.strategy}, {took})"
        else:
            text = f"{head} fastest by {best.strategy} ({took}); the default takes {format_seconds(one.default_s)}"
        lacking = sorted({reason.partition(" needs a ")[2].partition(":")[0] for _, reason in one.impossible})
        return text + (f"; strategies with a {' or '.join(lacking)} find none there." if lacking else ".")

    def as_dict(self) -> dict[str, Any]:
        """Return the choice as `--json` prints it."""
        one = self.prices
        return {
            "layers": list(one.layers),
            "clusters": list(one.clusters),
            "replicas": one.num_replicas,
            "gradient_bytes": one.num_bytes,
            "strategy": self.name,
            "seconds": self.seconds,
            "default_s": one.default_s,
            "strategies": {time.strategy: {"seconds": time.total_s, "bound": time.bound} for time in one.times},
            "impossible": dict(one.impossible),
            "why": self.why,
        }


def choose_strategies(
    plan: Plan, pool: Pool, model: Model | ModelProfile, calibration: Calibration = DATA_SHEET
) -> tuple[StrategyChoice, ...]:
    """Return the choice for each group of `plan` whose replicas sum gradients that no computation hides.

    Raises as `predict`.
    """
    profile = profile_model(model) if isinstance(model, Model) else model
    require_possible(plan, model_sizes(profile), pool)
    training, _ = simulated_training(plan, pool, profile, calibration)
    return tuple(StrategyChoice(prices=prices) for prices in price_strategies(training))
