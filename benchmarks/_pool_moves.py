"""A site in the pool simulator, with the agents' and the server's own code, with moves and without."""

from __future__ import annotations

import random
from dataclasses import dataclass

from isthmus.control.simulation.delays import Delays
from isthmus.control.simulation.pool_simulation import PoolSimulation
from isthmus.control.simulation.traces.job_trace import Trace, TraceJob
from isthmus.control.simulation.traces.trace_pools import assign_owners
from isthmus.core.owner.move_rules import MoveRules
from isthmus.core.owner.owner_policy import OwnerPolicy
from isthmus.core.pool import Cluster, NodeGroup, Pool
from isthmus.core.pool_parts.group_topology import GroupTopology

NODES, CARDS, LOAD = 16, 8, 0.8
CHECKPOINT_INTERVAL_S = 1_800.0
RULES = MoveRules(at_once=4, per_hour=60, rest_s=1_800, after_s=60, pause_s=120)


@dataclass(frozen=True)
class MovesOutcome:
    """Mean waits in seconds of jobs that need whole nodes and of all jobs, and what moves did."""

    wide_wait_s: float
    wait_s: float
    num_moves: int
    most_lost_s: float
    num_jobs: int


def simulate_moves(num_jobs: int, seed: int, rules: MoveRules) -> MovesOutcome:
    """Simulate a trace of small parts and of whole nodes at one site, until all jobs have ended."""
    topology = GroupTopology()
    group = NodeGroup(name="g", chip="H20", nodes=NODES, chips_per_node=CARDS, topology=topology)
    pool = Pool(clusters=(Cluster(name="a", owner="a", node_groups=(group,)),))
    jobs, pool = assign_owners(Trace(jobs=_trace(num_jobs, seed)), pool)
    world = PoolSimulation(
        pool, jobs, policies={"a": OwnerPolicy(moves=rules)},
        delays=Delays(checkpoint_interval_s=CHECKPOINT_INTERVAL_S),
    )  # fmt: skip
    world.run()
    waits = {name: fate.waited_s or 0.0 for name, fate in world.job_outcomes.items()}
    wide = [waits[job.name] for job in jobs if job.chips_per_worker == CARDS]
    outcome = world.outcome()
    return MovesOutcome(
        wide_wait_s=sum(wide) / len(wide),
        wait_s=sum(waits.values()) / len(waits),
        num_moves=outcome.moves,
        most_lost_s=outcome.most_lost_by_move_s,
        num_jobs=len(jobs),
    )


def _trace(num_jobs: int, seed: int) -> tuple[TraceJob, ...]:
    chance = random.Random(seed)
    drawn = [
        (cards, chance.choice((1, 1, 2)) if cards == CARDS else 1, _run_s(chance))
        for cards in chance.choices((1, 2, 4, CARDS), weights=(3, 3, 3, 2), k=num_jobs)
    ]
    work_card_s = sum(cards * workers * run_s for cards, workers, run_s in drawn)
    every_s, at_s, jobs = work_card_s / (LOAD * NODES * CARDS) / num_jobs, 0.0, list[TraceJob]()
    for number, (cards, workers, run_s) in enumerate(drawn):
        at_s += chance.expovariate(1 / every_s)
        jobs.append(
            TraceJob(
                name=f"job-{number}", owner="a", submit_s=at_s, run_s=run_s, workers=workers, chips_per_worker=cards
            )
        )
    return tuple(jobs)


def _run_s(chance: random.Random) -> float:
    return min(86_400.0, max(300.0, 4 * 3600 * chance.lognormvariate(-0.5, 1.0)))
