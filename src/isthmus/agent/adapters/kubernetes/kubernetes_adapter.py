"""`KubernetesAdapter`: cards of a Kubernetes cluster by its REST interface.

A hold is a workload under our own id whose pods take the cards. In each pod a keeper waits for what is to run there, so
a worker starts without another decision of the scheduler, and its cards stay between two attempts. Starts, stops, ends
and renewals are files of the run folders, which the courier carries, so they survive a dead API server.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from isthmus.agent.adapters.file_workers import FileWorkers
from isthmus.agent.adapters.kubernetes.hold_record import HoldRecord
from isthmus.agent.adapters.kubernetes.kubernetes_checks import check_kubernetes, preempting_value
from isthmus.agent.adapters.kubernetes.kubernetes_client import KubernetesClient
from isthmus.agent.adapters.kubernetes.kubernetes_holds import KubernetesHolds, TicketOffice
from isthmus.agent.adapters.kubernetes.kubernetes_objects import PodInfo, parse_node, parse_pod
from isthmus.agent.adapters.kubernetes.kubernetes_site import KubernetesSite, is_foreign
from isthmus.agent.adapters.kubernetes.label_topology import label_topology
from isthmus.agent.adapters.kubernetes.pod_keeper import ENDED, ORDER
from isthmus.agent.adapters.kubernetes.resource_slices import DeviceInventory
from isthmus.agent.adapters.kubernetes.watched_list import WatchedList
from isthmus.agent.adapters.local_adapter import WORKER_COMMAND, worker_variables
from isthmus.agent.adapters.scheduler_adapter import (
    Capabilities,
    CardNode,
    ContainerNeed,
    Hold,
    HoldRequest,
    RankStart,
    SchedulerCheck,
    SchedulerLook,
)
from isthmus.agent.courier.start_file import write_start
from isthmus.core.errors import InputError, UnavailableError
from isthmus.core.messages.worker_folder import WorkerFolder, write_atomically
from isthmus.core.pool_parts.group_topology import GroupTopology
from isthmus.core.process.exclusive_lock import exclusive_lock


class KubernetesAdapter(FileWorkers):
    """Hold cards of a Kubernetes cluster and run workers on them (see `SchedulerAdapter`).

    `courier` carries the run folders to and from the pods, in which `program` runs.
    """

    def __init__(
        self,
        site: KubernetesSite,
        state: Path,
        client: KubernetesClient,
        courier: TicketOffice,
        program: Sequence[str] = WORKER_COMMAND,
    ) -> None:
        preempts = bool(site.preempting_priority)
        self.capabilities = Capabilities(
            holds="scheduler",
            preempts=preempts,
            forgets=False,
            containers="scheduler",
            images=bool(site.registry),
            storage_path=site.storage_path,
        )
        self._site, self._client, self._courier = site, client, courier
        self._program = tuple(program)
        super().__init__(state / "queue")
        resources = site.resources
        self._nodes = WatchedList(client, "/api/v1/nodes", "NodeList", lambda item: parse_node(item, resources))
        self._pods = WatchedList(client, "/api/v1/pods", "PodList", lambda item: parse_pod(item, resources))
        self._holds = KubernetesHolds(
            site, client, courier, state.absolute() / "holds", self._card_nodes, self._all_pods
        )
        self._devices = DeviceInventory(client, site.device_driver, resources)
        self._epoch = ""
        self._preempts_below: int | None = None
        self._lock = threading.RLock()

    def topologies(self) -> dict[str, GroupTopology]:
        """Return what the labels of the nodes of each node group say."""
        with self._lock:
            labels = {node.name: node.labels for node in self._nodes.refresh().values()}
            nodes = self._card_nodes()
        groups = {node.node_group: [one.name for one in nodes if one.node_group == node.node_group] for node in nodes}
        found = {group: label_topology({name: labels[name] for name in names}) for group, names in groups.items()}
        return {group: one for group, one in found.items() if one is not None}

    def observe(self) -> SchedulerLook:
        """List this site's own pods; nodes and the pods of others come by their watches."""
        with self._lock:
            own, holds = self._holds.observe()
            if not self._epoch:
                path = f"/api/v1/namespaces/{self._holds.namespace}"
                self._epoch = str(self._client.get(path)["metadata"]["uid"])
                self._preempts_below = preempting_value(self._site, self._client)
            nodes = self._card_nodes()
            taken = {card for hold in holds for cards in hold.cards for card in cards}
            mine = {pod.uid for pod in own}
            others = [
                pod
                for pod in self._all_pods().values()
                if not pod.ended and pod.uid not in mine and not self._holds.is_ours(pod)
            ]
            return SchedulerLook(
                nodes=tuple(nodes), epoch=self._epoch, holds=holds, queue=self._queue.entries(),
                foreign=self._site.foreign_jobs(others, nodes, taken, self._preempts_below),
            )  # fmt: skip

    def hold(self, request: HoldRequest) -> Hold:
        """Ask for free cards, or renew the lease."""
        return self._acquire(request, preempts=False)

    def commit(self, request: HoldRequest) -> Hold:
        """As `hold`; with `preempts` at the priority whose pods preempt."""
        return self._acquire(request, preempts=any(is_foreign(victim) for victim in request.victims))

    def release(self, hold_id: str) -> None:
        """Use up the id, then delete what it has; its pods end by themselves as well."""
        self._holds.release(hold_id)

    def start(self, rank: RankStart) -> None:
        """Order the start from the keeper in the pod that has the rank's cards (see `SchedulerAdapter.start`)."""
        folder = rank.folder.absolute()
        if (folder / "pid").exists():
            return
        record = self._holds.record(rank.hold)
        hold = record.granted()
        if hold is None:
            raise UnavailableError(f"the hold of {folder} is not granted")
        number = next((at for at, cards in enumerate(hold.cards) if rank.cards[0] in cards), None)
        if number is None:
            raise InputError(f"card {rank.cards[0]} is not in the hold of {folder}")
        state, (group, _, _) = record.state(), rank.cards[0].split("/", 2)
        held = state.containers.get(group, ContainerNeed()).image if state is not None else ""
        if rank.image != held:
            ours, theirs = (name or "the site's" for name in (rank.image, held))
            raise UnavailableError(f"the pods of the hold have image {theirs}, and {folder} now needs {ours}")
        keeper = record.rank_folder(number)
        with exclusive_lock(keeper / ".lock"):
            if not (keeper / f"{ORDER}{_order_name(folder)}").exists():
                self._order_start(rank, folder, record, number)

    def _order_start(self, rank: RankStart, folder: Path, record: HoldRecord, number: int) -> None:
        limits = WorkerFolder(folder).read_limits()
        environment = worker_variables(folder, {}, rank, limits)
        write_start(folder, rank.command or (*self._program, str(folder)), environment)
        write_atomically(folder / "hold", f"{rank.hold} {number}")
        order = record.rank_folder(number) / f"{ORDER}{_order_name(folder)}"
        write_atomically(order, self._courier.ticket(folder, record.path), mode=0o600)

    def check(self) -> Sequence[SchedulerCheck]:
        """Return what `isthmus site check` finds."""
        return check_kubernetes(self._site, self._client)

    def _acquire(self, request: HoldRequest, *, preempts: bool) -> Hold:
        for rank in request.ranks:
            self._site.group(rank.node_group)
        for need in request.containers.values():
            self._site.pod_image(need.image)
        if preempts and not self._site.preempting_priority:
            raise InputError("site.yaml names no preempting_priority", hint="set options.preempting_priority")
        with self._lock:
            return self._holds.acquire(request, preempts=preempts)

    def _card_nodes(self) -> list[CardNode]:
        return self._site.card_nodes(self._nodes.refresh().values(), self._devices.counts())

    def _all_pods(self) -> Mapping[str, PodInfo]:
        """Return what uses or wants cards: pods, and the claims of pods that ask for devices."""
        return {**self._pods.refresh(), **self._devices.claimed()}

    def _is_asked_for(self, folder: Path) -> bool:
        return (folder / "hold").exists()

    def _can_no_more_start(self, folder: Path) -> bool:
        return self._has_lost(folder)

    def _has_lost(self, folder: Path) -> bool:
        """Return whether the worker's courier has ended, or its pods in the last look."""
        with contextlib.suppress(OSError, ValueError):
            hold_id, number = (folder / "hold").read_text(encoding="ascii").split()
            record = self._holds.record(hold_id)
            if (record.rank_folder(int(number)) / f"{ENDED}{_order_name(folder)}").exists():
                return True
            return record.is_released and self._holds.has_no_pod(hold_id)
        return False


def _order_name(folder: Path) -> str:
    return hashlib.sha256(str(folder).encode(errors="surrogateescape")).hexdigest()[:32]
