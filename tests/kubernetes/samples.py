"""A site whose scheduler is a test's Kubernetes cluster: its files, its nodes, and adapters of it."""

from __future__ import annotations

from typing import Any

from isthmus.agent.adapters.kubernetes.api_access import ApiAccess
from isthmus.agent.adapters.kubernetes.kubernetes_client import KubernetesClient
from isthmus.agent.adapters.kubernetes.kubernetes_site import KubernetesSite
from isthmus.core.owner.site_file import NodeSelector, SiteFile
from isthmus.core.pool import Cluster, NodeGroup
from tests.kubernetes.api_stand_in import ApiStandIn

NAMESPACE = "isthmus"
GPU = "nvidia.com/gpu"
CLUSTER = Cluster(name="east", owner="o", node_groups=(NodeGroup(name="h20", chip="H20", nodes=2, chips_per_node=4),))
OPTIONS = {"image": "registry.example/isthmus:1", "namespace": NAMESPACE, "grace_s": 1, "bind_s": 3}


def site_of(cluster: Cluster = CLUSTER, **options: str | float) -> KubernetesSite:
    """Return the site, whose nodes have the label `chip`."""
    groups = {
        group.name: NodeSelector(labels={"example.com/chip": group.name}, resource=GPU) for group in cluster.node_groups
    }
    return KubernetesSite(SiteFile(kind="kubernetes", node_groups=groups, options={**OPTIONS, **options}), cluster)


def client_of(server: ApiStandIn, clock: Any = None) -> KubernetesClient:
    """Return a client of the stand-in."""
    access = ApiAccess(server="https://api.example", token="secret-token")
    extra = {} if clock is None else {"clock": clock}
    return KubernetesClient(access, transport=server.transport(), **extra)


def node(name: str, cards: int = 4, group: str = "h20", **spec: Any) -> dict[str, Any]:
    """Return a node with cards, ready for pods."""
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"example.com/chip": group, "kubernetes.io/hostname": name}},
        "spec": spec,
        "status": {
            "allocatable": {GPU: str(cards), "cpu": "64", "memory": "512Gi", "pods": "110"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def pod(name: str, cards: int, node_name: str = "", *, priority: int = 0, space: str = "other") -> dict[str, Any]:
    """Return a pod of another user."""
    limits = {GPU: str(cards)}
    spec: dict[str, Any] = {
        "priority": priority,
        "containers": [{"name": "c", "image": "i", "resources": {"limits": limits, "requests": limits}}],
    }
    if node_name:
        spec["nodeName"] = node_name
    status = {"phase": "Running" if node_name else "Pending"}
    return {"metadata": {"name": name, "namespace": space}, "spec": spec, "status": status}


def filled(server: ApiStandIn) -> ApiStandIn:
    """Put the site's namespace, its nodes and its priority classes into an empty server."""
    server.put("", "namespaces", {"metadata": {"name": NAMESPACE}})
    for number in (1, 2):
        server.put("", "nodes", node(f"n{number}"))
    for name, value, policy in (("isthmus", 0, "Never"), ("isthmus-preempting", 1000, "PreemptLowerPriority")):
        body = {"metadata": {"name": name}, "value": value, "preemptionPolicy": policy}
        server.put("scheduling.k8s.io", "priorityclasses", body)
    return server
