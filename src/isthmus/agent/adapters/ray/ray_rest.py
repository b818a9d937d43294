"""`RayRest`: the REST interface of a Ray cluster: jobs, packages, nodes. A failure is `UnavailableError`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx

from isthmus.core.errors import InputError, UnavailableError

ENDED_STATES = ("SUCCEEDED", "FAILED", "STOPPED")
_MAX_ERROR_CHARS = 200
_NOT_FOUND, _OK = 404, 200


@dataclass(frozen=True, kw_only=True)
class RayNode:
    """A live node of a Ray cluster; `used` and `total` are resources by name."""

    id: str
    name: str
    labels: dict[str, str]
    total: dict[str, float]
    used: dict[str, float]


class RayRest:
    """The dashboard of a Ray cluster at `address`; `token` is that of a cluster with token authentication.

    `transport` replaces the network.
    """

    def __init__(
        self, address: str, *, timeout_s: float = 10.0, token: str = "", transport: httpx.BaseTransport | None = None
    ) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
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

    def job_state(self, submission_id: str) -> str | None:
        """Return the state of a job, None if Ray knows no such job."""
        found = self._ask("GET", f"/api/jobs/{submission_id}", missing=True)
        return None if found is None else _text(found, "status", "/api/jobs")

    def submit(self, submission_id: str, entrypoint: str, package: str) -> None:
        """Submit a job; one that is there already stays the only one."""
        body = {
            "submission_id": submission_id, "entrypoint": entrypoint, "entrypoint_num_cpus": 0,
            "runtime_env": {"working_dir": package}, "metadata": {},
        }  # fmt: skip
        try:
            self._ask("POST", "/api/jobs/", json=body)
        except UnavailableError:
            if self.job_state(submission_id) is None:
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
        used = {str(node).lower(): amounts for node, amounts in usage.items()}
        found = []
        for one in listed:
            if not isinstance(one, dict):
                raise UnavailableError(f"the answer of {path} has a node that is no object")
            if one.get("state") == "ALIVE":
                node = _text(one, "node_id", path)
                amounts = used.get(node.lower(), {})
                found.append(
                    RayNode(
                        id=node, name=_text(one, "node_name", path),
                        labels={str(key): str(value) for key, value in (one.get("labels") or {}).items()},
                        total={str(key): float(value) for key, value in (one.get("resources_total") or {}).items()},
                        used={str(key): float(pair[0]) for key, pair in amounts.items()},
                    )
                )  # fmt: skip
        return found

    def _ask(self, method: str, path: str, *, missing: bool = False, parse: bool = True, **more: Any) -> Any:
        try:
            answer = self._client.request(method, path, **more)
        except httpx.HTTPError as error:
            raise UnavailableError(
                f"Ray at {self.address} does not answer: {type(error).__name__}",
                hint="start its head, or set options.address to its dashboard",
            ) from error
        if missing and answer.status_code == _NOT_FOUND:
            return None
        if answer.status_code != _OK:
            text = " ".join(answer.text.split())[-_MAX_ERROR_CHARS:]
            raise UnavailableError(f"Ray refused {method} {path} with status {answer.status_code}: {text}")
        if not parse:
            return None
        try:
            return answer.json()
        except ValueError as error:
            raise UnavailableError(f"the answer of {path} is no JSON: {answer.text[:80]!r}") from error


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
