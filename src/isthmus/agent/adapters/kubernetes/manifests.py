"""The objects that are a hold at an API server: its workload, of the kind that the site wants, and its tickets.

Every object has our id in its name, so that the server refuses a second one, and in its labels. The pods of a unit are
numbered; each reads the ticket of its number, a file of the unit's Secret, and starts the courier with it.

Kubernetes 1.24 and later: https://kubernetes.io/docs/concepts/workloads/controllers/job/; JobSet v1alpha2:
https://jobset.sigs.k8s.io; Volcano v1alpha1: https://volcano.sh; Kueue: https://kueue.sigs.k8s.io.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from isthmus.agent.adapters.kubernetes.kubernetes_objects import CLAIM_LABEL, HOLD_LABEL, SITE_LABEL, UNIT_LABEL
from isthmus.agent.adapters.kubernetes.kubernetes_site import KubernetesSite
from isthmus.agent.adapters.scheduler_adapter import ContainerNeed
from isthmus.core.errors import InputError

JOB_ANNOTATION = "isthmus.io/job"
TICKETS, WORK = "/run/isthmus/tickets", "/isthmus"
QUEUE_LABEL, PRIORITY_LABEL = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"
_KEPT_S = 600
"""How long a workload that has ended stays listed."""

_GIVES_UP = ("--first-contact-s", "50", "--linger-s", "10")
"""A pod whose agent is gone before it ever spoke to it ends within a minute, and its cards are free."""

_COLLECTIONS = {
    "job": ("/apis/batch/v1", "jobs", "batch/v1", "Job"),
    "jobset": ("/apis/jobset.x-k8s.io/v1alpha2", "jobsets", "jobset.x-k8s.io/v1alpha2", "JobSet"),
    "volcano": ("/apis/batch.volcano.sh/v1alpha1", "jobs", "batch.volcano.sh/v1alpha1", "Job"),
}
_INDEX_VARIABLES = {"job": "JOB_COMPLETION_INDEX", "jobset": "JOB_COMPLETION_INDEX", "volcano": "VC_TASK_INDEX"}


@dataclass(frozen=True, kw_only=True)
class HoldUnit:
    """The ranks of a hold with equal cards in one node group, by their numbers in the request.

    `nodes` are those that placement by topology chose, which their pods prefer.
    """

    node_group: str
    num_cards: int
    ranks: tuple[int, ...]
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HoldPlan:
    """What a hold asks for; `claim` numbers its tries, `preempts` says with which priority.

    `containers` has what the pods are made from, by node group.
    """

    id: str
    claim: int
    job: str
    attempt: int
    units: tuple[HoldUnit, ...]
    preempts: bool = False
    containers: Mapping[str, ContainerNeed] = field(default_factory=dict)


def hold_units(ranks: Sequence[tuple[str, int]], nodes: Sequence[str] = ()) -> tuple[HoldUnit, ...]:
    """Return the units of ranks, which are pairs of node group and number of cards; `nodes` has the node of each."""
    found: dict[tuple[str, int], list[int]] = {}
    for number, need in enumerate(ranks):
        found.setdefault(need, []).append(number)
    return tuple(
        HoldUnit(
            node_group=group, num_cards=num_cards, ranks=tuple(numbers),
            nodes=tuple(dict.fromkeys(nodes[number] for number in numbers if nodes and nodes[number])),
        )
        for (group, num_cards), numbers in found.items()
    )  # fmt: skip


def workload_path(site: KubernetesSite, namespace: str) -> str:
    """Return the collection of the site's kind of workload."""
    prefix, plural, _, _ = _COLLECTIONS[site.workload]
    return f"{prefix}/namespaces/{namespace}/{plural}"


def workload_resource(site: KubernetesSite) -> tuple[str, str]:
    """Return API group and resource of the site's kind of workload, as rights name them."""
    prefix, plural, _, _ = _COLLECTIONS[site.workload]
    return prefix.split("/")[2], plural


def workload_names(site: KubernetesSite, hold_id: str, num_units: int) -> tuple[str, ...]:
    """Return the names of a hold's workloads: a Job per unit, or one of the kinds that have units themselves."""
    return tuple(unit_name(hold_id, at) for at in range(num_units)) if site.workload == "job" else (unit_name(hold_id),)


def unit_name(hold_id: str, unit: int | None = None) -> str:
    """Return the name of a hold's object: of the whole, or of one unit."""
    return f"isthmus-{hold_id}" if unit is None else f"isthmus-{hold_id}-{unit}"


def secret_name(plan: HoldPlan, unit: int) -> str:
    """Return the name of a unit's tickets: each try has its own, so that the end of one leaves those of the next."""
    return f"{unit_name(plan.id, unit)}-{plan.claim}"


def workloads(site: KubernetesSite, plan: HoldPlan) -> tuple[dict[str, Any], ...]:
    """Return the workloads of a hold; raise `InputError` if the site's kind cannot hold it all at once."""
    if site.workload == "job":
        if site.kueue and len(plan.units) > 1:
            raise InputError(
                f"Kueue admits the Jobs of {plan.job}/{plan.attempt} one by one, and it has {len(plan.units)}",
                hint="install JobSet and set options.workload: jobset",
            )
        return tuple(
            _workload(site, plan, unit_name(plan.id, at), {**_job_spec(site, plan, at), **_suspended(site)})
            for at in range(len(plan.units))
        )
    spec = _jobset_spec(site, plan) if site.workload == "jobset" else _volcano_spec(site, plan)
    return (_workload(site, plan, unit_name(plan.id), spec),)


def ticket_secret(site: KubernetesSite, plan: HoldPlan, unit: int, tickets: Sequence[bytes]) -> dict[str, Any]:
    """Return the Secret with the tickets of a unit's pods, a file for each number."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": secret_name(plan, unit), "labels": _labels(site, plan)},
        "type": "Opaque",
        "immutable": True,
        "data": {str(at): base64.b64encode(ticket).decode() for at, ticket in enumerate(tickets)},
    }


def owned_by(workload: Mapping[str, Any]) -> dict[str, Any]:
    """Return the patch that lets an object be deleted with `workload`, as the API server returned it."""
    metadata = workload["metadata"]
    owner = {
        "apiVersion": workload["apiVersion"], "kind": workload["kind"], "name": metadata["name"], "uid": metadata["uid"]
    }  # fmt: skip
    return {"metadata": {"ownerReferences": [owner]}}


def _workload(site: KubernetesSite, plan: HoldPlan, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    _, _, version, kind = _COLLECTIONS[site.workload]
    labels = _labels(site, plan)
    if site.kueue:
        labels[QUEUE_LABEL] = site.queue
        if _priority(site, plan):
            labels[PRIORITY_LABEL] = _priority(site, plan)
    about = {JOB_ANNOTATION: f"{plan.job}/{plan.attempt}"}
    metadata = {"name": name, "labels": labels, "annotations": about}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _job_spec(site: KubernetesSite, plan: HoldPlan, unit: int) -> dict[str, Any]:
    count = len(plan.units[unit].ranks)
    return {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimit": 0,
        "ttlSecondsAfterFinished": _KEPT_S,
        **({"activeDeadlineSeconds": site.max_s} if site.max_s else {}),
        "template": pod_template(site, plan, unit),
    }


def _jobset_spec(site: KubernetesSite, plan: HoldPlan) -> dict[str, Any]:
    jobs = []
    for at in range(len(plan.units)):
        spec = _job_spec(site, plan, at)
        del spec["ttlSecondsAfterFinished"]
        jobs.append({"name": f"unit-{at}", "replicas": 1, "template": {"spec": spec}})
    return {
        **_suspended(site),
        "failurePolicy": {"maxRestarts": 0},
        "network": {"enableDNSHostnames": False},
        "ttlSecondsAfterFinished": _KEPT_S,
        "replicatedJobs": jobs,
    }


def _volcano_spec(site: KubernetesSite, plan: HoldPlan) -> dict[str, Any]:
    tasks = [
        {
            "name": f"unit-{at}",
            "replicas": len(unit.ranks),
            "minAvailable": len(unit.ranks),
            "template": pod_template(site, plan, at),
        }
        for at, unit in enumerate(plan.units)
    ]
    return {
        "schedulerName": "volcano",
        "minAvailable": sum(len(unit.ranks) for unit in plan.units),
        **({"queue": site.queue} if site.queue else {}),
        **({"priorityClassName": _priority(site, plan)} if _priority(site, plan) else {}),
        "plugins": {"env": []},
        "policies": [
            {"event": "PodFailed", "action": "TerminateJob"},
            {"event": "PodEvicted", "action": "TerminateJob"},
        ],
        "ttlSecondsAfterFinished": _KEPT_S,
        "tasks": tasks,
    }


def pod_template(site: KubernetesSite, plan: HoldPlan, unit: int) -> dict[str, Any]:
    """Return the pods of a unit: a card holder that starts the courier, with its share of the node."""
    asked = plan.units[unit]
    resource, need = site.resource(asked.node_group), _container_need(site, plan, asked)
    limits = {resource: str(asked.num_cards)}
    if need.cpu_cores is not None:
        num_millis = max(1, int(need.cpu_cores * 1000))
        limits["cpu"] = f"{num_millis}m" if num_millis % 1000 else str(num_millis // 1000)
    if need.memory_bytes is not None:
        limits["memory"] = str(need.memory_bytes)
    priority = "" if site.kueue else _priority(site, plan)
    ticket = f"{TICKETS}/$({_INDEX_VARIABLES[site.workload]})"
    return {
        "metadata": {"labels": {**_labels(site, plan), UNIT_LABEL: str(unit)}},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": site.grace_s,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            **({"priorityClassName": priority} if priority else {}),
            **({"activeDeadlineSeconds": site.max_s} if site.max_s and site.workload == "volcano" else {}),
            "nodeSelector": site.labels(asked.node_group),
            **_affinity(asked),
            "tolerations": [{"key": resource, "operator": "Exists"}],
            "containers": [
                {
                    "name": "rank",
                    "image": site.pod_image(need.image),
                    "command": [
                        site.python, "-m", "isthmus.agent.courier.run_part", "--ticket", ticket, "--work", WORK,
                        *_GIVES_UP,
                    ],
                    "resources": {"limits": limits, "requests": limits},
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                    "volumeMounts": [
                        {"name": "tickets", "mountPath": TICKETS, "readOnly": True},
                        {"name": "work", "mountPath": WORK},
                        {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108 - the pod's own
                        *([{"name": "storage", "mountPath": site.storage_path}] if site.storage_claim else []),
                    ],
                }
            ],
            "volumes": [
                {"name": "tickets", "secret": {"secretName": secret_name(plan, unit), "defaultMode": 0o444}},
                {"name": "work", "emptyDir": {}},
                {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
                *_storage(site),
            ],
        },
    }  # fmt: skip


def _affinity(unit: HoldUnit) -> dict[str, Any]:
    """Return the wish for the nodes that placement chose: the cluster's own scheduler may know better."""
    if not unit.nodes:
        return {}
    chosen = [{"key": "kubernetes.io/hostname", "operator": "In", "values": list(unit.nodes)}]
    term = {"weight": 100, "preference": {"matchExpressions": chosen}}
    return {"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [term]}}}


def _storage(site: KubernetesSite) -> list[dict[str, Any]]:
    """Return the volume of the job's files, if the site has one."""
    claim = {"claimName": site.storage_claim}
    return [{"name": "storage", "persistentVolumeClaim": claim}] if site.storage_claim else []


def _container_need(site: KubernetesSite, plan: HoldPlan, unit: HoldUnit) -> ContainerNeed:
    """Return what the pods of a unit are made from; one that was not rendered has its cards' share of the node."""
    if unit.node_group in plan.containers:
        return plan.containers[unit.node_group]
    group = site.group(unit.node_group)
    share, num_bytes = unit.num_cards / group.chips_per_node, group.memory_bytes_per_node
    return ContainerNeed(
        cpu_cores=None if group.cpus_per_node is None else group.cpus_per_node * share,
        memory_bytes=None if num_bytes is None else int(num_bytes * share),
    )


def _labels(site: KubernetesSite, plan: HoldPlan) -> dict[str, str]:
    return {HOLD_LABEL: plan.id, CLAIM_LABEL: str(plan.claim), SITE_LABEL: site.cluster.name}


def _priority(site: KubernetesSite, plan: HoldPlan) -> str:
    return site.preempting_priority if plan.preempts else site.priority


def _suspended(site: KubernetesSite) -> dict[str, Any]:
    return {"suspend": True} if site.kueue else {}
