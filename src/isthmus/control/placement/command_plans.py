"""`command_plans`: the plan of a job with `engine: command`, whose ranks the user counts by cluster."""

from __future__ import annotations

from collections.abc import Mapping

from isthmus.core.job import Job
from isthmus.core.job_parts.command_job import CommandConfig
from isthmus.core.plan import Plan, PlanSet, Refusal, Stage
from isthmus.core.pool import Cluster, NodeGroup, Pool


def command_plans(job: Job, pool: Pool, free_chips: Mapping[str, Mapping[str, int]]) -> PlanSet:
    """Return the one plan of a command, each rank as a replica of its own; or why it does not fit `free_chips`.

    `free_chips` counts chips by cluster and node group. Of the node groups that suffice, the one with the most free
    chips is taken.
    """
    if job.command is None:
        return PlanSet(plans=())
    groups: dict[str, str] = {}
    refused = []
    for name in job.command.ranks:
        found = _node_group(job.command, name, pool, free_chips.get(name, {}))
        if isinstance(found, NodeGroup):
            groups[name] = found.name
        else:
            refused.append(Refusal(clusters=(name,), reason=found, stage="compute"))
    if refused:
        return PlanSet(plans=(), refused=tuple(refused))
    places = [name for name, count in job.command.ranks.items() for _ in range(count)]
    stages = tuple(
        Stage(replica=rank, cluster=name, node_group=groups[name], layers=(0, 1), tp=job.command.chips_per_rank)
        for rank, name in enumerate(places)
    )
    plan = Plan(
        id="command",
        stages=stages,
        dp=len(stages),
        micro_batches=1,
        micro_batch_size=1,
        sequence_length=1,
        compute="virtual",
        why="; ".join(f"{count} ranks at {name}/{groups[name]}" for name, count in job.command.ranks.items()),
    )
    return PlanSet(plans=(plan,))


def _node_group(command: CommandConfig, name: str, pool: Pool, free: Mapping[str, int]) -> NodeGroup | str:
    """Return the node group for the ranks at a cluster, or why there is none."""
    cluster = next((one for one in pool.clusters if one.name == name), None)
    if cluster is None:
        return f"the pool has no cluster '{name}'; it has {', '.join(one.name for one in pool.clusters)}"
    wanted, asked = command.ranks[name] * command.chips_per_rank, command.node_groups.get(name)
    groups = [one for one in cluster.node_groups if asked in (None, one.name)]
    if not groups:
        return f"{name} has no node group '{asked}'; it has {', '.join(one.name for one in cluster.node_groups)}"
    wide = [one for one in groups if one.chips_per_node >= command.chips_per_rank]
    if not wide:
        return f"no node of {name} has {command.chips_per_rank} chips for one rank"
    best = max(wide, key=lambda one: _num_ranks(one, free, command.chips_per_rank))
    if _num_ranks(best, free, command.chips_per_rank) < command.ranks[name]:
        return _shortage(cluster, wanted, wide, free)
    return best


def _num_ranks(group: NodeGroup, free: Mapping[str, int], chips_per_rank: int) -> int:
    """Return how many ranks the free chips of a node group hold, at most those of its whole nodes."""
    whole = group.nodes * (group.chips_per_node // chips_per_rank)
    return min(whole, free.get(group.name, 0) // chips_per_rank)


def _shortage(cluster: Cluster, wanted: int, groups: list[NodeGroup], free: Mapping[str, int]) -> str:
    counts = ", ".join(f"{free.get(one.name, 0)} of {one.num_chips} free in {one.name}" for one in groups)
    return f"{cluster.name}: {wanted} chips of one node group wanted, {counts}"
