"""`StandInRay`: the REST interface of a Ray cluster in memory, which loses requests and replies as a test asks.

Jobs run until a test ends or stops them; with `ending`, a status and a message, each ends at once, and without `stops`
none can be stopped. Of deletions the first `num_rewritten` are undone, as by the monitor of jobs of a real cluster.
"""

from __future__ import annotations

import json
from typing import Any

import httpx

from isthmus.agent.adapters.ray.ray_rest import MAX_ANSWER_BYTES, RayRest

NODE = {"state": "ALIVE", "node_id": "ab12" * 14, "node_name": "one", "labels": {"ray.io/zone": "a"}}


class StandInRay:
    """Jobs by submission id, and answers that a test replaces; `lost` names what happens to the next POST."""

    def __init__(self) -> None:
        self.session, self.jobs, self.lost, self.num_submitted = "session_1", dict[str, str](), "", 0
        self.nodes: Any = [NODE | {"resources_total": {"CPU": 4.0, "GPU": 2.0}}]
        self.usage: Any = {NODE["node_id"]: {"GPU": [1.0, 2.0]}}
        self.packages: dict[str, bytes] = {}
        self.replaced: dict[str, httpx.Response] = {}
        self.messages: dict[str, str] = {}
        self.ending: tuple[str, str] | None = None
        self.stops = True
        self.num_rewritten = 0

    def rest(self, max_answer_bytes: int = MAX_ANSWER_BYTES) -> RayRest:
        """Return a client of this cluster."""
        transport = httpx.MockTransport(self._answer)
        return RayRest("http://ray", transport=transport, max_answer_bytes=max_answer_bytes)

    def end_job(self, job: str, status: str, message: str) -> None:
        """Let a job end with a message."""
        self.jobs[job], self.messages[job] = status, message

    def _answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path in self.replaced:
            return self.replaced[path]
        if self.lost == "request":
            raise httpx.ConnectError("down", request=request)
        if path == "/api/version":
            return httpx.Response(200, json={"ray_version": "2.60.0", "session_name": self.session})
        if path == "/api/v0/nodes":
            return httpx.Response(200, json={"data": {"result": {"result": self.nodes}}})
        if path == "/api/cluster_status":
            status = {"loadMetricsReport": {"usageByNode": self.usage}}
            return httpx.Response(200, json={"data": {"clusterStatus": status}})
        if path.startswith("/api/packages/"):
            self.packages[path.rpartition("/")[2]] = request.content
            return httpx.Response(200)
        return self._jobs(request, path)

    def _jobs(self, request: httpx.Request, path: str) -> httpx.Response:
        if request.method == "POST" and path == "/api/jobs/":
            job = json.loads(request.content)["submission_id"]
            if job in self.jobs:
                return httpx.Response(500, text=f"Job with submission_id {job} already exists")
            self.jobs[job], self.num_submitted = "PENDING", self.num_submitted + 1
            if self.ending is not None:
                self.end_job(job, *self.ending)
            if self.lost == "reply":
                self.lost = "request"
                raise httpx.ReadTimeout("late", request=request)
            return httpx.Response(200, json={"submission_id": job})
        job = path.split("/")[3]
        if job not in self.jobs:
            return httpx.Response(404, text=f"Job {job} does not exist")
        if request.method == "POST" and self.stops:
            self.end_job(job, "STOPPED", "")
        if request.method == "DELETE":
            del self.jobs[job]
            if self.num_rewritten:
                self.num_rewritten -= 1
                self.end_job(job, "FAILED", "Job supervisor actor died")
            return httpx.Response(200, json={"deleted": True})
        return httpx.Response(200, json={"status": self.jobs[job], "message": self.messages.get(job)})
