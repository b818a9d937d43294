"""`render_site`: a part of a job as its site would start it, from the functions with which the agent starts it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from isthmus.agent.adapters.adapter_kinds import containers_of, render_hold, storage_path_of
from isthmus.agent.adapters.local_adapter import WORKER_COMMAND, job_program
from isthmus.agent.adapters.rendered_hold import (
    CARDS,
    HOLD_ID,
    STATE_FOLDER,
    WORKER_FOLDER,
    PartRequest,
    RenderedHold,
)
from isthmus.agent.adapters.scheduler_adapter import HoldRequest, RankNeed, RankStart
from isthmus.agent.containers.part_renderer import (
    PartRenderer,
    container_need,
    image_program,
    image_reference,
    rank_variables,
    refuse_images,
    start_kind,
)
from isthmus.agent.containers.worker_containers import (
    BUNDLE,
    RUNTIME_FOLDER,
    container_name,
    container_starter,
    start_words,
)
from isthmus.agent.courier.start_file import node_container_command
from isthmus.core.job import Job
from isthmus.core.messages.worker_folder import WorkerLimits
from isthmus.core.owner.site_file import SiteFile
from isthmus.core.plan import Plan, PlanPart
from isthmus.core.pool import Cluster, Pool
from isthmus.core.rights.worker_rights import WorkerRights
from isthmus.render import RenderedPart


@dataclass(frozen=True, kw_only=True)
class RenderedSite:
    """A part by node group, whether the agent makes its containers, and the job file of the site's kind."""

    parts: Mapping[str, RenderedPart]
    in_containers: bool
    hold: RenderedHold


def render_site(
    site: SiteFile, rights: WorkerRights, pool: Pool, cluster: Cluster, job: Job, job_id: str, attempt: int, plan: Plan
) -> RenderedSite:
    """Return the part of a plan at `cluster` with the images and templates that the owner's `rights` name.

    Raises `InputError` if no image fits, a value cannot be passed there, or `site` cannot hold the part.
    """
    can = containers_of(site)
    if rights.containers is not None and can == "none":
        refuse_images(site.kind)
    renderer = PartRenderer(rights, pool, cluster.name, start_kind(can), storage_path_of(site))
    parts = renderer.render(job, job_id, plan)
    ranks = PlanPart.from_plan(plan, cluster.name).ranks
    in_containers, is_pod = renderer.starts == "container", renderer.starts == "pod"
    needs, starts = [], []
    for rank in ranks:
        group = plan.stage_of(rank).node_group
        part = parts[group]
        program = job_program(job, image_program(part, renderer.starts) or WORKER_COMMAND)
        command, variables = (*program, WORKER_FOLDER), rank_variables(part)
        if in_containers:
            command, variables = _container_command(can, container_name(job_id, attempt, rank)), {}
        needs.append(RankNeed(node_group=group, num_cards=plan.chips_of(rank)))
        image = image_reference(part) if is_pod else ""
        folder = Path(WORKER_FOLDER)
        starts.append(RankStart(folder=folder, cards=(CARDS,), command=command, variables=variables, image=image))
    containers = {group: container_need(part) for group, part in parts.items()} if is_pod else {}
    request = HoldRequest(
        id=HOLD_ID, job=job_id, attempt=attempt, ranks=tuple(needs), lease_s=0.0, containers=containers
    )  # fmt: skip
    limits = None if in_containers else WorkerLimits()
    asked = PartRequest(request=request, ranks=ranks, starts=tuple(starts), limits=limits)
    return RenderedSite(parts=parts, in_containers=in_containers, hold=render_hold(site, cluster, asked))


def _container_command(can: str, name: str) -> tuple[str, ...]:
    if can == "node":
        return node_container_command(Path(WORKER_FOLDER))
    state, bundle = Path(STATE_FOLDER) / RUNTIME_FOLDER, Path(WORKER_FOLDER) / BUNDLE
    return (*container_starter(), *start_words("runc", state, bundle, name))
