"""`compare`: simulates one trace in several scenarios and with several objectives."""

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
"""Called with scenario, virtual time in seconds and number of jobs done; false ends the comparison."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The trace, pool, scenarios and objectives to compare."""

    trace: Trace
    pool: Pool
    scenarios: tuple[Scenario, ...] = ("alone", "home", "pool")
    objectives: tuple[Objective, ...] = ("arrival",)
    # Mean time between failures of a node. None: nodes never fail.
    node_mtbf_s: float | None = None
    seed: int = 0
    # Virtual time at which each run ends. None: when all jobs have ended.
    until_s: float | None = None


def compare(asked: Comparison, go_on: GoOn | None = None) -> Iterator[PoolOutcome]:
    """Yield the outcome of every run; deterministic for equal input.

    Once `go_on` returns false, the outcome so far of the current run is the last one.
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
    """Yield every scenario with every objective; `alone` has no pool queue, so one objective suffices."""
    for scenario in asked.scenarios:
        for objective in asked.objectives[:1] if scenario == "alone" else asked.objectives:
            yield scenario, objective


def _play(world: PoolWorld, scenario: Scenario, go_on: GoOn | None, until_s: float | None) -> bool:
    """Run one simulation; return false if `go_on` ended it."""
    said = True

    def ask(now_s: float, done: int) -> bool:
        nonlocal said
        said = go_on is None or go_on(scenario, now_s, done)
        return said

    world.run(ask, until_s)
    return said
