"""The roles of `deploy/kubernetes` grant what the adapter uses, and nothing else."""

from __future__ import annotations

from pathlib import Path

import kubernetes_validate
import pytest

from isthmus.agent.adapters.kubernetes.kubernetes_adapter import KubernetesAdapter
from isthmus.agent.adapters.kubernetes.kubernetes_rights import needed_rights
from isthmus.core.errors import UnavailableError
from tests.kubernetes.roles import documents, granted
from tests.kubernetes.samples import site_of
from tests.kubernetes.test_holds import Cluster, request

KINDS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "job": ({"priority": "isthmus", "preempting_priority": "isthmus-preempting"}, ("base",)),
    "jobset": ({"workload": "jobset", "priority": "isthmus"}, ("base", "jobset")),
    "volcano": ({"workload": "volcano", "queue": "q", "priority": "isthmus"}, ("base", "volcano")),
    "dra": ({"device_driver": "gpu.example.com", "priority": "isthmus"}, ("base", "dra")),
    "kueue": ({"queue": "users", "priority": "low"}, ("base", "kueue")),
}


def use_all(cluster: Cluster, adapter: KubernetesAdapter) -> None:
    """Do everything that an agent and `isthmus site check` do, with lost replies: a create meets its own object."""
    adapter.observe()
    adapter.check()
    wanted = request(2, 1)
    cluster.server.lose_replies(2)
    for _ in range(2):
        with pytest.raises(UnavailableError):
            adapter.hold(wanted)
    adapter.hold(wanted)
    adapter.release(wanted.id)
    adapter.observe()


@pytest.mark.parametrize("kind", KINDS)
def test_the_roles_have_the_verbs_that_are_used(kind: str, tmp_path: Path) -> None:
    """Those that the server was asked for, those that `site check` asks about, and those of the roles are the same."""
    options, folders = KINDS[kind]
    cluster = Cluster(tmp_path)
    cluster.acts = False
    use_all(cluster, cluster.adapter(**options, bind_s=0))
    used = {one for one in cluster.server.used if one[1] != "selfsubjectaccessreviews"}
    needed = {(one.group, one.resource, one.verb, one.in_cluster) for one in needed_rights(site_of(**options))}
    assert used == needed
    assert granted(*folders) - _SPARE == needed - _SPARE
    assert needed - granted(*folders) == set()
    cluster.server.kill()


_SPARE = {("batch", "jobs", verb, False) for verb in ("create", "get", "delete")} | {
    ("scheduling.k8s.io", "priorityclasses", "list", True)
}
"""The base serves Jobs also where another kind is chosen, and priority classes where Kueue has its own."""


def test_the_roles_pass_the_strict_schemas() -> None:
    """Of the oldest and the newest release."""
    for body in documents("base", "jobset", "volcano", "kueue", "dra"):
        for release in ("1.25", "1.37"):
            kubernetes_validate.validate(body, release, strict=True)
