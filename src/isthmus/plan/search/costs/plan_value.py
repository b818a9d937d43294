"""`PlanValue`: a weighted sum of the time, cost and energy of a step, which a search minimises; less is better."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from isthmus.core.errors import InputError
from isthmus.plan.search.costs.slots import ChipSlot


@dataclass(frozen=True, kw_only=True)
class PlanValue:
    """The value of a second, of a unit of currency and of a joule."""

    per_s: float = 0.0
    per_cost: float = 0.0
    per_j: float = 0.0

    def of(self, time_s: float, cost: float, energy_j: float) -> float:
        """Return the value of a step."""
        return self.per_s * time_s + self.per_cost * cost + self.per_j * energy_j


@dataclass(frozen=True, kw_only=True)
class ObjectiveWeights:
    """Weights of time, cost and energy, each relative to that of the fastest plan; only their proportions matter.

    With equal weights of time and cost, a plan that takes 1 % longer than the fastest and costs 1 % less is its equal.
    """

    time_weight: float = 0.0
    cost_weight: float = 0.0
    energy_weight: float = 0.0

    def __post_init__(self) -> None:
        parts = (self.time_weight, self.cost_weight, self.energy_weight)
        if min(parts) < 0 or sum(parts) <= 0:
            raise InputError(f"weights {parts}", hint="all must be at least 0, and one above 0")

    @classmethod
    def parse(cls, text: str) -> ObjectiveWeights:
        """Parse `time=2,cost=1`; those left out weigh 0. Raises `InputError` for what it cannot read."""
        weights: dict[str, float] = {}
        names = [one.name.removesuffix("_weight") for one in fields(cls)]
        for part in filter(None, text.replace(" ", "").split(",")):
            name, _, number = part.partition("=")
            if name not in names or name in weights or not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", number):
                raise InputError(f"weight '{part}'", hint=f"write NAME=NUMBER, each once; names: {', '.join(names)}")
            weights[name] = float(number)
        return cls(**{f"{name}_weight": number for name, number in weights.items()})

    def value(self, time_s: float, cost: float, energy_j: float) -> PlanValue:
        """Return the value at which a plan of this time, cost and energy, the reference, is worth the weights' sum.

        Raises `InputError` where cost or energy has a weight, and the pool states no prices or no power.
        """
        for name, weight, whole in (("cost", self.cost_weight, cost), ("energy", self.energy_weight, energy_j)):
            if weight and not whole:
                field = "price_per_chip_hour" if name == "cost" else "power_w"
                raise InputError(
                    f"{name} has a weight, but no chip of the plans states `{field}`", hint=f"set `{field}`"
                )
        return PlanValue(
            per_s=self.time_weight / time_s,
            per_cost=self.cost_weight / cost if cost else 0.0,
            per_j=self.energy_weight / energy_j if energy_j else 0.0,
        )


@dataclass(frozen=True)
class ChipDraw:
    """What one chip costs and draws: price per second, watts while it waits, and watts more while it computes."""

    price_per_s: float
    waiting_w: float
    more_w: float

    @classmethod
    def of(cls, slot: ChipSlot) -> ChipDraw:
        """Return the draw of a slot's chips; of a pooled slot the least of its members."""
        prices = [one.group.price_per_chip_hour / 3600 for one in slot.members or (slot,)]
        return cls(min(prices), slot.chip.waiting_power_w, slot.chip.power_w - slot.chip.waiting_power_w)
