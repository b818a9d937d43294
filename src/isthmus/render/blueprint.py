"""`Blueprint`: what a part of a job needs and may use at one cluster; the input of its configuration."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from isthmus.core.errors import InputError
from isthmus.core.job import Job
from isthmus.core.job_parts.runtime_choice import RuntimeChoice
from isthmus.core.plan import Plan, PlanPart
from isthmus.core.pool import Cluster, Link, NodeGroup, Pool
from isthmus.render.wide_area_path import WideAreaPath, wide_area_path


@dataclass(frozen=True)
class Blueprint:
    """A part as the scheduler hands it to rendering (`cross-domain-pooling.txt` 4.1.2, figure 9).

    `num_chips`, `cpus` and `memory_bytes` are what one worker has (None: not known, so not limited). `ranks` are those
    of the part in this node group, and `nics` the names of a node's network cards.
    """

    job: Job
    job_id: str
    cluster: str
    node_group: str
    chip: str
    num_chips: int
    ranks: tuple[int, ...]
    world_size: int
    collective_library: str
    framework: str = "isthmus"
    driver: str = ""
    cpus: float | None = None
    memory_bytes: int | None = None
    nics: tuple[str, ...] = ()
    path: WideAreaPath = field(default_factory=WideAreaPath)

    @property
    def runtime(self) -> RuntimeChoice:
        """What the job says of image, code and library."""
        return self.job.runtime


def make_blueprints(
    job: Job, job_id: str, plan: Plan, pool: Pool, cluster: str, links: Iterable[Link] = ()
) -> tuple[Blueprint, ...]:
    """Return the blueprints of a plan's part at `cluster`, one for each node group that it uses.

    `links` go before those of the pool, as what the server has measured.
    Raises `InputError` if the plan has no part there.
    """
    if cluster not in plan.clusters:
        raise InputError(
            f"plan {plan.id} has no part at cluster '{cluster}'", hint=f"its clusters: {', '.join(plan.clusters)}"
        )
    place, path = pool.cluster(cluster), wide_area_path(plan, (*pool.links, *links), cluster)
    part = PlanPart.from_plan(plan, cluster)
    return tuple(_blueprint(job, job_id, plan, pool, place, place.group(name), path) for name in part.chips)


def _blueprint(
    job: Job, job_id: str, plan: Plan, pool: Pool, cluster: Cluster, group: NodeGroup, path: WideAreaPath
) -> Blueprint:
    here = ((rank, plan.stage_of(rank)) for rank in range(plan.num_ranks))
    ranks = tuple(rank for rank, one in here if (one.cluster, one.node_group) == (cluster.name, group.name))
    num_chips = sum(map(plan.chips_of, ranks)) // len(ranks)
    share = num_chips / group.chips_per_node
    return Blueprint(
        job=job,
        job_id=job_id,
        cluster=cluster.name,
        node_group=group.name,
        chip=group.chip,
        num_chips=num_chips,
        ranks=ranks,
        world_size=plan.num_ranks,
        collective_library=pool.chip(group).collective_library,
        driver=group.driver,
        cpus=None if group.cpus_per_node is None else group.cpus_per_node * share,
        memory_bytes=None if group.memory_bytes_per_node is None else int(group.memory_bytes_per_node * share),
        nics=tuple(nic.name for nic in group.nics),
        path=path,
    )
