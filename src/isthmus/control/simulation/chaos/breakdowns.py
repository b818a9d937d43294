"""`break_down`: nodes of a simulated site fail by chance, take what runs on them along, and are repaired."""

from __future__ import annotations

import random

from isthmus.control.simulation.agent_process import AgentProcess
from isthmus.control.simulation.world import PoolWorld
from isthmus.sim.kernel import Kernel, Steps
from isthmus.site import LocalJob, SitePart

REPAIR_S = 4 * 3600.0
"""How long a failed node is away."""


def break_down(world: PoolWorld, agent: AgentProcess, mtbf_s: float, rng: random.Random) -> Steps:
    """Let each node of a site fail about every `mtbf_s` seconds: a process of the world's kernel.

    What a node ran is drawn by the chips that each part has. A node under repair is a job of its site's
    highest level, so the pool is told that it is not free.
    """
    kernel, groups = world.kernel, agent.cluster.node_groups
    nodes, number = sum(group.nodes for group in groups), 0
    while True:
        yield kernel.now + rng.expovariate(nodes / mtbf_s)
        group = rng.choices(groups, weights=[one.nodes for one in groups])[0]
        number += 1
        name = f"repair-{number}"
        hit = _hit(agent, group.name, rng.randrange(group.chips))
        level = agent.cluster.priorities.levels[0]
        agent.submit(
            LocalJob(name=name, command=(), node_group=group.name, chips=group.chips_per_node, level=level)
        )
        if hit is not None:
            world.fail(agent.name, hit.key)
        kernel.start(_repair(kernel, agent, name))


def _hit(agent: AgentProcess, group: str, at: int) -> SitePart | None:
    """Return the part that has the card number `at` of a node group, if any runs there."""
    for part in agent.parts.values():
        if part.live and not part.job.startswith("repair-"):
            at -= part.wanted.get(group, 0)
            if at < 0:
                return part
    return None


def _repair(kernel: Kernel, agent: AgentProcess, name: str) -> Steps:
    yield kernel.now + REPAIR_S
    agent.withdraw(name)
