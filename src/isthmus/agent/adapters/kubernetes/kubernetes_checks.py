"""`check_kubernetes`: what `isthmus site check` finds out about a Kubernetes cluster; nothing is changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from isthmus.agent.adapters.card_checks import check_cards, is_card
from isthmus.agent.adapters.kubernetes.kubernetes_client import KubernetesClient
from isthmus.agent.adapters.kubernetes.kubernetes_objects import NodeInfo, parse_node
from isthmus.agent.adapters.kubernetes.kubernetes_rights import needed_rights, priority_classes
from isthmus.agent.adapters.kubernetes.kubernetes_site import KubernetesSite
from isthmus.agent.adapters.kubernetes.manifests import workload_path
from isthmus.agent.adapters.kubernetes.resource_slices import SLICES, device_counts, device_path, parse_slice
from isthmus.agent.adapters.kubernetes.watched_list import list_objects
from isthmus.agent.adapters.scheduler_adapter import SchedulerCheck
from isthmus.core.errors import AuthError, IsthmusError, NotFoundError
from isthmus.core.files.validation_errors import suggest_name

_MIN_MINOR = 24
"""Numbered pods of a Job (completionMode: Indexed) and suspended Jobs are stable from Kubernetes 1.24 on."""

_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


def check_kubernetes(site: KubernetesSite, client: KubernetesClient) -> Sequence[SchedulerCheck]:
    """Return the findings: does the server answer, are names, rights, labels and cards those of the site's files."""
    try:
        version = client.get_version()
    except IsthmusError as error:
        hint = error.hint or "is the address in the kubeconfig right, and does the API server run?"
        return [SchedulerCheck(check="scheduler", ok=False, detail=error.message, hint=hint)]
    return [
        _check_version(version),
        *_guarded("namespace", ("options",), _check_namespace(site, client)),
        *_guarded("rights", ("kind",), _check_rights(site, client)),
        *_guarded("workload", ("options", "workload"), _check_workload(site, client)),
        *_guarded("queue", ("options", "queue"), _check_queue(site, client)),
        *_guarded("priority", ("options",), _check_priorities(site, client)),
        *_guarded("nodes", ("node_groups",), _check_nodes(site, client)),
    ]


def preempting_value(site: KubernetesSite, client: KubernetesClient) -> int | None:
    """Return the priority below which pods of others can be preempted; None: none can, or Kueue decides."""
    if not site.preempting_priority or site.kueue:
        return None
    _, _, path = priority_classes(site)
    items, _ = list_objects(client, path, "PriorityClassList")
    return next((int(one["value"]) for one in items if one["metadata"]["name"] == site.preempting_priority), None)


def _check_version(version: tuple[int, int]) -> SchedulerCheck:
    new_enough = version >= (1, _MIN_MINOR)
    return SchedulerCheck(
        check="scheduler", ok=new_enough, detail=f"the API server answers: Kubernetes {version[0]}.{version[1]}",
        hint="" if new_enough else f"holds need Kubernetes 1.{_MIN_MINOR} or later",
    )  # fmt: skip


def _check_namespace(site: KubernetesSite, client: KubernetesClient) -> Iterator[SchedulerCheck]:
    name = site.namespace or client.access.namespace
    place = ("options", "namespace") if site.namespace else ()
    try:
        client.get(f"/api/v1/namespaces/{name}")
    except NotFoundError:
        known = _names(client, "/api/v1/namespaces", "NamespaceList")
        yield SchedulerCheck(
            check="namespace", ok=False, detail=f"unknown namespace '{name}'", hint=suggest_name(name, known) or "",
            file_path=place,
        )  # fmt: skip
    except AuthError as error:  # an account with rights in one namespace is not told whether another exists
        own = client.access.namespace
        nearest = suggest_name(name, [own]) if own and own != name else None
        yield SchedulerCheck(
            check="namespace", ok=False, detail=f"unknown namespace '{name}', or one without rights: {error.message}",
            hint=nearest or error.hint or "", file_path=place,
        )  # fmt: skip
    else:
        yield SchedulerCheck(check="namespace", ok=True, detail=f"namespace '{name}' exists")


def _check_rights(site: KubernetesSite, client: KubernetesClient) -> Iterator[SchedulerCheck]:
    namespace = site.namespace or client.access.namespace
    missing = []
    for right in needed_rights(site):
        asked = {"verb": right.verb, "group": right.group, "resource": right.resource}
        if not right.in_cluster:
            asked["namespace"] = namespace
        if right.resource == "namespaces":  # the role grants the one namespace by its name
            asked["name"] = namespace
        review = {
            "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": asked},
        }  # fmt: skip
        answer = client.create(_REVIEWS, review)
        if (answer.get("status") or {}).get("allowed") is not True:
            place = "in the whole cluster" if right.in_cluster else f"in namespace '{namespace}'"
            missing.append(f"{right} {place}")
    for text in missing:
        yield SchedulerCheck(
            check="rights",
            ok=False,
            detail=f"missing right: {text}",
            hint="apply deploy/kubernetes, which has the roles",
            file_path=("kind",),
        )
    if not missing:
        yield SchedulerCheck(check="rights", ok=True, detail="the agent has every right that it needs")


def _check_workload(site: KubernetesSite, client: KubernetesClient) -> Iterator[SchedulerCheck]:
    path = workload_path(site, site.namespace or client.access.namespace)
    group = path.partition("/namespaces/")[0]
    try:
        client.get(group)
    except NotFoundError:
        yield SchedulerCheck(
            check="workload", ok=False, detail=f"the API server does not serve {group.removeprefix('/apis/')}",
            hint=f"install it, or choose another workload than '{site.workload}'", file_path=("options", "workload"),
        )  # fmt: skip
    else:
        yield SchedulerCheck(check="workload", ok=True, detail=f"workload '{site.workload}' is served")


def _check_queue(site: KubernetesSite, client: KubernetesClient) -> Iterator[SchedulerCheck]:
    if not site.queue:
        return
    namespace = site.namespace or client.access.namespace
    path, kind = "/apis/scheduling.volcano.sh/v1beta1/queues", "QueueList"
    if site.kueue:
        path, kind = f"/apis/kueue.x-k8s.io/v1beta1/namespaces/{namespace}/localqueues", "LocalQueueList"
    yield _check_name("queue", site.queue, _listed(client, path, kind), "queue")


def _check_priorities(site: KubernetesSite, client: KubernetesClient) -> Iterator[SchedulerCheck]:
    _, plural, path = priority_classes(site)
    wanted = {"priority": site.priority, "preempting_priority": site.preempting_priority}
    if not any(wanted.values()):
        return
    kind = "WorkloadPriorityClassList" if site.kueue else "PriorityClassList"
    items, _ = list_objects(client, path, kind)
    classes = {str(one["metadata"]["name"]): one for one in items}
    for option, name in wanted.items():
        if not name:
            continue
        found = _check_name(option, name, classes, plural)
        disturbs = name in classes and classes[name].get("preemptionPolicy", "PreemptLowerPriority") != "Never"
        if found.ok and not site.kueue and disturbs != (option == "preempting_priority"):
            wrong = "preempts other jobs" if disturbs else "never preempts"
            found = SchedulerCheck(
                check=option, ok=False, detail=f"priority class '{name}' {wrong}", file_path=("options", option),
                hint=f"its preemptionPolicy must be {'Never' if disturbs else 'PreemptLowerPriority'}",
            )  # fmt: skip
        yield found


def _check_nodes(site: KubernetesSite, client: KubernetesClient) -> Iterator[SchedulerCheck]:
    items, _ = list_objects(client, "/api/v1/nodes", "NodeList")
    given = {str(name) for item in items for name in ((item.get("status") or {}).get("allocatable") or {})}
    cards = {name for name in given if "/" in name and is_card(name)} | set(site.resources)
    nodes = [parse_node(item, cards) for item in items]
    yield from _check_labels(site, nodes, given | (set(site.resources) if site.device_driver else set()))
    devices: dict[str, int] = {}
    if site.device_driver:
        found, _ = list_objects(client, f"{device_path(client)}/{SLICES}", "ResourceSliceList")
        slices = [parse_slice(item) for item in found]
        yield _check_name("device_driver", site.device_driver, {one.driver for one in slices}, "device driver")
        devices = device_counts(slices, site.device_driver)
    mapped = site.card_nodes(nodes, devices)
    yield from check_cards(
        site.cluster, mapped, lambda group: f"do its nodes have allocatable {site.resource(group)}?",
        "kubectl describe node says why",
    )  # fmt: skip
    known = {(node.name, site.resource(node.node_group)) for node in mapped}
    for node in nodes:
        left = [f"{count} {name}" for name, count in node.counts if count and (node.name, name) not in known]
        if left:
            yield SchedulerCheck(
                check="cards", ok=False, detail=f"cards of no node group: node {node.name} has {', '.join(left)}",
                file_path=("node_groups",), hint="add a node group with their labels and resource",
            )  # fmt: skip


def _check_labels(site: KubernetesSite, nodes: Sequence[NodeInfo], given: Iterable[str]) -> Iterator[SchedulerCheck]:
    keys = {key for node in nodes for key in node.labels}
    for group in site.cluster.node_groups:
        place = ("node_groups", group.name)
        for key, value in site.labels(group.name).items():
            values = {node.labels[key] for node in nodes if key in node.labels}
            wrong = f"unknown label '{key}'" if key not in keys else f"no node has label '{key}: {value}'"
            if value not in values:
                near = suggest_name(key, keys) if key not in keys else suggest_name(value, values)
                yield SchedulerCheck(
                    check="labels", ok=False, detail=wrong, hint=near or "", file_path=(*place, "labels", key)
                )
        resource = site.resource(group.name)
        if resource not in given:
            yield SchedulerCheck(
                check="resource", ok=False, detail=f"unknown resource '{resource}'", file_path=(*place, "resource"),
                hint=suggest_name(resource, given) or "is the device plugin of the cards installed?",
            )  # fmt: skip


def _check_name(option: str, name: str, known: Iterable[str], what: str) -> SchedulerCheck:
    names = list(known)
    if name in names:
        return SchedulerCheck(check=option, ok=True, detail=f"{what} '{name}' exists")
    return SchedulerCheck(
        check=option, ok=False, detail=f"unknown {what} '{name}'", hint=suggest_name(name, names) or "",
        file_path=("options", option),
    )  # fmt: skip


def _guarded(check: str, place: tuple[str, ...], found: Iterator[SchedulerCheck]) -> Iterator[SchedulerCheck]:
    """Yield findings; an error of the server is one as well."""
    try:
        yield from found
    except IsthmusError as error:
        yield SchedulerCheck(check=check, ok=False, detail=error.message, hint=error.hint or "", file_path=place)


def _listed(client: KubernetesClient, path: str, kind: str) -> list[str]:
    items, _ = list_objects(client, path, kind)
    return [_name_of(item) for item in items]


def _names(client: KubernetesClient, path: str, kind: str) -> list[str]:
    """Return the names of a collection for a hint, none if this agent may not list it."""
    try:
        return _listed(client, path, kind)
    except IsthmusError:
        return []


def _name_of(item: Mapping[str, Any]) -> str:
    return str((item.get("metadata") or {}).get("name", ""))
