"""Nodes and pods as an API server describes them; what cannot be read is an error that names the object."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from isthmus.core.errors import UnavailableError

HOLD_LABEL, CLAIM_LABEL, UNIT_LABEL, SITE_LABEL = (
    "isthmus.io/hold", "isthmus.io/claim", "isthmus.io/unit", "isthmus.io/site"
)  # fmt: skip
"""Labels of everything that a hold has: its id, the number of the try, the pods' unit, and the site's name."""

_INDEX_PLACES = ("batch.kubernetes.io/job-completion-index", "volcano.sh/task-index")
"""Annotations or labels with a pod's number, of Jobs (and so of JobSets) and of Volcano's jobs."""

_HOPELESS = frozenset({"InvalidImageName", "ErrImageNeverPull", "ImagePullBackOff", "CreateContainerError"})
_HOLD_ID = re.compile(r"[0-9a-f]{32}")
_QUANTITY = re.compile(r"([0-9]{1,18})(\.[0-9]+)?(m|k|M|G|Ki|Mi|Gi|e[0-9]{1,2}|)")
_SCALES = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
_KEPT_OUT = ("NoSchedule", "NoExecute")


@dataclass(frozen=True, kw_only=True, slots=True)
class PodInfo:
    """A pod that uses or wants cards; `node` is empty until it is bound."""

    uid: str
    namespace: str
    name: str
    node: str
    phase: str
    deleting: bool
    priority: int
    # The id of what made it, such as a Job, else its own: the pods of one owner are one job.
    owner: str
    counts: tuple[tuple[str, int], ...]
    hold: str = ""
    claim: str = ""
    unit: int = -1
    index: int = -1
    # Why its container cannot start, if it never will.
    trouble: str = ""

    @property
    def ended(self) -> bool:
        """Whether it has ended and uses no cards."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def holds(self) -> bool:
        """Whether it is bound to a node and stays there."""
        return bool(self.node) and not self.ended and not self.deleting

    def count(self, resource: str) -> int:
        """Return how many of `resource` it asks for."""
        return dict(self.counts).get(resource, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeInfo:
    """A node with its labels, what it can give out, and whether it takes new pods."""

    name: str
    labels: Mapping[str, str]
    counts: tuple[tuple[str, int], ...]
    ready: bool
    # Keys of the taints that keep pods out.
    taints: tuple[str, ...]

    def count(self, resource: str) -> int:
        """Return how many of `resource` it offers."""
        return dict(self.counts).get(resource, 0)


def parse_pod(item: Mapping[str, Any], resources: Collection[str]) -> PodInfo | None:
    """Return a pod, None if it neither asks for one of `resources` nor belongs to a hold."""
    try:
        metadata, spec, status = item["metadata"], item["spec"], item.get("status") or {}
        labels = metadata.get("labels") or {}
        counts = _pod_counts(spec, resources)
        hold = str(labels.get(HOLD_LABEL, ""))
        hold = hold if _HOLD_ID.fullmatch(hold) else ""
        if not counts and not hold:
            return None
        owner = next((one for one in metadata.get("ownerReferences") or () if one.get("controller")), metadata)
        return PodInfo(
            uid=str(metadata["uid"]), namespace=str(metadata["namespace"]), name=str(metadata["name"]),
            node=str(spec.get("nodeName") or ""), phase=str(status.get("phase", "Pending")),
            deleting="deletionTimestamp" in metadata, priority=int(spec.get("priority") or 0), owner=str(owner["uid"]),
            counts=tuple(sorted(counts.items())), hold=hold, claim=str(labels.get(CLAIM_LABEL, "")),
            unit=_number(labels.get(UNIT_LABEL)), index=_index_of(metadata), trouble=_trouble_of(status),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _unreadable("pod", item) from error


def parse_node(item: Mapping[str, Any], resources: Collection[str]) -> NodeInfo:
    """Return a node with its counts of `resources`."""
    try:
        metadata, spec, status = item["metadata"], item.get("spec") or {}, item.get("status") or {}
        given = status.get("allocatable") or {}
        ready = any(one["type"] == "Ready" and one["status"] == "True" for one in status.get("conditions") or ())
        return NodeInfo(
            name=str(metadata["name"]),
            labels={str(key): str(value) for key, value in (metadata.get("labels") or {}).items()},
            counts=tuple(sorted((name, parse_count(given[name])) for name in resources if name in given)),
            ready=ready and not spec.get("unschedulable"),
            taints=tuple(str(one["key"]) for one in spec.get("taints") or () if one.get("effect") in _KEPT_OUT),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _unreadable("node", item) from error


def parse_count(quantity: object) -> int:
    """Return a quantity such as `8` or `1k` as a whole number, rounded down; raise `ValueError` for other text."""
    found = _QUANTITY.fullmatch(str(quantity))
    if found is None:
        raise ValueError(f"not a quantity: {str(quantity)[:40]!r}")
    scale = 10.0 ** int(found[3][1:]) if found[3].startswith("e") else _SCALES[found[3]]
    return int(float(found[1] + (found[2] or "")) * scale)


def _pod_counts(spec: Mapping[str, Any], resources: Collection[str]) -> dict[str, int]:
    """Return what a pod requests: the sum over its containers, or an init container's if that is larger."""
    found: dict[str, int] = {}
    for resource in resources:
        asked = [
            [_asked(one, resource) for one in spec.get(kind) or ()] for kind in ("containers", "initContainers")
        ]  # fmt: skip
        count = max(sum(asked[0]), max(asked[1], default=0))
        if count:
            found[resource] = count
    return found


def _asked(container: Mapping[str, Any], resource: str) -> int:
    wanted = container.get("resources") or {}
    for kind in ("limits", "requests"):
        if resource in (wanted.get(kind) or {}):
            return parse_count(wanted[kind][resource])
    return 0


def _index_of(metadata: Mapping[str, Any]) -> int:
    for place in ("annotations", "labels"):
        for name in _INDEX_PLACES:
            found = _number((metadata.get(place) or {}).get(name))
            if found >= 0:
                return found
    return -1


def _number(text: object) -> int:
    return int(text) if isinstance(text, str) and text.isdecimal() and text.isascii() and len(text) < 10 else -1


def _trouble_of(status: Mapping[str, Any]) -> str:
    for one in status.get("containerStatuses") or ():
        reason = str(((one.get("state") or {}).get("waiting") or {}).get("reason", ""))
        if reason in _HOPELESS:
            return reason
    return ""


def _unreadable(kind: str, item: object) -> UnavailableError:
    name = item.get("metadata", {}) if isinstance(item, dict) else {}
    shown = name.get("name", "") if isinstance(name, dict) else ""
    return UnavailableError(f"a {kind} of the API server cannot be read: {str(shown)[:80]!r}")
