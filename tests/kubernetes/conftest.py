"""A real API server for the tests of this folder; skipped, and said so, where it has not been built."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.kubernetes.api_server import ApiServer, missing_programs
from tests.kubernetes.roles import documents
from tests.kubernetes.samples import node


@pytest.fixture(scope="package")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A server with two nodes, the site's roles and classes, and the definitions of JobSet, Volcano and Kueue."""
    missing = missing_programs()
    if missing:
        pytest.skip(f"needs a real API server ({', '.join(missing)})")
    server = ApiServer(tmp_path_factory.mktemp("api-server"))
    try:
        server.start()
        fill_server(server)
        yield server
    finally:
        server.end()


def fill_server(server: ApiServer) -> None:
    """Put the tests' definitions, the site's roles and classes, and two nodes into an empty server."""
    for body in yaml.safe_load_all((Path(__file__).parent / "crds.yaml").read_text()):
        server.apply(body)
    for body in documents("base", "jobset", "volcano", "kueue"):
        server.apply(body)
    for name, value, policy in (("isthmus", 0, "Never"), ("isthmus-preempting", 1000, "PreemptLowerPriority")):
        kind = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "preemptionPolicy": policy}
        server.apply({**kind, "metadata": {"name": name}, "value": value})
    for number in (1, 2):
        server.put_node(node(f"n{number}"))
