"""Cards that a DRA driver publishes in ResourceSlices, and those that ResourceClaims have taken.

A node's cards are the devices of its slices; of a pool only the slices of the newest generation count. A claim that is
allocated uses cards as a pod does. Claims that Kubernetes makes for a pod's extended resource are left out: the pod
itself counts. https://kubernetes.io/docs/concepts/scheduling-eviction/dynamic-resource-allocation/
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from isthmus.agent.adapters.kubernetes.kubernetes_client import KubernetesClient
from isthmus.agent.adapters.kubernetes.kubernetes_objects import PodInfo
from isthmus.agent.adapters.kubernetes.watched_list import WatchedList
from isthmus.core.errors import FieldError, NotFoundError, UnavailableError

GROUP = "resource.k8s.io"
SLICES, CLAIMS = "resourceslices", "resourceclaims"
_VERSIONS = ("v1", "v1beta2", "v1beta1")
_NEVER_PREEMPTED = 2**31 - 1
"""Priority of what uses a claim, which does not tell it."""

_EXTENDED = "resource.kubernetes.io/extended-resource-claim"


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceInfo:
    """Devices of one driver in one pool; `node` is empty for devices that no single node has."""

    driver: str
    pool: str
    generation: int
    node: str
    devices: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimInfo:
    """A claim with its devices: driver, pool and name of each."""

    uid: str
    namespace: str
    name: str
    owner: str
    devices: tuple[tuple[str, str, str], ...]


class DeviceInventory:
    """The devices of `driver`; `resources` are what the site's pods ask for."""

    def __init__(self, client: KubernetesClient, driver: str, resources: Collection[str]) -> None:
        self._client, self._driver, self._resources = client, driver, tuple(resources)
        self._lists: tuple[WatchedList[SliceInfo], WatchedList[ClaimInfo]] | None = None

    def counts(self) -> dict[str, int]:
        """Return the number of cards by node; empty without a driver."""
        return device_counts(self._watched()[0].refresh().values(), self._driver) if self._driver else {}

    def claimed(self) -> dict[str, PodInfo]:
        """Return what uses cards by claims, as the pods that it stands for."""
        if not self._driver:
            return {}
        slices, claims = self._watched()
        nodes = {(one.driver, one.pool): one.node for one in slices.refresh().values()}
        found = {}
        for claim in claims.refresh().values():
            for node in {nodes.get(device[:2], "") for device in claim.devices if device[0] == self._driver} - {""}:
                count = sum(nodes.get(device[:2]) == node and device[0] == self._driver for device in claim.devices)
                found[f"{claim.uid}/{node}"] = PodInfo(
                    uid=claim.uid, namespace=claim.namespace, name=claim.name, node=node, phase="Running",
                    deleting=False, priority=_NEVER_PREEMPTED, owner=claim.owner,
                    counts=tuple((one, count) for one in self._resources),
                )  # fmt: skip
        return found

    def _watched(self) -> tuple[WatchedList[SliceInfo], WatchedList[ClaimInfo]]:
        if self._lists is None:
            path = device_path(self._client)
            self._lists = (
                WatchedList(self._client, f"{path}/{SLICES}", "ResourceSliceList", parse_slice),
                WatchedList(self._client, f"{path}/{CLAIMS}", "ResourceClaimList", parse_claim),
            )
        return self._lists


def device_path(client: KubernetesClient) -> str:
    """Return the newest version of the API of devices that the server has; raise `FieldError` if it has none."""
    for version in _VERSIONS:
        try:
            client.get(f"/apis/{GROUP}/{version}")
        except NotFoundError:
            continue
        return f"/apis/{GROUP}/{version}"
    message = f"the API server serves no {GROUP}"
    raise FieldError(message, place=("options", "device_driver"), hint="ResourceSlices need Kubernetes 1.32 or later")


def device_counts(slices: Iterable[SliceInfo], driver: str) -> dict[str, int]:
    """Return the number of devices of `driver` by node, of the newest generation of each pool."""
    of_pool: dict[str, list[SliceInfo]] = {}
    for one in slices:
        if one.driver == driver:
            of_pool.setdefault(one.pool, []).append(one)
    devices: dict[str, set[tuple[str, str]]] = {}
    for pool, found in of_pool.items():
        newest = max(one.generation for one in found)
        for one in found:
            if one.generation == newest and one.node:
                devices.setdefault(one.node, set()).update((pool, name) for name in one.devices)
    return {node: len(names) for node, names in devices.items()}


def parse_slice(item: Mapping[str, Any]) -> SliceInfo:
    """Return a slice; raise `UnavailableError` for what cannot be read."""
    try:
        spec = item["spec"]
        return SliceInfo(
            driver=str(spec["driver"]), pool=str(spec["pool"]["name"]), generation=int(spec["pool"]["generation"]),
            node=str(spec.get("nodeName") or ""), devices=tuple(str(one["name"]) for one in spec.get("devices") or ()),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnavailableError("a ResourceSlice of the API server cannot be read") from error


def parse_claim(item: Mapping[str, Any]) -> ClaimInfo | None:
    """Return a claim that has devices, None for one that waits or that counts with its pod."""
    try:
        metadata, status = item["metadata"], item.get("status") or {}
        if (metadata.get("annotations") or {}).get(_EXTENDED) == "true" or not status.get("allocation"):
            return None
        given = (status["allocation"].get("devices") or {}).get("results") or ()
        owner = next((one for one in metadata.get("ownerReferences") or () if one.get("controller")), metadata)
        return ClaimInfo(
            uid=str(metadata["uid"]), namespace=str(metadata["namespace"]), name=str(metadata["name"]),
            owner=str(owner["uid"]),
            devices=tuple((str(one["driver"]), str(one["pool"]), str(one["device"])) for one in given),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnavailableError("a ResourceClaim of the API server cannot be read") from error
