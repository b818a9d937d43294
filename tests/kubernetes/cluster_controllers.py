"""`ClusterControllers`: what a cluster has beside its API server, as far as the tests need it.

A step makes pods of workloads (Job, JobSet, Volcano's Job), binds them by labels, free cards and priority, preempts,
fails a Job whose pod failed, and deletes what lost its owner. `nodes` runs the pods (`PodProcesses`), or, without it,
pods count as running once they are bound. It speaks to any API server by REST.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, Protocol

import httpx

WORKLOADS = ("/apis/batch/v1/jobs", "/apis/jobset.x-k8s.io/v1alpha2/jobsets", "/apis/batch.volcano.sh/v1alpha1/jobs")
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"


class Nodes(Protocol):
    """What runs the pods that are bound."""

    def run(self, pods: Iterable[dict[str, Any]], api: httpx.Client) -> None:
        """Start, stop and report the processes of pods."""

    def end(self) -> None:
        """End every process."""


class ClusterControllers:
    """The controllers, by a client of the API server; `start` runs them in a thread, `step` once."""

    def __init__(self, api: httpx.Client, nodes: Nodes | None = None) -> None:
        self.api, self._nodes = api, nodes
        self.admits = True
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Run until `stop`."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and every pod's processes."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)
        if self._nodes is not None:
            self._nodes.end()

    def step(self) -> None:
        """Do once what each controller does."""
        workloads = [(path, one) for path in WORKLOADS for one in self._list(path)]
        if self.admits:
            self._admit(workloads)
        pods = self._list("/api/v1/pods")
        self._make_pods(workloads, pods)
        self._collect_garbage()
        pods = self._list("/api/v1/pods")
        self._bind(pods)
        pods = self._list("/api/v1/pods")
        if self._nodes is not None:
            self._nodes.run(pods, self.api)
        else:
            for pod in pods:
                if "deletionTimestamp" in pod["metadata"]:
                    self.api.request("DELETE", _path(pod), json={"gracePeriodSeconds": 0})
        self._end_jobs(workloads, pods)

    def _run(self) -> None:
        while not self._stop.wait(0.03):
            try:
                self.step()
            except httpx.HTTPError:  # the server is down: the next step tries again
                continue

    def _list(self, path: str) -> list[dict[str, Any]]:
        answer = self.api.get(path)
        if answer.status_code == httpx.codes.NOT_FOUND:
            return []
        answer.raise_for_status()
        found = answer.json()
        about = {"apiVersion": found["apiVersion"], "kind": found["kind"].removesuffix("List")}
        return [{**about, **item} for item in found["items"] or ()]

    def _admit(self, workloads: list[tuple[str, dict[str, Any]]]) -> None:
        """Admit what waits in a queue, as Kueue does."""
        for path, one in workloads:
            if QUEUE_LABEL in (one["metadata"].get("labels") or {}) and one["spec"].get("suspend"):
                one["spec"]["suspend"] = False
                self.api.patch(_path(one, path), json={"spec": {"suspend": False}}, headers=_MERGE)

    def _make_pods(self, workloads: list[tuple[str, dict[str, Any]]], pods: list[dict[str, Any]]) -> None:
        names = {(pod["metadata"]["namespace"], pod["metadata"]["name"]) for pod in pods}
        for path, one in workloads:
            if one["spec"].get("suspend") or _has_ended(one):
                continue
            for at, (template, count) in enumerate(_templates(path, one)):
                for index in range(count):
                    name = f"{one['metadata']['name']}-{at}-{index}"
                    if (one["metadata"]["namespace"], name) not in names:
                        self.api.post(
                            f"/api/v1/namespaces/{one['metadata']['namespace']}/pods",
                            json=_pod(one, template, name, index),
                        )

    def _collect_garbage(self) -> None:
        """Delete what has lost its owner; owners are listed last, since they may be newer than what they own."""
        owned = [(path, one) for path in ("/api/v1/pods", "/api/v1/secrets") for one in self._list(path)]
        living = {one["metadata"]["uid"] for path in WORKLOADS for one in self._list(path)}
        for path, one in owned:
            owners = {owner["uid"] for owner in one["metadata"].get("ownerReferences") or ()}
            if owners and not owners & living and "deletionTimestamp" not in one["metadata"]:
                self.api.request("DELETE", _path(one, path))

    def _bind(self, pods: list[dict[str, Any]]) -> None:
        nodes = self._list("/api/v1/nodes")
        waiting = [
            pod for pod in pods if not pod["spec"].get("nodeName") and not pod["metadata"].get("deletionTimestamp")
        ]
        for pod in sorted(waiting, key=lambda one: -one["spec"].get("priority", 0)):
            target = next((node for node in nodes if _fits(pod, node, pods)), None)
            if target is None:
                self._preempt(pod, nodes, pods)
                continue
            name = target["metadata"]["name"]
            body = {
                "apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod["metadata"]["name"]},
                "target": {"apiVersion": "v1", "kind": "Node", "name": name},
            }  # fmt: skip
            if self.api.post(f"{_path(pod)}/binding", json=body).is_success:
                pod["spec"]["nodeName"] = name

    def _preempt(self, pod: dict[str, Any], nodes: list[dict[str, Any]], pods: list[dict[str, Any]]) -> None:
        priority = pod["spec"].get("priority", 0)
        if priority <= 0:
            return
        for node in nodes:
            lower = [
                one
                for one in pods
                if one["spec"].get("nodeName") == node["metadata"]["name"] and one["spec"].get("priority", 0) < priority
            ]
            if lower and _fits(pod, node, [one for one in pods if one not in lower]):
                for victim in lower:
                    self.api.request("DELETE", _path(victim))
                return

    def _end_jobs(self, workloads: list[tuple[str, dict[str, Any]]], pods: list[dict[str, Any]]) -> None:
        for path, one in workloads:
            own = [pod for pod in pods if _owner(pod) == one["metadata"]["uid"]]
            failed = any((pod.get("status") or {}).get("phase") == "Failed" for pod in own)
            expected = sum(count for _, count in _templates(path, one))
            succeeded = [pod for pod in own if (pod.get("status") or {}).get("phase") == "Succeeded"]
            if _has_ended(one) or not (failed or len(succeeded) == expected):
                continue
            condition = {"type": "Failed" if failed else "Complete", "status": "True"}
            self.api.patch(f"{_path(one, path)}/status", json={"status": {"conditions": [condition]}}, headers=_MERGE)
            for pod in own:
                if (pod.get("status") or {}).get("phase") in ("Pending", "Running"):
                    self.api.request("DELETE", _path(pod))


_MERGE = {"Content-Type": "application/merge-patch+json"}


def _templates(path: str, one: dict[str, Any]) -> list[tuple[dict[str, Any], int]]:
    """Return the pod templates of a workload, each with the number of its pods."""
    spec = one["spec"]
    if "jobset" in path:
        specs = [job["template"]["spec"] for job in spec["replicatedJobs"]]
        return [(inner["template"], inner["completions"]) for inner in specs]
    if "volcano" in path:
        return [(task["template"], task["replicas"]) for task in spec["tasks"]]
    return [(spec["template"], spec["completions"])]


def _pod(one: dict[str, Any], template: dict[str, Any], name: str, index: int) -> dict[str, Any]:
    owner = {
        "apiVersion": one["apiVersion"], "kind": one["kind"], "name": one["metadata"]["name"],
        "uid": one["metadata"]["uid"], "controller": True,
    }  # fmt: skip
    spec = {**template["spec"], "containers": [dict(one) for one in template["spec"]["containers"]]}
    for container in spec["containers"]:
        numbers = [{"name": name, "value": str(index)} for name in ("JOB_COMPLETION_INDEX", "VC_TASK_INDEX")]
        container["env"] = [*container.get("env", ()), *numbers]
    metadata = {
        "name": name, "labels": (template.get("metadata") or {}).get("labels", {}), "ownerReferences": [owner],
        "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
    }  # fmt: skip
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _fits(pod: dict[str, Any], node: dict[str, Any], pods: list[dict[str, Any]]) -> bool:
    labels = node["metadata"].get("labels") or {}
    if any(labels.get(key) != value for key, value in (pod["spec"].get("nodeSelector") or {}).items()):
        return False
    if node["spec"].get("unschedulable"):
        return False
    given = node["status"].get("allocatable") or {}
    for resource, wanted in _asked(pod).items():
        if "/" not in resource:
            continue
        used = sum(
            _asked(one).get(resource, 0)
            for one in pods
            if one["spec"].get("nodeName") == node["metadata"]["name"]
            and (one.get("status") or {}).get("phase") not in ("Succeeded", "Failed")
        )
        if used + wanted > int(given.get(resource, 0)):
            return False
    return True


def _asked(pod: dict[str, Any]) -> dict[str, int]:
    found: dict[str, int] = {}
    for container in pod["spec"]["containers"]:
        for resource, count in ((container.get("resources") or {}).get("limits") or {}).items():
            if "/" in resource:
                found[resource] = found.get(resource, 0) + int(count)
    return found


def _owner(pod: dict[str, Any]) -> str:
    return next((one["uid"] for one in pod["metadata"].get("ownerReferences") or ()), "")


def _has_ended(one: dict[str, Any]) -> bool:
    conditions = (one.get("status") or {}).get("conditions") or ()
    return any(condition["type"] in ("Failed", "Complete") for condition in conditions)


def _path(one: dict[str, Any], collection: str = "/api/v1/pods") -> str:
    prefix, _, plural = collection.rpartition("/")
    return f"{prefix}/namespaces/{one['metadata']['namespace']}/{plural}/{one['metadata']['name']}"
