"""`RayRest`: the REST interface of a Ray cluster: jobs, packages, nodes. A failure is `UnavailableError`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import httpx

from isthmus.core.errors import InputError, UnavailableError
from isthmus.core.text.printable import printable

ENDED_STATES = ("SUCCEEDED", "FAILED", "STOPPED")
MAX_ANSWER_BYTES = 64 << 20
"""Of one answer: the nodes of a cluster of 10,000 are a third of it."""

_MAX_ERROR_CHARS = 200
_MAX_AMOUNT = 1e18  # beyond any memory in bytes
_NOT_FOUND, _OK = 404, 200


@dataclass(frozen=True, kw_only=True)
class RayJob:
    """A job of a Ray cluster; `message`, which may have several lines, is Ray's and the program's."""

    status: str
    message: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether Ray has finished with it."""
        return self.status in ENDED_STATES


@dataclass(frozen=True, kw_only=True)
class RayNode:
    """A live node of a Ray cluster; `used` and `total` are resources by name."""

    id: str
    name: str
    labels: dict[str, str]
    total: dict[str, float]
    used: dict[str, float]


_NO_RIGHT = (401, 403)
_VERBS = {"GET": "read", "POST": "create", "PUT": "upload", "DELETE": "delete"}


class RayRest:
    """The dashboard of a Ray cluster at `address`; `token` is that of a cluster with token authentication.

    An answer may have `max_answer_bytes`; `transport` replaces the network.
    """

    def __init__(
        self, address: str, *, timeout_s: float = 10.0, token: str = "", transport: httpx.BaseTransport | None = None,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:  # fmt: skip
        self._max_answer_bytes = max_answer_bytes
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {})
        try:
            self._client = httpx.Client(
                base_url=address, timeout=timeout_s, headers=headers, trust_env=False,
                limits=httpx.Limits(max_keepalive_connections=0), transport=transport,
            )  # fmt: skip
        except httpx.InvalidURL as error:
            raise InputError(f"options.address '{address}' is no URL: {error}", hint="http://HEAD:8265") from error
        self.address = address

    def version(self) -> dict[str, str]:
        """Return Ray's version and the name of the session, which a restarted head changes."""
        found = self._ask("GET", "/api/version")
        return {name: _text(found, name, "/api/version") for name in ("ray_version", "session_name")}

    def job(self, submission_id: str) -> RayJob | None:
        """Return a job, None if Ray knows no such job."""
        found = self._ask("GET", f"/api/jobs/{submission_id}", missing=True)
        if found is None:
            return None
        status = _text(found, "status", "/api/jobs")
        return RayJob(status=status, message=str(found.get("message") or ""))

    def submit(self, submission_id: str, entrypoint: str, package: str = "") -> None:
        """Submit a job, with the files of a package; one that is there already stays the only one."""
        body = {
            "submission_id": submission_id, "entrypoint": entrypoint, "entrypoint_num_cpus": 0,
            "runtime_env": {"working_dir": package} if package else {}, "metadata": {},
        }  # fmt: skip
        try:
            self._ask("POST", "/api/jobs/", json=body)
        except UnavailableError:
            if self.job(submission_id) is None:
                raise

    def stop(self, submission_id: str) -> None:
        """Ask Ray to stop a job; one that is unknown or has ended stays as it is."""
        self._ask("POST", f"/api/jobs/{submission_id}/stop", missing=True)

    def delete(self, submission_id: str) -> None:
        """Let Ray forget a job that has ended."""
        self._ask("DELETE", f"/api/jobs/{submission_id}", missing=True)

    def upload(self, name: str, data: bytes) -> str:
        """Store a package for jobs; return its URI."""
        self._ask("PUT", f"/api/packages/gcs/{name}", content=data, parse=False)
        return f"gcs://{name}"

    def nodes(self) -> list[RayNode]:
        """Return the live nodes with what is used of their resources."""
        path = "/api/v0/nodes?detail=1&limit=10000"
        listed = _inside(self._ask("GET", path), ("data", "result", "result"), list, path)
        status = self._ask("GET", "/api/cluster_status")
        place = ("data", "clusterStatus", "loadMetricsReport", "usageByNode")
        usage = _inside(status, place, dict, "/api/cluster_status")
        used = {node.lower(): amounts for node, amounts in usage.items()}
        return [_node(one, used, path) for one in listed if _text(one, "state", path) == "ALIVE"]

    def _ask(self, method: str, path: str, *, missing: bool = False, parse: bool = True, **more: Any) -> Any:
        try:
            with self._client.stream(method, path, **more) as answer:
                data = self._read(answer, path)
        except httpx.HTTPError as error:
            raise UnavailableError(
                f"Ray at {self.address} does not answer: {type(error).__name__}",
                hint="start its head, or set options.address to its dashboard",
            ) from error
        if missing and answer.status_code == _NOT_FOUND:
            return None
        if answer.status_code in _NO_RIGHT:
            thing = next(word for word in path.partition("?")[0].split("/") if word not in ("", "api", "v0"))
            hint = "set options.token_file to a file with the cluster's token"
            raise UnavailableError(f"missing right: {_VERBS[method]} {thing} at Ray ({answer.status_code})", hint=hint)
        if answer.status_code != _OK:
            text = " ".join(data.decode(errors="replace").split())[-_MAX_ERROR_CHARS:]
            raise UnavailableError(f"Ray refused {method} {path} with status {answer.status_code}: {printable(text)}")
        if not parse:
            return None
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            start = printable(data[:80].decode(errors="replace"))
            raise UnavailableError(f"the answer of {path} is no JSON: '{start}'") from error

    def _read(self, answer: httpx.Response, path: str) -> bytes:
        """Return the body of an answer, which came as it is: a small one that unpacks to a large one is refused."""
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            raise UnavailableError(f"the answer of {path} is encoded, which was not asked for")
        data = bytearray()
        for chunk in answer.iter_bytes():
            data += chunk
            if len(data) > self._max_answer_bytes:
                raise UnavailableError(f"the answer of {path} has more than {self._max_answer_bytes} bytes")
        return bytes(data)


def _node(found: dict[str, Any], used: dict[str, Any], path: str) -> RayNode:
    """Return a node of an answer; a label, amount or use that is none is an error that names it."""
    node = _text(found, "node_id", path)
    labels = _table(found.get("labels"), f"'labels' of node {node}", path)
    for name, value in labels.items():
        if not isinstance(value, str):
            raise UnavailableError(f"the answer of {path} has a label '{printable(name)}' that is no text")
    total = _table(found.get("resources_total"), f"'resources_total' of node {node}", path)
    pairs = _table(used.get(node.lower()), f"'usageByNode' of node {node}", "/api/cluster_status")
    taken = {name: pair[0] if isinstance(pair, list) and pair else None for name, pair in pairs.items()}
    return RayNode(
        id=node, name=_text(found, "node_name", path), labels=labels,
        total={name: _amount(value, name, path) for name, value in total.items()},
        used={name: _amount(value, name, "/api/cluster_status") for name, value in taken.items()},
    )  # fmt: skip


def _table(found: Any, what: str, path: str) -> dict[str, Any]:
    """Return a table of an answer; Ray leaves out an empty one."""
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise UnavailableError(f"the answer of {path} has {printable(what)} that is no table")
    return found


def _amount(value: Any, name: str, path: str) -> float:
    """Return an amount of a resource."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < _MAX_AMOUNT:  # neither is "not a number"
        raise UnavailableError(f"the answer of {path} has no amount of '{printable(name)}'")
    return float(value)


def _text(found: Any, name: str, path: str) -> str:
    value = found.get(name) if isinstance(found, dict) else None
    if not isinstance(value, str):
        raise UnavailableError(f"the answer of {path} has no '{name}'")
    return value


def _inside(found: Any, place: tuple[str, ...], kind: type, path: str) -> Any:
    """Return what is at a place of an answer; an answer without it is an error, never an empty list."""
    for name in place:
        found = found.get(name) if isinstance(found, dict) else None
    if not isinstance(found, kind):
        raise UnavailableError(f"the answer of {path} has no '{'.'.join(place)}'")
    return found
