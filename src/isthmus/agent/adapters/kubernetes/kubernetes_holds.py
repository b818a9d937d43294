"""`KubernetesHolds`: the holds of a site, as objects of the API server and as records on disk.

A hold is asked for in tries, numbered claims. The objects of one are created one after the other, each under a name
that nothing else has, so a request whose reply was lost is repeated until it meets its own object (409). Where the
cluster starts pods one by one, a try that does not get all its cards soon is withdrawn.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from isthmus.agent.adapters.kubernetes import pod_keeper
from isthmus.agent.adapters.kubernetes.hold_record import HoldRecord, HoldState, known_holds, uncleared_holds
from isthmus.agent.adapters.kubernetes.kubernetes_client import KubernetesClient
from isthmus.agent.adapters.kubernetes.kubernetes_objects import (
    CLAIM_LABEL,
    HOLD_LABEL,
    SITE_LABEL,
    PodInfo,
    parse_pod,
)
from isthmus.agent.adapters.kubernetes.kubernetes_site import KubernetesSite
from isthmus.agent.adapters.kubernetes.manifests import (
    HoldUnit,
    hold_units,
    owned_by,
    secret_name,
    ticket_secret,
    workload_names,
    workload_path,
    workloads,
)
from isthmus.agent.adapters.kubernetes.watched_list import list_objects
from isthmus.agent.adapters.scheduler_adapter import CardNode, Hold, HoldRequest
from isthmus.agent.courier.start_file import write_start
from isthmus.core.errors import ConflictError, InputError, IsthmusError, NotFoundError, UnavailableError
from isthmus.core.process.exclusive_lock import exclusive_lock

_LOOK_S = 0.1
_MAX_UNBOUND_S = 60.0
"""How long a preempting try may keep some of its cards while it waits for the others."""


class TicketOffice(Protocol):
    """The part of the courier that hands out tickets."""

    def ticket(self, folder: Path, hold: Path | None = None) -> bytes:
        """Return the ticket for the worker of `folder`, which ends with `hold`."""

    def revoke(self, folder: Path) -> None:
        """Make the ticket of `folder` useless."""


class KubernetesHolds:
    """The holds below `root`. `card_nodes` and `all_pods` return what is known of the cluster now."""

    def __init__(
        self,
        site: KubernetesSite,
        client: KubernetesClient,
        courier: TicketOffice,
        root: Path,
        card_nodes: Callable[[], list[CardNode]],
        all_pods: Callable[[], Mapping[str, PodInfo]],
    ) -> None:
        self._site, self._client, self._courier, self._root = site, client, courier, root
        self._card_nodes, self._all_pods = card_nodes, all_pods
        self.namespace = site.namespace or client.access.namespace
        self._secrets = f"/api/v1/namespaces/{self.namespace}/secrets"
        self._live: dict[str, list[PodInfo]] | None = None
        self._unbound_since_s: dict[str, float] = {}

    def record(self, hold_id: str) -> HoldRecord:
        """Return what is known of a hold on disk."""
        return HoldRecord(self._root, hold_id)

    def observe(self) -> tuple[list[PodInfo], tuple[Hold, ...]]:
        """List the pods of this site's holds once; return them and the holds that live."""
        own = self._own_pods(f"{SITE_LABEL}={self._site.cluster.name}")
        before, self._live = self._live or {}, {}
        for pod in own:
            self._live.setdefault(pod.hold, []).append(pod)
        for hold_id in before.keys() - self._live.keys():
            self._revoke_if_released(self.record(hold_id))
        holds = [self._judge(record) for record in known_holds(self._root)]
        self._clear_leftovers()
        return own, tuple(hold for hold in holds if hold is not None and hold.state != "ended")

    def has_no_pod(self, hold_id: str) -> bool:
        """Return whether the last look showed no pod of a hold."""
        return self._live is not None and not self._live.get(hold_id)

    def is_ours(self, pod: PodInfo) -> bool:
        """Return whether a pod belongs to a hold of this agent."""
        return pod.namespace == self.namespace and bool(pod.hold) and (self._root / pod.hold).is_dir()

    def acquire(self, request: HoldRequest, *, preempts: bool) -> Hold:
        """Renew the lease, and ask for what is not there yet; return the hold as it is then."""
        record = self.record(request.id)
        with record.locked():
            if record.is_released:
                if not record.is_cleared:
                    self.release(request.id)
                return Hold(id=request.id, state="ended")
            record.renew(request)
            found = self._ask_and_look(record, preempts=preempts)
            if record.is_released:  # released while it was asked for
                record.note_cleared(False)
                self.release(request.id)
                return found if found.state == "ended" else Hold(id=request.id, state="ended")
            return found

    def release(self, hold_id: str) -> None:
        """Use up the id, then delete what it has."""
        record = self.record(hold_id)
        record.release()
        state = record.state()
        if state is not None and state.open:
            self._delete(record, state)
        record.note_cleared()

    def _ask_and_look(self, record: HoldRecord, *, preempts: bool) -> Hold:
        state = record.state()
        if state is None:
            raise UnavailableError(f"{record.path} is gone")
        if state.open and preempts and not state.preempts and not state.cards:
            self._withdraw(record)
            state = record.state() or state
        if not state.open:
            waits_here = not self._site.gang and not preempts
            if waits_here and not self._fits(state.ranks):
                return Hold(id=record.id, state="waiting", detail="no free cards")
            state = state.model_copy(update={"open": True, "claim": state.claim + 1, "preempts": preempts})
            workloads(self._site, record.plan(state))
            record.save(state)
        if not state.asked:
            blocker = self._ask(record, state)
            if blocker:
                return Hold(id=record.id, state="waiting", detail=blocker)
        found = self._look_for(record)
        if found.state != "waiting" or self._site.gang:
            return found
        pause = threading.Event()
        limit_s = _MAX_UNBOUND_S if state.preempts else self._site.bind_s
        begin_s = self._unbound_since_s.setdefault(record.id, time.monotonic())
        while found.state == "waiting" and not record.is_released and time.monotonic() - begin_s < limit_s:
            if state.preempts:
                return found
            pause.wait(_LOOK_S)
            found = self._look_for(record)
        if found.state == "waiting":
            self._withdraw(record)
        del self._unbound_since_s[record.id]
        return found

    def _ask(self, record: HoldRecord, state: HoldState) -> str:
        """Create the objects of the present try as far as they are not there; return what stands in the way, if any."""
        plan, path = record.plan(state), workload_path(self._site, self.namespace)
        for at, unit in enumerate(plan.units):
            tickets = [self._ticket(record, number) for number in unit.ranks]
            with contextlib.suppress(ConflictError):  # the reply to an earlier request was lost
                self._client.create(self._secrets, ticket_secret(self._site, plan, at, tickets))
        created = [self._create_workload(path, body) for body in workloads(self._site, plan)]
        if not all(created):
            return "the try before it is still being deleted"
        for at in range(len(plan.units)):
            owner = created[min(at, len(created) - 1)] or {}
            self._client.patch(f"{self._secrets}/{secret_name(plan, at)}", owned_by(owner))
        record.save(state.model_copy(update={"asked": True}))
        return ""

    def _ticket(self, record: HoldRecord, number: int) -> bytes:
        """Return the ticket of the keeper in the pod of a rank."""
        folder = record.rank_folder(number)
        if not (folder / "start.json").exists():
            write_start(folder, ("{python}", "-m", pod_keeper.__name__, str(folder)), {}, ends_with_hold=False)
        return self._courier.ticket(folder, record.path)

    def _create_workload(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """Return a workload of this try, created now or before; None while its name belongs to an earlier try."""
        wanted = body["metadata"]
        try:
            return self._client.create(path, body)
        except ConflictError:
            try:
                found = self._client.get(f"{path}/{wanted['name']}")
            except NotFoundError:
                return None
        metadata = found.get("metadata") or {}
        labels = metadata.get("labels") or {}
        if labels.get(HOLD_LABEL) != wanted["labels"][HOLD_LABEL]:
            raise InputError(f"'{wanted['name']}' in namespace {self.namespace} is not this agent's")
        ours = labels.get(CLAIM_LABEL) == wanted["labels"][CLAIM_LABEL] and "deletionTimestamp" not in metadata
        return found if ours else None

    def _withdraw(self, record: HoldRecord) -> None:
        """Delete the objects of the present try; the id stays."""
        state = record.state()
        if state is not None:
            self._delete(record, state)
            record.save(state.model_copy(update={"open": False, "asked": False}))

    def _delete(self, record: HoldRecord, state: HoldState) -> None:
        """Delete the workloads of a hold, which end their pods, and the tickets that no workload owned yet."""
        path, plan = workload_path(self._site, self.namespace), record.plan(state)
        for name in workload_names(self._site, record.id, len(plan.units)):
            self._client.delete(f"{path}/{name}")
        for at in range(len(plan.units)):
            self._client.delete(f"{self._secrets}/{secret_name(plan, at)}")

    def _look_for(self, record: HoldRecord) -> Hold:
        """List the pods of one hold and judge it."""
        pods = self._own_pods(f"{HOLD_LABEL}={record.id}")
        self._live = {**(self._live or {}), record.id: pods}
        return self._judge(record) or Hold(id=record.id, state="ended")

    def _judge(self, record: HoldRecord) -> Hold | None:
        """Return a hold by the newest list of its pods, None if nothing was asked for; release one that lost a pod."""
        state = record.state()
        if state is None or not state.open:
            return None
        pods = [pod for pod in (self._live or {}).get(record.id, ()) if pod.claim == str(state.claim)]
        trouble = next((pod.trouble for pod in pods if pod.trouble), "")
        if state.cards:
            if not trouble and set(state.pods) <= {pod.uid for pod in pods if pod.holds}:
                return Hold(id=record.id, state="granted", cards=state.cards)
            record.release()
            return Hold(id=record.id, state="ended", detail=trouble or "a pod of the hold has ended")
        if trouble:
            record.release()
            return Hold(id=record.id, state="ended", detail=f"a container cannot start: {trouble}")
        places = _places(hold_units(state.ranks), pods)
        if places is None:
            return Hold(id=record.id, state="waiting", detail="waits for its pods to be bound")
        return self._grant(record, state, places)

    def _grant(self, record: HoldRecord, state: HoldState, places: Sequence[PodInfo]) -> Hold:
        """Name the cards of each rank: numbers on its pod's node that no other hold has; Kubernetes names none."""
        nodes = {node.name: node for node in self._card_nodes()}
        with exclusive_lock(self._root / ".lock"):
            others = [one.granted() for one in known_holds(self._root) if one.id != record.id]
            taken = {card for hold in others if hold is not None for cards in hold.cards for card in cards}
            given = list[tuple[str, ...]]()
            for pod, (group, num_cards) in zip(places, state.ranks, strict=True):
                node = nodes.get(pod.node)
                free = [card for card in (node.cards if node is not None else ()) if card not in taken]
                if node is None or node.node_group != group or len(free) < num_cards:
                    raise UnavailableError(f"pod {pod.name} is on {pod.node}, which shows no {num_cards} free cards")
                given.append(tuple(free[:num_cards]))
                taken |= set(free[:num_cards])
            pods = tuple(pod.uid for pod in places)
            record.save(state.model_copy(update={"asked": True, "pods": pods, "cards": tuple(given)}))
        return Hold(id=record.id, state="granted", cards=tuple(given))

    def _fits(self, ranks: Iterable[tuple[str, int]]) -> bool:
        """Return whether the ranks fit on the cards that no pod has, by the newest events."""
        free = {node.name: (node.node_group, len(node.cards)) for node in self._card_nodes() if node.usable}
        for pod in self._all_pods().values():
            if pod.node in free and not pod.ended:
                group, left = free[pod.node]
                free[pod.node] = group, left - pod.count(self._site.resource(group))
        for wanted, num_cards in ranks:
            name = next((name for name, (group, left) in free.items() if group == wanted and left >= num_cards), None)
            if name is None:
                return False
            free[name] = wanted, free[name][1] - num_cards
        return True

    def _clear_leftovers(self) -> None:
        """Delete what is left of holds that have ended; a failed attempt is repeated at the next look."""
        live = {hold_id for hold_id, pods in (self._live or {}).items() if any(not pod.deleting for pod in pods)}
        seen = {hold_id for hold_id in live if HoldRecord(self._root, hold_id).is_released}
        with contextlib.suppress(IsthmusError):
            for hold_id in sorted(seen | {record.id for record in uncleared_holds(self._root)}):
                self.release(hold_id)

    def _revoke_if_released(self, record: HoldRecord) -> None:
        """Make the tickets of a hold useless once its pods are gone; until then they hand over their last files."""
        state = record.state()
        for number in range(len(state.ranks) if state is not None and record.is_released else 0):
            self._courier.revoke(record.rank_folder(number))

    def _own_pods(self, selector: str) -> list[PodInfo]:
        path = f"/api/v1/namespaces/{self.namespace}/pods"
        items, _ = list_objects(self._client, path, "PodList", labelSelector=selector)
        found = [parse_pod(item, self._site.resources) for item in items]
        return [pod for pod in found if pod is not None and not pod.ended and self.is_ours(pod)]


def _places(units: Iterable[HoldUnit], pods: Iterable[PodInfo]) -> list[PodInfo] | None:
    """Return the pod of each rank, None unless every one is bound."""
    bound = {(pod.unit, pod.index): pod for pod in pods if pod.holds}
    found: dict[int, PodInfo] = {}
    for at, unit in enumerate(units):
        for index, number in enumerate(unit.ranks):
            if (at, index) not in bound:
                return None
            found[number] = bound[at, index]
    return [found[number] for number in sorted(found)]
