"""`Found`: the best layouts of a search, and the estimate that a further layout must beat."""

from __future__ import annotations

import math
from bisect import insort
from dataclasses import dataclass, field

from isthmus.plan.search.compose.layout import Layout


@dataclass
class Found:
    """The best `width` layouts by estimate, and the best of each set of clusters."""

    width: int = 8
    best: Layout | None = None
    # Estimate of the last of the best `width` layouts; infinite while there are fewer.
    limit_s: float = math.inf
    _top: list[Layout] = field(default_factory=list)
    _best_of: dict[tuple[str, ...], Layout] = field(default_factory=dict)

    def keep(self, layout: Layout) -> None:
        """Keep a layout that is among the best, or the best of its set of clusters."""
        time_s, old = layout.estimate_s, self._best_of.get(layout.clusters)
        if time_s >= self.limit_s and old is not None and old.estimate_s <= time_s:
            return
        if old is None or time_s < old.estimate_s:
            self._best_of[layout.clusters] = layout
        if self.best is None or time_s < self.best.estimate_s:
            self.best = layout
        insort(self._top, layout, key=_by_estimate)
        del self._top[self.width :]
        if len(self._top) == self.width:
            self.limit_s = self._top[-1].estimate_s

    @property
    def layouts(self) -> list[Layout]:
        """All layouts kept, best first."""
        others = [one for one in self._best_of.values() if all(one is not top for top in self._top)]
        return self._top + sorted(others, key=_by_estimate)


def _by_estimate(layout: Layout) -> tuple[float, int]:
    return layout.estimate_s, layout.num_chips
