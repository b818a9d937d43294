"""`compare_scenarios`: simulates one trace in several scenarios and with several objectives."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from isthmus.control.algorithms.global_order import Objective
from isthmus.control.simulation.chaos.node_failures import fail_nodes
from isthmus.control.simulation.pool_outcome import PoolOutcome
from isthmus.control.simulation.pool_simulation import PoolSimulation, Scenario
from isthmus.control.simulation.traces.job_trace import Trace
from isthmus.control.simulation.traces.trace_pools import assign_owners
from isthmus.core.owner.owner_policy import OwnerPolicy
from isthmus.core.pool import Pool

ContinueCallback = Callable[[Scenario, float, int], bool]
"""Called with scenario, virtual time in seconds and number of jobs done; false ends the comparison."""


@dataclass(frozen=True, kw_only=True)
class ScenarioComparison:
    """The trace, pool, scenarios and objectives to compare."""

    trace: Trace
    pool: Pool
    scenarios: tuple[Scenario, ...] = ("alone", "home", "pool")
    objectives: tuple[Objective, ...] = ("arrival",)
    # Mean time between failures of a node. None: nodes never fail.
    node_mtbf_s: float | None = None
    seed: int = 0
    # The policy of every owner.
    policy: OwnerPolicy = field(default_factory=OwnerPolicy)
    # Virtual time at which each run ends. None: when all jobs have ended.
    until_s: float | None = None


def compare_scenarios(
    comparison: ScenarioComparison, should_continue: ContinueCallback | None = None
) -> Iterator[PoolOutcome]:
    """Yield the outcome of every run; deterministic for equal input.

    Once `should_continue` returns false, the outcome so far of the current run is the last one.
    """
    jobs, pool = assign_owners(comparison.trace, comparison.pool)
    for scenario, objective in _scenario_runs(comparison):
        policies = dict.fromkeys((one.name for one in pool.clusters), comparison.policy)
        world = PoolSimulation(pool, jobs, scenario=scenario, objective=objective, policies=policies)
        if comparison.node_mtbf_s is not None:
            for number, agent in enumerate(world.agents.values()):
                rng = random.Random(comparison.seed * 1000 + number)  # noqa: S311 - seeded, so that runs repeat; no secret
                world.kernel.start(fail_nodes(world, agent, comparison.node_mtbf_s, rng))
        ended = not _run_scenario(world, scenario, should_continue, comparison.until_s)
        yield world.outcome()
        if ended:
            return


def _scenario_runs(comparison: ScenarioComparison) -> Iterator[tuple[Scenario, Objective]]:
    """Yield every scenario with every objective; `alone` has no pool queue, so one objective suffices."""
    for scenario in comparison.scenarios:
        for objective in comparison.objectives[:1] if scenario == "alone" else comparison.objectives:
            yield scenario, objective


def _run_scenario(
    simulation: PoolSimulation,
    scenario: Scenario,
    should_continue: ContinueCallback | None,
    until_s: float | None,
) -> bool:
    """Run one simulation; return false if `should_continue` ended it."""
    said = True

    def ask(now_s: float, done: int) -> bool:
        nonlocal said
        said = should_continue is None or should_continue(scenario, now_s, done)
        return said

    simulation.run(ask, until_s)
    return said
