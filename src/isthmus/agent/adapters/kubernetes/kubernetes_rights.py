"""`needed_rights`: what the agent may do at the API server, and no more; `deploy/kubernetes` grants the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from isthmus.agent.adapters.kubernetes.kubernetes_site import KubernetesSite
from isthmus.agent.adapters.kubernetes.manifests import workload_resource
from isthmus.agent.adapters.kubernetes.resource_slices import CLAIMS, GROUP, SLICES


@dataclass(frozen=True, kw_only=True, order=True)
class NeededRight:
    """A verb on a resource of an API group: in the site's namespace, or in the whole cluster."""

    group: str
    resource: str
    verb: str
    in_cluster: bool = False

    def __str__(self) -> str:
        """Return the right as one would ask for it."""
        return f"{self.verb} {self.resource}{f'.{self.group}' if self.group else ''}"


def needed_rights(site: KubernetesSite) -> Iterator[NeededRight]:
    """Yield the rights that the adapter uses, those of `isthmus site check` included."""
    group, plural = workload_resource(site)
    for verb in ("create", "get", "delete"):
        yield NeededRight(group=group, resource=plural, verb=verb)
    for verb in ("create", "patch", "delete"):
        yield NeededRight(group="", resource="secrets", verb=verb)
    yield NeededRight(group="", resource="pods", verb="list")
    yield NeededRight(group="", resource="namespaces", verb="get")
    for resource in ("nodes", "pods"):
        for verb in ("list", "watch"):
            yield NeededRight(group="", resource=resource, verb=verb, in_cluster=True)
    for resource in (SLICES, CLAIMS) if site.device_driver else ():
        for verb in ("list", "watch"):
            yield NeededRight(group=GROUP, resource=resource, verb=verb, in_cluster=True)
    if site.kueue:
        yield NeededRight(group="kueue.x-k8s.io", resource="localqueues", verb="list")
    elif site.queue:
        yield NeededRight(group="scheduling.volcano.sh", resource="queues", verb="list", in_cluster=True)
    if site.priority or site.preempting_priority:
        group, plural, _ = priority_classes(site)
        yield NeededRight(group=group, resource=plural, verb="list", in_cluster=True)


def priority_classes(site: KubernetesSite) -> tuple[str, str, str]:
    """Return API group, resource and path of the priority classes that the site's options name."""
    if site.kueue:
        group, plural = "kueue.x-k8s.io", "workloadpriorityclasses"
        return group, plural, f"/apis/{group}/v1beta1/{plural}"
    group, plural = "scheduling.k8s.io", "priorityclasses"
    return group, plural, f"/apis/{group}/v1/{plural}"
