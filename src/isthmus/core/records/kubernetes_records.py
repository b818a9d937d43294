"""Kubernetes' own record of the pods of an agent's holds: a list of the API server, of Events, Pods or both.

`kubectl get events,pods -o json` writes it. A pod has its cards from `Scheduled` on; it gives them back when its
containers have ended, by its status, or with an event `Killing`. API servers forget events after an hour by default,
so an owner that wants a month keeps them (`--event-ttl`, or an exporter).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from isthmus.core.errors import FileError
from isthmus.core.records.card_record import RecordedHold
from isthmus.core.records.held_interval import HeldInterval, RecordedPart

MAX_ITEMS = 1_000_000
_POD = re.compile(r"isthmus-([0-9a-f]{32})-(?:unit-)?(\d{1,6})-[a-z0-9.-]{1,200}")
_HINT = "write it with kubectl get events,pods --namespace NAME -o json"
_ENDS = frozenset({"Killing", "Completed", "Preempted", "Evicted", "TaintManagerEviction"})


@dataclass(slots=True)
class _Pod:
    """What the record says of a pod."""

    begin_ms: int | None = None
    end_ms: int | None = None
    # The status of the pod itself says when its containers ended, which is later than any event.
    is_final: bool = False


def parse_kubernetes_records(body: bytes, file: str, holds: Mapping[str, RecordedHold]) -> list[HeldInterval]:
    """Return what the pods of `holds` held; raise `FileError`, naming line or item, for what cannot be read."""
    pods: dict[str, _Pod] = {}
    for at, item in enumerate(_items(body, file)):
        try:
            _take(pods, item)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise FileError(
                f"{type(error).__name__}: {str(error)[:120]}", file=file, field=f"items.{at}", hint=_HINT
            ) from None
    return [_interval(name, pod, holds) for name, pod in pods.items() if pod.begin_ms is not None]


def _items(body: bytes, file: str) -> list[Any]:
    try:
        found = json.loads(body)
    except json.JSONDecodeError as error:
        raise FileError(error.msg, file=file, line=error.lineno, hint=_HINT) from None
    except (UnicodeDecodeError, RecursionError):
        raise FileError("is no JSON", file=file, hint=_HINT) from None
    items = found.get("items") if isinstance(found, dict) else None
    if not isinstance(items, list) or not str(found.get("kind", "")).endswith("List"):
        raise FileError("is no list of an API server", file=file, line=1, hint=_HINT)
    if len(items) > MAX_ITEMS:
        raise FileError(f"has more than {MAX_ITEMS:,} items", file=file, hint="compare a month at a time")
    return items


def _take(pods: dict[str, _Pod], item: Mapping[str, Any]) -> None:
    """Add what an event or a pod says; other objects are passed over."""
    if "involvedObject" in item or "regarding" in item:
        about = item.get("involvedObject") or item["regarding"]
        name = about.get("name") or ""
        if about.get("kind") != "Pod" or not _POD.fullmatch(name):
            return
        pod, reason = pods.setdefault(name, _Pod()), item.get("reason")
        if reason == "Scheduled":
            pod.begin_ms = min(pod.begin_ms or _event_ms(item), _event_ms(item))
        elif reason in _ENDS and not pod.is_final:
            pod.end_ms = max(pod.end_ms or 0, _event_ms(item))
        return
    name = item["metadata"].get("name") or ""
    if item.get("kind") != "Pod" or not _POD.fullmatch(name):
        return
    pod, status = pods.setdefault(name, _Pod()), item.get("status") or {}
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "True":
            pod.begin_ms = _time_ms(condition["lastTransitionTime"])
    ends = [
        one.get("state", {}).get("terminated", {}).get("finishedAt") for one in status.get("containerStatuses") or ()
    ]
    if status.get("phase") in ("Succeeded", "Failed") and ends and all(ends):
        pod.end_ms, pod.is_final = max(_time_ms(end) for end in ends), True
    elif status.get("phase") not in ("Succeeded", "Failed"):
        pod.end_ms = None


def _event_ms(item: Mapping[str, Any]) -> int:
    """Return when an event was: the exact time if it has one, else the last of a repeated event."""
    return _time_ms(item.get("eventTime") or item.get("lastTimestamp") or item["firstTimestamp"])


def _time_ms(text: str) -> int:
    at = datetime.fromisoformat(text)
    return round((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)


def _interval(name: str, pod: _Pod, holds: Mapping[str, RecordedHold]) -> HeldInterval:
    named = _POD.fullmatch(name)
    hold_id, unit = (named[1], int(named[2])) if named else ("", 0)
    hold = holds.get(hold_id)
    part, chips = RecordedPart(f"hold {hold_id}", 0), 1
    if hold is not None:
        part, chips = hold.part, hold.units[unit][0] if unit < len(hold.units) else 0
    begin_ms = pod.begin_ms or 0
    end_ms = None if pod.end_ms is None else max(begin_ms, pod.end_ms)
    return HeldInterval(part=part, chips=chips, begin_ms=begin_ms, end_ms=end_ms, source=f"pod {name}")
