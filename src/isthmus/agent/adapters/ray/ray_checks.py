"""`check_ray`: the findings of `isthmus site check` about a Ray cluster; changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from isthmus.agent.adapters.card_checks import check_cards, is_card
from isthmus.agent.adapters.ray.ray_rest import RayNode, RayRest
from isthmus.agent.adapters.ray.ray_site import RaySite
from isthmus.agent.adapters.scheduler_adapter import SchedulerCheck
from isthmus.core.errors import IsthmusError
from isthmus.core.files.validation_errors import suggest_name

MIN_VERSION = (2, 49)
"""The first whose placement groups choose nodes by labels."""
_NO_CARDS = ("CPU", "memory", "object_store_memory")


def check_ray(site: RaySite, rest: RayRest) -> Sequence[SchedulerCheck]:
    """Return the findings: does Ray answer, are resources, labels and cards those of `site.yaml` and `pool.yaml`."""
    try:
        found, nodes = rest.version(), rest.nodes()
    except IsthmusError as error:
        hint, place = error.hint or "start Ray's head with its dashboard", ("options", "address")
        return [SchedulerCheck(check="scheduler", ok=False, detail=error.message, hint=hint, file_path=place)]
    version, least = found["ray_version"], ".".join(map(str, MIN_VERSION))
    recent = _numbers(version) >= MIN_VERSION
    detail = f"Ray {version} answers, session {found['session_name']}"
    checks = [SchedulerCheck(check="scheduler", ok=True, detail=detail)]
    hint = "" if recent else f"install Ray {least} or later"
    checks.append(SchedulerCheck(check="version", ok=recent, detail=f"Ray {version}", hint=hint))
    cards = check_cards(
        site.cluster, site.card_nodes(nodes),
        lambda group: f"is '{site.resource(group)}' what Ray calls a card (`ray status`)?",
        "ray status says why",
    )  # fmt: skip
    return [*checks, *_check_selectors(site, nodes), *cards, *_check_unmapped(site, nodes)]


def _check_selectors(site: RaySite, nodes: Sequence[RayNode]) -> Iterator[SchedulerCheck]:
    resources = sorted({name for node in nodes for name in node.total if _is_card(name)})
    labels = sorted({name for node in nodes for name in node.labels})
    for group in site.cluster.node_groups:
        resource = site.resource(group.name)
        known, place = resource in resources, ("node_groups", group.name, "resource")
        yield SchedulerCheck(
            check="resource", ok=known,
            detail=f"resource '{resource}' exists" if known else f"unknown resource '{resource}'",
            hint="" if known else suggest_name(resource, resources) or "", file_path=() if known else place,
        )  # fmt: skip
        for label, value in site.labels(group.name).items():
            if label not in labels:
                yield SchedulerCheck(
                    check="label", ok=False, detail=f"no node has the label '{label}'",
                    hint=suggest_name(label, labels) or "", file_path=("node_groups", group.name, "labels", label),
                )  # fmt: skip
                continue
            values = sorted({node.labels[label] for node in nodes if label in node.labels})
            yield SchedulerCheck(
                check="label", ok=value in values, detail=f"label '{label}' is {', '.join(values)}, asked: '{value}'",
                hint="" if value in values else suggest_name(value, values) or "",
                file_path=() if value in values else ("node_groups", group.name, "labels", label),
            )  # fmt: skip


def _check_unmapped(site: RaySite, nodes: Sequence[RayNode]) -> Iterator[SchedulerCheck]:
    names, cards = site.names(nodes), []
    for node in nodes:
        group = site.group_of(node)
        if group is None:
            left = [name for name in node.total if _is_card(name)]
        else:  # beside its cards a node may have resources that are none: only known names of cards count
            left = [name for name in node.total if _is_card(name) and is_card(name) and name != site.resource(group)]
        cards += [f"{names[node.id]} ({', '.join(left)})"] if left else []
    if cards:
        yield SchedulerCheck(
            check="cards", ok=False, detail=f"resources of no node group: {', '.join(cards)}",
            file_path=("node_groups",), hint="add a node group with their resource or labels",
        )  # fmt: skip


def _is_card(resource: str) -> bool:
    return resource not in _NO_CARDS and not resource.startswith(("node:", "accelerator_type:"))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(word) for word in version.split(".")[:2] if word.isdecimal())
