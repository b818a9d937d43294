"""One look of an agent at a Kubernetes cluster with 2,000 pods of others, beside a list of them all."""

from __future__ import annotations

import tempfile
from pathlib import Path

import httpx

from benchmarks._sites_amount import Amount
from benchmarks._sites_looks import look_rows
from benchmarks.table import Row
from isthmus.agent.adapters.kubernetes.api_access import read_access
from isthmus.agent.adapters.kubernetes.kubernetes_adapter import KubernetesAdapter
from isthmus.agent.adapters.kubernetes.kubernetes_client import KubernetesClient
from isthmus.agent.courier.courier import Courier
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.conftest import fill_server
from tests.kubernetes.samples import pod, site_of

NUM_PODS, NUM_QUICK_PODS = 2000, 200


class CountingTransport(httpx.BaseTransport):
    """Requests that are counted."""

    def __init__(self, inner: httpx.BaseTransport) -> None:
        self._inner, self.num = inner, 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Pass a request on."""
        self.num += 1
        return self._inner.handle_request(request)


def rows(amount: Amount) -> list[Row]:
    """Look at the pods of others, in turn with a full list."""
    num = NUM_QUICK_PODS if amount.quick else NUM_PODS
    with tempfile.TemporaryDirectory() as folder:
        server = ApiServer(Path(folder) / "server")
        try:
            server.start()
            fill_server(server)
            server.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "other"}})
            for number in range(num):
                server.apply({"apiVersion": "v1", "kind": "Pod", **_pod(number)})
            return _measure(server, Path(folder), num)
        finally:
            server.end()


def _measure(server: ApiServer, folder: Path, num: int) -> list[Row]:
    access = read_access(str(server.kubeconfig()))
    transport = CountingTransport(httpx.HTTPTransport(verify=access.tls or True))
    client = KubernetesClient(access, transport=transport)
    adapter = KubernetesAdapter(site_of(), folder / "state", client, Courier(folder / "state"), ("true",))
    assert len(adapter.observe().foreign) == num
    return look_rows(
        f"Kubernetes: one look at {num:,} pods", "a list of them", adapter.observe, lambda: _list_all(server),
        lambda: transport.num, asked="requests", apart="renewed watches",
    )  # fmt: skip


def _pod(number: int) -> dict[str, object]:
    body = pod(f"p{number}", 1)
    del body["spec"]["priority"]
    return {"metadata": body["metadata"], "spec": body["spec"]}


def _list_all(server: ApiServer) -> None:
    server.api.get("/api/v1/pods", params={"limit": 0}).json()
