"""`render_ray`: the job and the orders with which the agent holds a part at Ray and starts its ranks."""

from __future__ import annotations

import json
from pathlib import Path

from isthmus.agent.adapters.local_adapter import worker_variables
from isthmus.agent.adapters.ray.holder_job import holder_entrypoint
from isthmus.agent.adapters.ray.ray_holds import rank_order
from isthmus.agent.adapters.ray.ray_site import RaySite
from isthmus.agent.adapters.rendered_hold import (
    WORKER_FOLDER,
    PartRequest,
    RenderedHold,
    program_setting,
    variable_settings,
)
from isthmus.agent.courier.start_file import start_document
from isthmus.render import Setting

JOB_FILE = "job.json"
_TICKET = "{ticket}"
"""Stands for the ticket of a rank, which the agent draws."""


def render_ray(site: RaySite, part: PartRequest) -> RenderedHold:
    """Return the holder's entrypoint, the order of the hold, and for each rank its order and its `start.json`.

    Raises `InputError` for a node group that `site.yaml` does not name.
    """
    request, place = part.request, Path(WORKER_FOLDER)
    needs = [(need.node_group, need.num_cards) for need in request.ranks]
    hold = site.hold_order(needs, renewals=1, lease_s=request.lease_s, released=False)
    ranks, settings = [], dict[str, tuple[Setting, ...]]()
    for bundle, (rank, start, need) in enumerate(zip(part.ranks, part.starts, request.ranks, strict=True)):
        variables = worker_variables(place, {}, start, part.limits)
        ranks.append(
            {
                "rank": rank,
                "order": rank_order(request.id, bundle, _TICKET),
                "start.json": start_document(start.command, variables),
            }
        )
        asked = _asked(site, need.node_group, need.num_cards)
        found = (program_setting(start.command), *asked, *variable_settings(variables))
        settings.setdefault(need.node_group, found)
    job = {"entrypoint": holder_entrypoint(site.python), f"hold-{request.id}.json": hold, "ranks": ranks}
    return RenderedHold(file_name=JOB_FILE, text=json.dumps(job, indent=1), settings=settings)


def _asked(site: RaySite, group: str, num_cards: int) -> tuple[Setting, ...]:
    """Return what a rank's bundle has."""
    wanted = {f"bundle.{site.resource(group)}": (str(num_cards), "plan")}
    place = f"site.yaml node_groups.{group}.labels"
    wanted |= {f"bundle.labels.{label}": (value, place) for label, value in site.labels(group).items()}
    return tuple(
        Setting(name=name, setting_class="resources", value=value, passed_as="file", origin=origin)
        for name, (value, origin) in wanted.items()
    )
