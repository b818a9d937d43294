"""`KubernetesSite`: how nodes and pods of a Kubernetes cluster are the node groups, cards and jobs of a site."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from types import MappingProxyType

from isthmus.agent.adapters.kubernetes.kubernetes_objects import NodeInfo, PodInfo
from isthmus.agent.adapters.scheduler_adapter import CardNode, ForeignJob
from isthmus.agent.adapters.site_options import MIN_TIMEOUT_S, check_options, number_option
from isthmus.core.errors import FieldError, InputError
from isthmus.core.files.validation_errors import suggest_name
from isthmus.core.owner.site_file import NodeSelector, SiteFile
from isthmus.core.pool import Cluster, NodeGroup

OPTIONS = (
    "bind_s", "context", "courier_host", "courier_port", "device_driver", "grace_s", "image", "kubeconfig",
    "max_minutes", "namespace", "preempting_priority", "priority", "python", "queue", "registry", "storage_claim",
    "storage_path", "timeout_s", "workload",
)  # fmt: skip
WORKLOADS = ("job", "jobset", "volcano")
_DEFAULT_RESOURCE = "nvidia.com/gpu"
_PART = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_LABEL_KEY = re.compile(rf"([a-z0-9.-]{{1,253}}/)?{_PART}")
_LABEL_VALUE = re.compile(rf"({_PART})?")
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_REGISTRY = re.compile(r"[a-z0-9][a-z0-9.-]{0,252}(:[0-9]{1,5})?(/[a-z0-9][a-z0-9._-]{0,127}){0,8}")
_FOLDER = re.compile(r"(/[A-Za-z0-9._-]*[A-Za-z0-9_-][A-Za-z0-9._-]*)+")
_JOB_PREFIX = "k8s-"


class KubernetesSite:
    """The mapping of `site.yaml` for `cluster`. Raises `InputError` for options or labels that Kubernetes cannot have.

    A site's holds are workloads of one kind in one namespace. A `queue` is Volcano's, or, for Jobs and JobSets, one of
    Kueue, which then decides when a hold is admitted. `priority` and `preempting_priority` name priority classes: of
    Kueue (WorkloadPriorityClass) with such a queue, else of the cluster (PriorityClass). With a `device_driver` nodes
    without a device plugin have the cards that the driver publishes; its DeviceClass maps `resource` to them. Pods get
    rendered images from the `registry`, by their digests, else `image`. They see the files of the claim `storage_claim`
    below `storage_path`, where the agent's machine has the same.
    """

    def __init__(self, file: SiteFile, cluster: Cluster) -> None:
        check_options(file, "Kubernetes", OPTIONS)
        options = {name: str(value) for name, value in file.options.items()}
        self.file, self.cluster = file, cluster
        self.workload = options.get("workload", "job")
        if self.workload not in WORKLOADS:
            message, place = f"unknown workload '{self.workload}'", ("options", "workload")
            raise FieldError(message, place=place, hint=suggest_name(self.workload, WORKLOADS))
        self.image, self.python = options.get("image", ""), options.get("python", "python3")
        if not self.image:
            hint = "set options.image; it has isthmus in it"
            raise FieldError("names no image for the ranks", place=("options", "image"), hint=hint)
        self.registry = options.get("registry", "").rstrip("/")
        if self.registry and not _REGISTRY.fullmatch(self.registry):
            message = f"'{self.registry}' cannot be a registry"
            raise FieldError(message, place=("options", "registry"), hint="give HOST/FOLDER, without https://")
        self.storage_claim, self.storage_path = _name(options, "storage_claim"), options.get("storage_path", "")
        if bool(self.storage_claim) != bool(self.storage_path):
            missing = "storage_path" if self.storage_claim else "storage_claim"
            message, hint = f"names no {missing}", "storage_claim and storage_path belong together"
            raise FieldError(message, place=("options",), hint=hint)
        if self.storage_path and not _FOLDER.fullmatch(self.storage_path):
            message, hint = f"'{self.storage_path}' cannot be a folder", "give an absolute path, such as /data"
            raise FieldError(message, place=("options", "storage_path"), hint=hint)
        self.namespace, self.queue = _name(options, "namespace"), _name(options, "queue")
        self.priority, self.preempting_priority = _name(options, "priority"), _name(options, "preempting_priority")
        self.device_driver = _name(options, "device_driver")
        self.courier_host = options.get("courier_host", "")
        self.courier_port = round(number_option(file, "courier_port", 0, most=65535, whole=True))
        self.timeout_s = number_option(file, "timeout_s", 10.0, least=MIN_TIMEOUT_S)
        self.bind_s = number_option(file, "bind_s", 3.0)
        self.grace_s = round(number_option(file, "grace_s", 30.0))
        self.max_s = round(number_option(file, "max_minutes", 0.0) * 60)
        self._groups = {group.name: self._selector(group.name) for group in cluster.node_groups}

    @property
    def kueue(self) -> bool:
        """Whether Kueue admits the holds."""
        return bool(self.queue) and self.workload != "volcano"

    @property
    def gang(self) -> bool:
        """Whether the cluster starts all pods of a hold or none, so that a hold may wait in its queue."""
        return self.kueue or self.workload == "volcano"

    @property
    def resources(self) -> tuple[str, ...]:
        """What Kubernetes calls the cards of the node groups."""
        return tuple(dict.fromkeys(self.resource(group) for group in self._groups))

    def group(self, name: str) -> NodeGroup:
        """Return a node group; raise `InputError` for an unknown one."""
        if name not in self._groups:
            raise InputError(f"unknown node group '{name}'", hint=suggest_name(name, self._groups))
        return next(group for group in self.cluster.node_groups if group.name == name)

    def resource(self, group: str) -> str:
        """Return what Kubernetes calls a card of a node group."""
        return self._groups[group].resource or _DEFAULT_RESOURCE

    def pod_image(self, image: str) -> str:
        """Return the image of a pod for a rendered one, `NAME@DIGEST`; raise `InputError` without a registry."""
        if not image:
            return self.image
        if not self.registry:
            raise InputError("site.yaml names no registry for images", hint="set options.registry")
        return f"{self.registry}/{image}"

    def labels(self, group: str) -> dict[str, str]:
        """Return the labels of a node group's nodes."""
        return dict(self._groups[group].labels)

    def card_nodes(
        self, nodes: Iterable[NodeInfo], devices: Mapping[str, int] = MappingProxyType({})
    ) -> list[CardNode]:
        """Return the nodes with cards, each in the first node group whose labels it has, by node group.

        `devices` are the cards of a driver, by node: they count where no device plugin gives out the resource.
        """
        nodes, taken, found = sorted(nodes, key=lambda node: node.name), set[str](), list[CardNode]()
        for group, selector in self._groups.items():
            resource = self.resource(group)
            for node in nodes:
                fits = all(node.labels.get(key) == value for key, value in selector.labels.items())
                count = node.count(resource) or devices.get(node.name, 0)
                if node.name in taken or not fits or not count:
                    continue
                taken.add(node.name)
                found.append(
                    CardNode(
                        name=node.name, node_group=group,
                        cards=tuple(f"{group}/{node.name}/{card}" for card in range(count)),
                        usable=node.ready and set(node.taints) <= {resource},
                    )
                )  # fmt: skip
        return found

    def foreign_jobs(
        self, pods: Iterable[PodInfo], nodes: Sequence[CardNode], taken: Set[str], preempts_below: int | None
    ) -> tuple[ForeignJob, ...]:
        """Return the jobs of others that use or want cards; the pods of one owner are one job.

        Kubernetes tells how many cards a pod has and not which, so a running pod is given cards of its node that no
        hold has. Jobs below the priority `preempts_below` can be preempted.
        """
        left = {node.name: [card for card in node.cards if card not in taken] for node in nodes}
        group_of = {node.name: node.node_group for node in nodes}
        jobs: dict[str, list[PodInfo]] = {}
        for pod in sorted(pods, key=lambda pod: pod.name):
            jobs.setdefault(pod.owner, []).append(pod)
        found: list[ForeignJob] = []
        for owner, members in sorted(jobs.items()):
            wanted, cards = dict[str, int](), list[str]()
            for pod in members:
                group = group_of.get(pod.node) if pod.node else self._waits_for(pod)
                count = pod.count(self.resource(group)) if group is not None else 0
                if group is None or not count:
                    continue
                wanted[group] = wanted.get(group, 0) + count
                cards += left.get(pod.node, [])[:count]
                left[pod.node] = left.get(pod.node, [])[count:]
            if wanted:
                priority = max(pod.priority for pod in members)
                found.append(
                    ForeignJob(
                        name=f"{_JOB_PREFIX}{owner}", priority=priority, wanted=wanted, cards=tuple(cards),
                        running=any(pod.node for pod in members),
                        preemptible=preempts_below is not None and priority < preempts_below,
                    )
                )  # fmt: skip
        return tuple(found)

    def _waits_for(self, pod: PodInfo) -> str | None:
        """Return the first node group with the cards that a pod without a node waits for."""
        return next((group for group in self._groups if pod.count(self.resource(group))), None)

    def _selector(self, group: str) -> NodeSelector:
        selector, place = self.file.node_groups.get(group), ("node_groups", group)
        if selector is None:
            raise FieldError(f"names no labels for node group '{group}'", place=place, hint="add node_groups")
        if selector.partition:
            hint = "name labels, and options.queue for a queue"
            raise FieldError("Kubernetes has no partitions", place=(*place, "partition"), hint=hint)
        for key, value in selector.labels.items():
            if not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
                raise FieldError(f"'{key}: {value}' cannot be a label of a node", place=(*place, "labels", key))
        if selector.resource and not _LABEL_KEY.fullmatch(selector.resource):
            message = f"'{selector.resource}' cannot be the name of a resource"
            raise FieldError(message, place=(*place, "resource"))
        return selector


def is_foreign(job: str) -> bool:
    """Return whether a victim is a job of others, not a part of this agent."""
    return job.startswith(_JOB_PREFIX)


def _name(options: dict[str, str], option: str) -> str:
    name = options.get(option, "")
    if name and not _NAME.fullmatch(name):
        raise FieldError(f"'{name}' cannot be a name at a Kubernetes cluster", place=("options", option))
    return name
