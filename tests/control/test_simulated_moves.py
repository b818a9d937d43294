"""Moves inside a site in the pool simulator, which drives the agents' and the server's own code."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from isthmus.control.simulation.chaos.run_chaos import CONFIG, DELAYS
from isthmus.control.simulation.delays import Delays
from isthmus.control.simulation.faults.fault_injector import FAULT_RATES, FaultInjector
from isthmus.control.simulation.pool_simulation import PoolSimulation
from isthmus.control.simulation.simulated_server import MemoryLog
from isthmus.control.simulation.traces.job_trace import Trace, TraceJob
from isthmus.control.simulation.traces.trace_pools import assign_owners
from isthmus.control.state.invariants import violations
from isthmus.core.owner.move_rules import MoveRules
from isthmus.core.owner.owner_policy import OwnerPolicy
from isthmus.core.pool import Cluster, NodeGroup, Pool
from isthmus.core.pool_parts.group_topology import GroupTopology

pytestmark = pytest.mark.integration

SITE = Cluster(
    name="a", owner="a",
    node_groups=(NodeGroup(name="g", chip="H20", nodes=4, chips_per_node=8, topology=GroupTopology()),),
)  # fmt: skip
MOVES = MoveRules(at_once=2, rest_s=300, after_s=30, pause_s=60)


def fragmented(moves: MoveRules, faults: FaultInjector | None = None) -> PoolSimulation:
    """Four nodes with two jobs of half a node each; one of each two ends early, and then a whole node is wanted."""
    halves = [
        TraceJob(
            name=f"half-{at}", owner="a", submit_s=float(at), workers=1,
            chips_per_worker=4, run_s=1_000.0 if at % 2 else 3_500.0 if faults else 20_000.0,
        )
        for at in range(8)
    ]  # fmt: skip
    wide = TraceJob(name="wide", owner="a", submit_s=2_000.0, run_s=500.0, workers=1, chips_per_worker=8)
    jobs, pool = assign_owners(Trace(jobs=(*halves, wide)), Pool(clusters=(SITE,)))

    def check(server: object, now_s: float) -> None:
        assert violations(server.coordinator.state, now_s, grace_s=1e9) == []  # type: ignore[attr-defined]

    return PoolSimulation(
        pool, jobs, policies={"a": OwnerPolicy(moves=moves)}, check_invariants=check,
        faults=faults, rules=CONFIG if faults else None, log=MemoryLog() if faults else None,
        delays=replace(DELAYS, checkpoint_interval_s=600.0) if faults else Delays(checkpoint_interval_s=600.0),
    )  # fmt: skip


def test_a_move_lets_the_head_start_and_loses_less_than_a_checkpoint_interval() -> None:
    """Without moves the wide job waits for the long ones to end; with them a minute or two, at the cost of one move."""
    without, moved = fragmented(MoveRules()), fragmented(MOVES)
    for world in (without, moved):
        world.run()
        assert world.outcome().whole
    waits = [world.job_outcomes["wide"].waited_s for world in (without, moved)]
    assert waits[0] is not None
    assert waits[0] > 15_000
    assert waits[1] is not None
    assert waits[1] < 300
    outcome = moved.outcome()
    assert (without.outcome().moves, outcome.moves, outcome.preemptions) == (0, 1, 0)
    assert 0 <= outcome.most_lost_by_move_s < 600


def test_a_move_loses_nothing_whatever_crashes_in_its_middle(whole: bool) -> None:
    """Servers and agents die, reports are lost and doubled while jobs are moved: all jobs end once, all is free."""
    moves, struck = 0, Counter[str]()
    rates = {kind: 0.02 for kind in FAULT_RATES if " dies " in kind or "report" in kind}
    for seed in range(60 if whole else 6):
        faults = FaultInjector(seed, rates)
        faults.enabled = False
        world = fragmented(MOVES, faults)
        world.run(until_s=2_030.0)
        faults.enabled = True
        world.run(until_s=2_200.0)
        faults.enabled = False
        world.run()
        assert world.outcome().whole
        state = world.server.coordinator.state
        assert all(job.state == "succeeded" for job in state.jobs.values())
        world.kernel.run(world.kernel.now_s + 60)
        assert world.agents["a"].machine.free_chips() == {"g": 32}
        moves += sum(one.kind == "moved" for job in state.jobs.values() for one in job.history.entries)
        struck += faults.counts
    assert moves >= 3
    assert sum(num for kind, num in struck.items() if kind.startswith("server dies")) >= 2
    assert sum(num for kind, num in struck.items() if kind.startswith("agent dies")) >= 2
