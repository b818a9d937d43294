"""`render_kubernetes`: the objects with which the agent holds a part's cards, as the adapter creates them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from isthmus.agent.adapters.kubernetes.kubernetes_site import KubernetesSite
from isthmus.agent.adapters.kubernetes.manifests import (
    HoldPlan,
    HoldUnit,
    hold_units,
    pod_template,
    ticket_secret,
    workloads,
)
from isthmus.agent.adapters.local_adapter import worker_variables
from isthmus.agent.adapters.rendered_hold import (
    WORKER_FOLDER,
    PartRequest,
    RenderedHold,
    program_setting,
    variable_settings,
)
from isthmus.render import Setting, mount

JOB_FILE = "job.yaml"
_TICKET = b"drawn by the agent"
_HEAD = """# Part {job}, attempt {attempt}, at cluster {cluster}: what the agent creates in the namespace {namespace}.
# The id of the hold, drawn with the agent's key, is shown as zeros; the tickets are not shown.
"""


def render_kubernetes(site: KubernetesSite, part: PartRequest) -> RenderedHold:
    """Return the Secrets and workloads of a part's first try.

    Raises `InputError` for a node group that `site.yaml` does not name, and for a part that the site's kind of workload
    cannot hold at once.
    """
    request = part.request
    for need in request.ranks:
        site.group(need.node_group)
    units = hold_units([(need.node_group, need.num_cards) for need in request.ranks])
    plan = HoldPlan(
        id=request.id, claim=1, job=request.job, attempt=request.attempt, units=units, containers=request.containers
    )  # fmt: skip
    secrets = [ticket_secret(site, plan, at, [_TICKET] * len(unit.ranks)) for at, unit in enumerate(units)]
    head = _HEAD.format(
        job=request.job, attempt=request.attempt, cluster=site.cluster.name,
        namespace=site.namespace or "of the agent's access",
    )  # fmt: skip
    text = head + yaml.safe_dump_all([*secrets, *workloads(site, plan)], sort_keys=False)
    settings: dict[str, tuple[Setting, ...]] = {}
    for at, unit in enumerate(units):
        start = part.start_in(unit.node_group)
        variables = worker_variables(Path(WORKER_FOLDER), {}, start, part.limits)
        found = _of_pods(site, unit, pod_template(site, plan, at)["spec"], is_rendered=bool(start.image))
        known = settings.get(unit.node_group, (program_setting(start.command), *variable_settings(variables)))
        targets = {one.target for one in known}
        settings[unit.node_group] = (*known, *(one for one in found if one.target not in targets))
    return RenderedHold(file_name=JOB_FILE, text=text, settings=settings)


def _of_pods(site: KubernetesSite, unit: HoldUnit, spec: dict[str, Any], *, is_rendered: bool) -> Iterator[Setting]:
    """Yield what the pods of a unit have, from their template."""
    group, (container,) = unit.node_group, spec["containers"]
    source = "the images of the policy" if is_rendered else "site.yaml options.image"
    yield _container("image", container["image"], source)
    for name, value in container["resources"]["limits"].items():
        is_card = name == site.resource(group)
        yield _container(f"limits.{name}", value, "plan" if is_card else f"node group {group}")
    for name, value in spec["nodeSelector"].items():
        yield _container(f"nodeSelector.{name}", value, f"site.yaml node_groups.{group}.labels")
    for name, value in (("queue", site.queue), ("priority", site.priority)):
        if value:
            yield _container(name, value, f"site.yaml options.{name}")
    for name, value in (("terminationGracePeriodSeconds", site.grace_s), ("activeDeadlineSeconds", site.max_s)):
        if value:
            option = "grace_s" if value == site.grace_s else "max_minutes"
            yield _container(name, str(value), f"site.yaml options.{option}")
    sources = {one["name"]: one for one in spec["volumes"]}
    for place in container["volumeMounts"]:
        volume = sources[place["name"]]
        source, origin = "secret" if "secret" in volume else "emptyDir", "agent"
        if "persistentVolumeClaim" in volume:
            source, origin = volume["persistentVolumeClaim"]["claimName"], "site.yaml options.storage_claim"
        yield mount(source, place["mountPath"], not place.get("readOnly", False), origin)


def _container(name: str, value: str, origin: str) -> Setting:
    return Setting(name=name, setting_class="resources", value=value, passed_as="container", origin=origin)
