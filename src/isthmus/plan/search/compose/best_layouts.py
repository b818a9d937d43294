"""`BestLayouts`: the best layouts of a search, and the estimate that a further layout must beat.

Two estimates limit a search. `cutoff_s` is that of the last layout kept. Only the best of these are simulated, within
`max_cells`, and the best of each set of clusters: `cutoff_for` excludes what can be neither.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter

from isthmus.plan.search.compose.plan_layout import PlanLayout

LEAST_SIMULATED = 3
"""Layouts that are simulated whatever they cost."""


@dataclass
class BestLayouts:
    """The best `num_kept` layouts by estimate, or by another value, and the best of each set of clusters."""

    num_kept: int = 8
    best: PlanLayout | None = None
    # Estimate of the last of the best `num_kept` layouts; infinite while there are fewer.
    cutoff_s: float = math.inf
    # What is compared: closed-form seconds, or a weighted value, which then is the unit of `cutoff_s`.
    value_of: Callable[[PlanLayout], float] = attrgetter("estimate_s")
    # (Stage, micro-batch) pairs to simulate: layouts beyond them count only as the best of their set of clusters.
    max_cells: float = math.inf
    # Estimate of the last layout within `max_cells`; infinite while there are fewer.
    _simulated_s: float = math.inf
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
        cells = 0
        for place, one in enumerate(self._top, start=1):
            cells += one.simulation_cells
            if cells > self.max_cells and place >= LEAST_SIMULATED:
                self._simulated_s = self.value_of(one)
                break

    def cutoff_for(self, clusters: tuple[str, ...]) -> float:
        """Return the estimate that a layout on these clusters, sorted by name, must beat to be simulated."""
        own = self._best_by_clusters.get(clusters)
        if own is None or self._simulated_s == math.inf:
            return self.cutoff_s
        return min(self.cutoff_s, max(self._simulated_s, self.value_of(own)))

    @property
    def layouts(self) -> list[PlanLayout]:
        """All layouts kept, best first."""
        others = [one for one in self._best_by_clusters.values() if all(one is not top for top in self._top)]
        return self._top + sorted(others, key=self._order)

    def _order(self, layout: PlanLayout) -> tuple[float, int]:
        return self.value_of(layout), layout.num_chips
