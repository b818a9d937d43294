"""`compare`: one trace, played in every scenario and under every objective asked for, side by side."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from isthmus.control.algorithms.global_order import Objective
from isthmus.control.simulation.chaos.breakdowns import break_down
from isthmus.control.simulation.outcome import PoolOutcome
from isthmus.control.simulation.traces.trace import Trace
from isthmus.control.simulation.traces.trace_pools import settle
from isthmus.control.simulation.world import PoolWorld, Scenario
from isthmus.core.pool import Pool

GoOn = Callable[[Scenario, float, int], bool]
"""Is told the scenario, the virtual time in seconds and the number of jobs done; false ends the run."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What is to be compared. `node_mtbf_s` None means that no node fails; `until_s` ends each run."""

    trace: Trace
    pool: Pool
    scenarios: tuple[Scenario, ...] = ("alone", "home", "pool")
    objectives: tuple[Objective, ...] = ("arrival",)
    node_mtbf_s: float | None = None
    seed: int = 0
    until_s: float | None = None


def compare(asked: Comparison, go_on: GoOn | None = None) -> Iterator[PoolOutcome]:
    """Yield the outcome of every run; the same question has the same answer.

    After `go_on` has said no, the run in hand is told as far as it came, and none is begun.
    """
    jobs, pool = settle(asked.trace, asked.pool)
    for scenario, objective in _runs(asked):
        world = PoolWorld(pool, jobs, scenario=scenario, objective=objective)
        if asked.node_mtbf_s is not None:
            for number, agent in enumerate(world.agents.values()):
                rng = random.Random(asked.seed * 1000 + number)
                world.kernel.start(break_down(world, agent, asked.node_mtbf_s, rng))
        ended = not _play(world, scenario, go_on, asked.until_s)
        yield world.outcome()
        if ended:
            return


def _runs(asked: Comparison) -> Iterator[tuple[Scenario, Objective]]:
    """Yield every scenario under every objective; owners alone have no queue of the pool to order."""
    for scenario in asked.scenarios:
        for objective in asked.objectives[:1] if scenario == "alone" else asked.objectives:
            yield scenario, objective


def _play(world: PoolWorld, scenario: Scenario, go_on: GoOn | None, until_s: float | None) -> bool:
    """Play one run; return whether it was not broken off."""
    said = True

    def ask(now_s: float, done: int) -> bool:
        nonlocal said
        said = go_on is None or go_on(scenario, now_s, done)
        return said

    world.run(ask, until_s)
    return said
