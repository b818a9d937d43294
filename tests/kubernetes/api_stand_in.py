"""`ApiStandIn`: a small API server in memory, for unit tests; `check_api_server` passes on it and on the real one.

It keeps objects with versions, lists them by label and page, streams watches, and can be told to fail: `kill` and
`restart`, `compact` (410 for what is older), `lose_replies` (a request is done and its answer lost).
"""

from __future__ import annotations

import base64
import copy
import itertools
import json
import queue
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

KINDS = {
    ("", "v1", "pods"): ("Pod", True), ("", "v1", "nodes"): ("Node", False), ("", "v1", "secrets"): ("Secret", True),
    ("", "v1", "namespaces"): ("Namespace", False), ("batch", "v1", "jobs"): ("Job", True),
    ("jobset.x-k8s.io", "v1alpha2", "jobsets"): ("JobSet", True),
    ("batch.volcano.sh", "v1alpha1", "jobs"): ("Job", True),
    ("scheduling.volcano.sh", "v1beta1", "queues"): ("Queue", False),
    ("kueue.x-k8s.io", "v1beta1", "localqueues"): ("LocalQueue", True),
    ("kueue.x-k8s.io", "v1beta1", "workloadpriorityclasses"): ("WorkloadPriorityClass", False),
    ("scheduling.k8s.io", "v1", "priorityclasses"): ("PriorityClass", False),
    ("resource.k8s.io", "v1", "resourceslices"): ("ResourceSlice", False),
    ("resource.k8s.io", "v1", "resourceclaims"): ("ResourceClaim", True),
    ("authorization.k8s.io", "v1", "selfsubjectaccessreviews"): ("SelfSubjectAccessReview", False),
}  # fmt: skip
_PATH = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/(?P<version>v[^/]+)(?:/namespaces/(?P<space>[^/]+)(?=/))?/(?P<rest>.+)"
)


@dataclass(frozen=True)
class Place:
    """What a path names: a collection, or with `name` an object of it, or with `sub` a part of that."""

    group: str
    version: str
    plural: str
    space: str
    name: str
    sub: str

    @property
    def key(self) -> tuple[str, str]:
        """Group and plural of the collection."""
        return self.group, self.plural


class StatusError(Exception):
    """An answer that is a `Status`."""

    def __init__(self, code: int, reason: str, message: str = "") -> None:
        super().__init__(reason)
        self.code, self.reason, self.message = code, reason, message or reason


class ApiStandIn:
    """The server; `transport()` is what a client uses. `used` are the verbs that were asked for.

    Groups that are `hidden` are not served.
    """

    def __init__(self) -> None:
        self.objects: dict[tuple[tuple[str, str], str, str], dict[str, Any]] = {}
        self.used: set[tuple[str, str, str, bool]] = set()
        self.denied: set[tuple[str, str, str]] = set()
        self.version, self.hidden = ("1", "30"), set[str]()
        self._events: list[tuple[int, tuple[str, str], str, dict[str, Any]]] = []
        self._now, self._compacted, self._num_lost = 100, 0, 0
        self._up, self._lock = True, threading.RLock()
        self._watches: dict[int, queue.Queue[bytes | None]] = {}
        self._ids = itertools.count()
        self._wanted: dict[int, tuple[tuple[str, str], str]] = {}
        self.answer: Callable[[str, str], bytes | None] = lambda _method, _path: None

    def transport(self) -> httpx.BaseTransport:
        """Return the transport of a client."""
        return _Transport(self)

    def put(self, group: str, plural: str, body: dict[str, Any], space: str = "") -> dict[str, Any]:
        """Create an object directly."""
        version = next(version for known, version, name in KINDS if (known, name) == (group, plural))
        return self._create(Place(group, version, plural, space, "", ""), copy.deepcopy(body))

    def kill(self) -> None:
        """Stop answering; watches break."""
        with self._lock:
            self._up = False
            for stream in self._watches.values():
                stream.put(None)
            self._watches.clear()

    def restart(self) -> None:
        """Answer again, from what was kept."""
        with self._lock:
            self._up = True

    def compact(self) -> None:
        """Forget the events so far: a watch from an earlier version gets 410."""
        with self._lock:
            self._compacted = self._now
            self._events.clear()

    def lose_replies(self, count: int) -> None:
        """Do the next requests that change something, and lose their answers."""
        self._num_lost = count

    def handle(self, request: httpx.Request) -> httpx.Response:
        """Answer a request."""
        with self._lock:
            if not self._up:
                raise httpx.ConnectError("connection refused", request=request)
            path, query = request.url.path, dict(request.url.params)
            forged = self.answer(request.method, path)
            if forged is not None:
                return httpx.Response(200, content=forged)
            try:
                if path == "/version":
                    return _json(200, {"major": self.version[0], "minor": f"{self.version[1]}+"})
                place = self._place(path)
                body = json.loads(request.content) if request.content else {}
                if "watch" in query:
                    return self._watch(place, query)
                answer = self._answer(request.method, place, query, body)
            except StatusError as error:
                status = {"kind": "Status", "code": error.code, "reason": error.reason, "message": error.message}
                return _json(error.code, status)
            if request.method != "GET" and self._num_lost:
                self._num_lost -= 1
                raise httpx.ReadError("connection reset", request=request)
            return _json(201 if request.method == "POST" else 200, answer)

    def _answer(self, method: str, place: Place, query: dict[str, str], body: dict[str, Any]) -> dict[str, Any]:
        verbs = {"GET": "get" if place.name else "list", "POST": "create", "PATCH": "patch", "PUT": "update"}
        self._use(place, verbs.get(method, "delete"))
        if method == "GET":
            return self._find(place) if place.name else self._list(place, query)
        if method == "POST":
            return self._bind(place, body) if place.sub == "binding" else self._create(place, body)
        if method == "DELETE":
            return self._delete(place, body)
        found = self._find(place)
        if method == "PUT" and body.get("metadata", {}).get("resourceVersion") not in (
            None, found["metadata"]["resourceVersion"]
        ):  # fmt: skip
            raise StatusError(409, "Conflict")
        changed = _merge(copy.deepcopy(found), body) if method == "PATCH" else {**found, **body}
        changed["metadata"] = {**found["metadata"], **changed["metadata"]}
        return self._save(place, changed, "MODIFIED")

    def _place(self, path: str) -> Place:
        served = [(group, version) for group, version, _ in KINDS if group not in self.hidden]
        known = [f"/apis/{group}/{version}" if group else "/api/v1" for group, version in served]
        found = _PATH.fullmatch(path)
        if found is None:
            raise StatusError(200 if path in known else 404, "NotFound")
        plural, _, rest = found["rest"].partition("/")
        name, _, sub = rest.partition("/")
        place = Place(found["group"] or "", found["version"], plural, found["space"] or "", name, sub)
        if (place.group, place.version, place.plural) not in KINDS:
            raise StatusError(404, "NotFound", "the server could not find the requested resource")
        return place

    def _use(self, place: Place, verb: str) -> None:
        in_cluster = not place.space and place.plural not in ("namespaces",)
        self.used.add((place.group, f"{place.plural}/{place.sub}" if place.sub else place.plural, verb, in_cluster))
        if (place.group, place.plural, verb) in self.denied:
            raise StatusError(403, "Forbidden", f"cannot {verb} resource {place.plural}")

    def _find(self, place: Place) -> dict[str, Any]:
        found = self.objects.get((place.key, place.space, place.name))
        if found is None:
            raise StatusError(404, "NotFound", f'{place.plural} "{place.name}" not found')
        return found

    def _list(self, place: Place, query: dict[str, str]) -> dict[str, Any]:
        kind = KINDS[place.group, place.version, place.plural][0]
        wanted = _selector(query.get("labelSelector", ""))
        items = [
            one
            for (key, space, _), one in sorted(self.objects.items())
            if key == place.key and place.space in ("", space) and _has_labels(one, wanted)
        ]
        version = self._now
        limit, begin = int(query.get("limit", 0)), 0
        if "continue" in query:
            version, begin = (int(one) for one in base64.b64decode(query["continue"]).split())
            if version < self._compacted:
                raise StatusError(410, "Expired")
        page = copy.deepcopy(items[begin : begin + limit] if limit else items)
        for item in page:  # as the real one, whose items have neither
            del item["kind"], item["apiVersion"]
        metadata: dict[str, Any] = {"resourceVersion": str(version)}
        if limit and begin + limit < len(items):
            metadata["continue"] = base64.b64encode(f"{version} {begin + limit}".encode()).decode()
        version_name = f"{place.group}/{place.version}".removeprefix("/")
        return {"kind": f"{kind}List", "apiVersion": version_name, "metadata": metadata, "items": page}

    def _create(self, place: Place, body: dict[str, Any]) -> dict[str, Any]:
        if place.plural == "selfsubjectaccessreviews":
            asked = body["spec"]["resourceAttributes"]
            named = asked["resource"] != "namespaces" or "name" in asked  # as the role of deploy/kubernetes
            allowed = named and (asked["group"], asked["resource"], asked["verb"]) not in self.denied
            return {**body, "status": {"allowed": allowed}}
        name = body["metadata"]["name"]
        if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", name):
            raise StatusError(422, "Invalid", f'"{name}" is no name')
        with self._lock:
            if (place.key, place.space, name) in self.objects:
                raise StatusError(409, "AlreadyExists", f'{place.plural} "{name}" already exists')
            body["metadata"] |= {"uid": str(uuid.uuid4()), **({"namespace": place.space} if place.space else {})}
            body.setdefault("kind", KINDS[place.group, place.version, place.plural][0])
            if place.plural == "pods":
                body.setdefault("status", {"phase": "Pending"})
                body["spec"].setdefault("priority", self._priority(body["spec"].get("priorityClassName", "")))
            body.setdefault("apiVersion", f"{place.group}/{place.version}".removeprefix("/"))
            return self._save(place, body, "ADDED")

    def _priority(self, name: str) -> int:
        found = self.objects.get((("scheduling.k8s.io", "priorityclasses"), "", name))
        if name and found is None:
            raise StatusError(403, "Forbidden", f'no PriorityClass with name "{name}" was found')
        return int(found["value"]) if found else 0

    def _delete(self, place: Place, options: dict[str, Any]) -> dict[str, Any]:
        found = self._find(place)
        grace_s = options.get("gracePeriodSeconds", found.get("spec", {}).get("terminationGracePeriodSeconds", 30))
        if place.plural == "pods" and grace_s and found["spec"].get("nodeName"):
            marked = {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": grace_s}
            if "deletionTimestamp" in found["metadata"]:
                return found
            return self._save(place, {**found, "metadata": {**found["metadata"], **marked}}, "MODIFIED")
        del self.objects[place.key, place.space, place.name]
        self._now += 1
        found["metadata"]["resourceVersion"] = str(self._now)
        self._tell(place, "DELETED", found)
        return {"kind": "Status", "status": "Success"}

    def _bind(self, place: Place, body: dict[str, Any]) -> dict[str, Any]:
        pod = self._find(Place(place.group, place.version, place.plural, place.space, place.name, ""))
        if pod["spec"].get("nodeName"):
            raise StatusError(409, "Conflict", "pod is already assigned to a node")
        self._save(place, {**pod, "spec": {**pod["spec"], "nodeName": body["target"]["name"]}}, "MODIFIED")
        return {"kind": "Status", "status": "Success"}

    def _save(self, place: Place, body: dict[str, Any], event: str) -> dict[str, Any]:
        self._now += 1
        body["metadata"]["resourceVersion"] = str(self._now)
        body = copy.deepcopy(body)
        self.objects[place.key, place.space, body["metadata"]["name"]] = body
        self._tell(place, event, body)
        return copy.deepcopy(body)

    def _tell(self, place: Place, event: str, body: dict[str, Any]) -> None:
        self._events.append((self._now, place.key, event, copy.deepcopy(body)))
        for number, (key, space) in self._wanted.items():
            if key == place.key and space in ("", place.space) and number in self._watches:
                self._watches[number].put(_line(event, body))

    def _watch(self, place: Place, query: dict[str, str]) -> httpx.Response:
        self._use(place, "watch")
        since = int(query["resourceVersion"])
        if since < self._compacted:
            return httpx.Response(200, content=_line("ERROR", {"kind": "Status", "code": 410, "reason": "Expired"}))
        number, stream = next(self._ids), queue.Queue[bytes | None]()
        for version, key, event, body in self._events:
            if version > since and key == place.key and place.space in ("", body["metadata"].get("namespace", "")):
                stream.put(_line(event, body))
        self._watches[number], self._wanted[number] = stream, (place.key, place.space)
        return httpx.Response(200, stream=_WatchStream(stream))


class _WatchStream(httpx.SyncByteStream):
    def __init__(self, stream: queue.Queue[bytes | None]) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        while (line := self._stream.get()) is not None:
            yield line

    def close(self) -> None:
        self._stream.put(None)


class _Transport(httpx.BaseTransport):
    def __init__(self, server: ApiStandIn) -> None:
        self._server = server

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.read()
        return self._server.handle(request)


def _json(code: int, body: object) -> httpx.Response:
    return httpx.Response(code, json=body)


def _line(event: str, body: dict[str, Any]) -> bytes:
    return json.dumps({"type": event, "object": body}).encode() + b"\n"


def _selector(text: str) -> dict[str, str]:
    return dict(one.split("=", 1) for one in text.split(",") if one)


def _has_labels(item: dict[str, Any], wanted: dict[str, str]) -> bool:
    labels = item["metadata"].get("labels") or {}
    return all(labels.get(key) == value for key, value in wanted.items())


def _merge(target: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """Apply a JSON merge patch (RFC 7396)."""
    for key, value in patch.items():
        if isinstance(value, dict):
            target[key] = _merge(dict(target.get(key) or {}), value)
        elif value is None:
            target.pop(key, None)
        else:
            target[key] = value
    return target
