"""Clusters for the tests of the adapter: of the stand-in and of a real API server, with pods that are processes."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import httpx

from isthmus.agent.adapters.kubernetes.api_access import read_access
from isthmus.agent.adapters.kubernetes.kubernetes_adapter import KubernetesAdapter
from isthmus.agent.adapters.kubernetes.kubernetes_client import KubernetesClient
from isthmus.agent.courier.courier import Courier
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.api_stand_in import ApiStandIn
from tests.kubernetes.cluster_controllers import WORKLOADS, ClusterControllers
from tests.kubernetes.pod_processes import PodProcesses
from tests.kubernetes.samples import client_of, filled, site_of


class StandInCluster:
    """A cluster of the stand-in with two nodes, whose API server a test may kill."""

    def __init__(self, folder: Path) -> None:
        self.server, self._state = filled(ApiStandIn()), folder / "state"
        api = httpx.Client(base_url="https://api.example", transport=self.server.transport())
        self._controllers = ClusterControllers(api, PodProcesses(folder / "pods"))
        self._courier = Courier(self._state)
        self._controllers.start()

    def adapter(self, command: Sequence[str]) -> KubernetesAdapter:
        return KubernetesAdapter(site_of(), self._state, client_of(self.server), self._courier, tuple(command))

    def kill(self) -> None:
        self.server.kill()

    def restart(self) -> None:
        self.server.restart()

    def end(self) -> None:
        self._controllers.stop()
        self._courier.close()
        self.server.kill()


class RealCluster:
    """A cluster of a real API server, with the rights of the agent's role; some replies to it may be lost."""

    def __init__(self, folder: Path, server: ApiServer, seed: int = 0, share_lost: float = 0.0) -> None:
        self.server, self._state = server, folder / "state"
        self.replies = LossyReplies(server, random.Random(seed), share_lost)
        self._controllers = ClusterControllers(server.api, PodProcesses(folder / "pods"))
        self._courier = Courier(self._state)
        self._controllers.start()

    def adapter(self, command: Sequence[str]) -> KubernetesAdapter:
        access = read_access(str(self.server.kubeconfig()))
        client = KubernetesClient(access, timeout_s=5.0, transport=self.replies.transport(access.tls))
        return KubernetesAdapter(site_of(), self._state, client, self._courier, tuple(command))

    def kill(self) -> None:
        self.server.kill()

    def restart(self) -> None:
        self.server.restart()

    def left(self) -> list[str]:
        """Return the names of what is left in the namespace: workloads, pods that have cards, tickets."""
        found = [one["metadata"]["name"] for path in WORKLOADS for one in self.server.api.get(path).json()["items"]]
        for path in ("/api/v1/pods", "/api/v1/namespaces/isthmus/secrets"):
            items = self.server.api.get(path, params={"labelSelector": "isthmus.io/hold"}).json()["items"]
            found += [one["metadata"]["name"] for one in items]
        return found

    def end(self) -> None:
        self._controllers.stop()
        self._courier.close()
        # By default a Job waits for a controller, which is not here, that lets go of its pods.
        options = json.dumps({"gracePeriodSeconds": 0, "propagationPolicy": "Background"})
        for path in (*WORKLOADS, "/api/v1/pods", "/api/v1/secrets"):
            for one in self.server.api.get(path).json()["items"]:
                prefix, _, plural = path.rpartition("/")
                metadata = one["metadata"]
                target = f"{prefix}/namespaces/{metadata['namespace']}/{plural}/{metadata['name']}"
                self.server.api.request("DELETE", target, content=options)


class LossyReplies:
    """Loses some of the server's replies to requests that change something, after they were done."""

    def __init__(self, server: ApiServer, rng: random.Random, share: float) -> None:
        self._server, self._rng, self._share, self.num_lost = server, rng, share, 0

    def transport(self, tls: object) -> httpx.BaseTransport:
        """Return a transport of a client."""
        return _LossyTransport(self, httpx.HTTPTransport(verify=tls))  # type: ignore[arg-type]

    def stop(self) -> None:
        """Lose no more."""
        self._share = 0.0

    def is_lost(self, method: str) -> bool:
        """Return whether the next reply is lost."""
        lost = method != "GET" and self._rng.random() < self._share
        self.num_lost += lost
        return lost


class _LossyTransport(httpx.BaseTransport):
    def __init__(self, replies: LossyReplies, inner: httpx.BaseTransport) -> None:
        self._replies, self._inner = replies, inner

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = self._inner.handle_request(request)
        if self._replies.is_lost(request.method):
            response.close()
            raise httpx.ReadError("the reply was lost", request=request)
        return response

    def close(self) -> None:
        self._inner.close()
