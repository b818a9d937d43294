"""`BestLayouts`: the best layouts of a search, and the estimate that a further layout must beat."""

from __future__ import annotations

import math
from bisect import insort
from dataclasses import dataclass, field

from isthmus.plan.search.compose.plan_layout import PlanLayout


@dataclass
class BestLayouts:
    """The best `num_kept` layouts by estimate, and the best of each set of clusters."""

    num_kept: int = 8
    best: PlanLayout | None = None
    # Estimate of the last of the best `num_kept` layouts; infinite while there are fewer.
    cutoff_s: float = math.inf
    _top: list[PlanLayout] = field(default_factory=list)
    _best_by_clusters: dict[tuple[str, ...], PlanLayout] = field(default_factory=dict)

    def keep(self, layout: PlanLayout) -> None:
        """Keep a layout that is among the best, or the best of its set of clusters."""
        time_s, old = layout.estimate_s, self._best_by_clusters.get(layout.clusters)
        if time_s >= self.cutoff_s and old is not None and old.estimate_s <= time_s:
            return
        if old is None or time_s < old.estimate_s:
            self._best_by_clusters[layout.clusters] = layout
        if self.best is None or time_s < self.best.estimate_s:
            self.best = layout
        insort(self._top, layout, key=_estimate_order)
        del self._top[self.num_kept :]
        if len(self._top) == self.num_kept:
            self.cutoff_s = self._top[-1].estimate_s

    @property
    def layouts(self) -> list[PlanLayout]:
        """All layouts kept, best first."""
        others = [one for one in self._best_by_clusters.values() if all(one is not top for top in self._top)]
        return self._top + sorted(others, key=_estimate_order)


def _estimate_order(layout: PlanLayout) -> tuple[float, int]:
    return layout.estimate_s, layout.num_chips
