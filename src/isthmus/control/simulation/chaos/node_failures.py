"""`fail_nodes`: random failures and repairs of a simulated site's nodes."""

from __future__ import annotations

import random

from isthmus.control.simulation.pool_simulation import PoolSimulation
from isthmus.control.simulation.simulated_agent import SimulatedAgent
from isthmus.sim import Kernel, ProcessGenerator
from isthmus.site import LocalJob, SitePart

REPAIR_S = 4 * 3600.0
"""Repair time of a node."""


def fail_nodes(
    simulation: PoolSimulation, agent: SimulatedAgent, mtbf_s: float, rng: random.Random
) -> ProcessGenerator:
    """Fail each node of a site every `mtbf_s` seconds on average; a process of the simulation kernel.

    A failure hits a part with probability proportional to its chips. A node under repair is a local job of
    the site's highest level, so its chips are reported as not free.
    """
    kernel, groups = simulation.kernel, agent.cluster.node_groups
    nodes, number = sum(group.nodes for group in groups), 0
    while True:
        yield kernel.now_s + rng.expovariate(nodes / mtbf_s)
        group = rng.choices(groups, weights=[one.nodes for one in groups])[0]
        number += 1
        name = f"repair-{number}"
        hit = _part_on_device(agent, group.name, rng.randrange(group.num_chips))
        level = agent.cluster.priorities.levels[0]
        agent.submit_local_job(
            LocalJob(name=name, command=(), node_group=group.name, chips=group.chips_per_node, level=level)
        )
        if hit is not None:
            simulation.fail_part(agent.name, hit.key)
        kernel.start(_repair(kernel, agent, name))


def _part_on_device(agent: SimulatedAgent, group: str, at: int) -> SitePart | None:
    """Return the part that holds device number `at` of a node group, if any."""
    for part in agent.parts.values():
        if part.live and not part.job.startswith("repair-"):
            at -= part.wanted.get(group, 0)
            if at < 0:
                return part
    return None


def _repair(kernel: Kernel, agent: SimulatedAgent, name: str) -> ProcessGenerator:
    yield kernel.now_s + REPAIR_S
    agent.withdraw_local_job(name)
