"""`BestLayouts`: the best layouts of a search, and the estimate that a further layout must beat."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter

from isthmus.plan.search.compose.plan_layout import PlanLayout


@dataclass
class BestLayouts:
    """The best `num_kept` layouts by estimate, or by another value, and the best of each set of clusters."""

    num_kept: int = 8
    best: PlanLayout | None = None
    # Estimate of the last of the best `num_kept` layouts; infinite while there are fewer.
    cutoff_s: float = math.inf
    # What is compared: closed-form seconds, or a weighted value, which then is the unit of `cutoff_s`.
    value_of: Callable[[PlanLayout], float] = attrgetter("estimate_s")
    _top: list[PlanLayout] = field(default_factory=list)
    _best_by_clusters: dict[tuple[str, ...], PlanLayout] = field(default_factory=dict)

    def keep(self, layout: PlanLayout) -> None:
        """Keep a layout that is among the best, or the best of its set of clusters."""
        value, old = self.value_of(layout), self._best_by_clusters.get(layout.clusters)
        if value >= self.cutoff_s and old is not None and self.value_of(old) <= value:
            return
        if old is None or value < self.value_of(old):
            self._best_by_clusters[layout.clusters] = layout
        if self.best is None or value < self.value_of(self.best):
            self.best = layout
        insort(self._top, layout, key=self._order)
        del self._top[self.num_kept :]
        if len(self._top) == self.num_kept:
            self.cutoff_s = self.value_of(self._top[-1])

    @property
    def layouts(self) -> list[PlanLayout]:
        """All layouts kept, best first."""
        others = [one for one in self._best_by_clusters.values() if all(one is not top for top in self._top)]
        return self._top + sorted(others, key=self._order)

    def _order(self, layout: PlanLayout) -> tuple[float, int]:
        return self.value_of(layout), layout.num_chips
