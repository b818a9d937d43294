"""`Bench`: our planner, Sailor and the peers that it ships on the same case, judged by its simulator."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from benchmarks._naive_grid import grid_plans
from benchmarks._sailor import Case, Sailor
from benchmarks._sailor_peers import Effort, Peers, Plans, measured
from benchmarks._sailor_space import search

FINALISTS = 32
"""Plans of a planner that are judged."""

LIMIT_S = 330.0
"""CPU seconds a planner may take: Metis stops by itself after 300."""


@dataclass(frozen=True)
class Judged:
    """The best of a planner's plans by the referee (infinite: none), how many it refused, and their cost."""

    best_s: float
    refused: int
    effort: Effort

    @property
    def rate(self) -> float:
        """Iterations a second."""
        return 1 / self.best_s


@dataclass
class Bench:
    """A checkout of Sailor and the planners that it ships, asked one case after another."""

    sailor: Sailor
    peers: Peers
    _planners: dict[Any, Any] = field(default_factory=dict)

    def judge(self, case: Case, effort: Effort) -> Judged:
        """Return the referee's view of a planner's plans."""
        referee = self.sailor.referee(case)
        times = [referee.iteration_s(plan) for plan in effort.plans or ()]
        return Judged(min(times, default=math.inf), times.count(math.inf), effort)

    def ours(self, case: Case) -> Judged:
        """Plan with our search at Sailor's costs."""
        tables, training = self.sailor.tables(case.model), self.sailor.training(case.model, case.samples)

        def plan() -> Plans:
            return [one.as_dict() for one in search(case, tables, training, FINALISTS)]

        return self.judge(case, measured(plan, LIMIT_S, FINALISTS))

    def naive(self, case: Case) -> Judged:
        """Plan by the naive grid."""
        tables, referee = self.sailor.tables(case.model), self.sailor.referee(case)
        return self.judge(case, measured(lambda: grid_plans(case, tables, referee), LIMIT_S, FINALISTS))

    def theirs(self, case: Case, most_chips: int) -> Judged:
        """Plan with Sailor; its tables are made once for cases that differ in numbers of chips only."""
        key = (case.model, case.samples, case.kinds, case.zones)
        if key not in self._planners:
            self._planners = {key: self.peers.planner(case, most_chips)}
        planner = self._planners[key]
        return self.judge(case, measured(lambda: self.peers.sailor_plans(case, planner), LIMIT_S, FINALISTS))

    def other(self, name: str, case: Case) -> Judged:
        """Plan with one of the other peers."""
        return self.judge(case, measured(lambda: self.peers.other_plans(name, case), LIMIT_S, FINALISTS))
