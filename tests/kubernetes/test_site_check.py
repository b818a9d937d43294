"""`isthmus site check` for Kubernetes: what fits, and what does not with its field and the nearest word."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from isthmus.agent.adapters.kubernetes.kubernetes_checks import check_kubernetes
from isthmus.agent.adapters.kubernetes.kubernetes_site import KubernetesSite
from isthmus.agent.adapters.scheduler_adapter import SchedulerCheck
from isthmus.cli import main
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.core.owner.site_file import NodeSelector, SiteFile
from isthmus.core.pool import Cluster, NodeGroup
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.api_stand_in import ApiStandIn
from tests.kubernetes.samples import CLUSTER, GPU, NAMESPACE, client_of, filled, node, site_of

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "kubernetes.md"


def wrong(site: KubernetesSite, server: ApiStandIn) -> list[SchedulerCheck]:
    return [one for one in check_kubernetes(site, client_of(server)) if not one.ok]


def test_a_site_that_fits_passes() -> None:
    """Every check is named with what was found."""
    server = filled(ApiStandIn())
    site = site_of(priority="isthmus", preempting_priority="isthmus-preempting")
    found = check_kubernetes(site, client_of(server))
    assert [one.check for one in found] == [
        "scheduler", "namespace", "rights", "workload", "priority", "preempting_priority", "cards"
    ]  # fmt: skip
    assert all(one.ok for one in found)
    assert found[-1].detail == "node group 'h20': 8 cards on 2 nodes, 8 on 2 in pool.yaml"


@pytest.mark.parametrize(
    ("options", "place", "words"),
    [
        ({"namespace": "isthmas"}, "namespace", ("unknown namespace 'isthmas'", "isthmus")),
        ({"queue": "usres"}, "queue", ("unknown queue 'usres'", "users")),
        ({"workload": "volcano", "queue": "teems"}, "queue", ("unknown queue 'teems'", "teams")),
        ({"priority": "istmus"}, "priority", ("unknown priorityclasses 'istmus'", "isthmus")),
        ({"priority": "isthmus-preempting"}, "priority", ("preempts other jobs", "Never")),
        ({"preempting_priority": "isthmus"}, "preempting_priority", ("never preempts", "PreemptLowerPriority")),
    ],
)
def test_a_name_that_the_cluster_lacks_has_the_nearest(
    options: dict[str, str], place: str, words: tuple[str, str]
) -> None:
    """With the field of the file that is wrong."""
    server = filled(ApiStandIn())
    server.put("kueue.x-k8s.io", "localqueues", {"metadata": {"name": "users"}, "spec": {}}, NAMESPACE)
    server.put("scheduling.volcano.sh", "queues", {"metadata": {"name": "teams"}, "spec": {}})
    (found,) = wrong(site_of(**options), server)
    assert found.file_path == ("options", place)
    assert words[0] in found.detail
    assert words[1] in found.hint


def test_labels_and_resources_that_nobody_has_are_named() -> None:
    """A key, a value or a resource with the nearest one; cards that no node group maps."""
    server = filled(ApiStandIn())
    server.put("", "nodes", node("n3", group="a100"))
    odd = node("n4")
    odd["metadata"]["labels"] = {}
    odd["status"]["allocatable"] = {"huawei.com/ascend910": "8"}
    server.put("", "nodes", odd)
    labels = {"example.com/chip": "h2o", "example.com/chp": "h20"}
    groups = {"h20": NodeSelector(labels=labels, resource="nvidia.com/gpus")}
    site = KubernetesSite(
        SiteFile(kind="kubernetes", node_groups=groups, options={"image": "i", "namespace": NAMESPACE}), CLUSTER
    )
    found = {(one.check, one.detail): (one.hint, one.file_path) for one in wrong(site, server)}
    assert "h20" in found["labels", "no node has label 'example.com/chip: h2o'"][0]
    assert "example.com/chip" in found["labels", "unknown label 'example.com/chp'"][0]
    hint, place = found["resource", "unknown resource 'nvidia.com/gpus'"]
    assert GPU in hint
    assert place == ("node_groups", "h20", "resource")
    unmapped = [detail for check, detail in found if detail.startswith("cards of no node group")]
    assert any("n4 has 8 huawei.com/ascend910" in one for one in unmapped)
    assert any("n3 has 4 nvidia.com/gpu" in one for one in unmapped)


def test_a_second_kind_of_cards_at_a_node_that_is_mapped_is_named() -> None:
    """A node group maps one resource of a node; the other cards of the node are of no group."""
    server = filled(ApiStandIn())
    mixed = node("n3")
    mixed["status"]["allocatable"] |= {"huawei.com/ascend910": "2", "example.com/nics": "2"}
    server.put("", "nodes", mixed)
    details = [one.detail for one in wrong(site_of(), server)]
    assert "cards of no node group: node n3 has 2 huawei.com/ascend910" in details
    assert not any("nics" in one for one in details)


def test_a_missing_right_is_named_by_verb_and_object() -> None:
    """As one asks for it, with where it is needed."""
    server = filled(ApiStandIn())
    server.denied |= {("", "secrets", "create"), ("batch", "jobs", "delete"), ("", "nodes", "watch")}
    found = wrong(site_of(), server)
    assert {one.file_path for one in found} == {("kind",)}
    assert [one.detail for one in found] == [
        "missing right: delete jobs.batch in namespace 'isthmus'",
        "missing right: create secrets in namespace 'isthmus'",
        "missing right: watch nodes in the whole cluster",
    ]


def test_an_old_or_dead_server_is_one_finding() -> None:
    """A release without numbered pods is too old; a server that does not answer has no further findings."""
    server = filled(ApiStandIn())
    server.version = ("1", "23")
    (found,) = wrong(site_of(), server)
    assert "1.24" in found.hint
    server.kill()
    (found,) = wrong(site_of(), server)
    assert (found.check, "no answer" in found.detail) == ("scheduler", True)


def test_the_guides_site_file_is_one() -> None:
    """The file that the guide shows is read, and names what the guide applies."""
    text = next(
        block for block in re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.S) if "kind: kubernetes" in block
    )
    file = SiteFile.model_validate(yaml.safe_load(text))
    groups = tuple(NodeGroup(name=name, chip="H20", nodes=1, chips_per_node=8) for name in file.node_groups)
    site = KubernetesSite(file, Cluster(name="east", owner="o", node_groups=groups))
    assert (site.namespace, site.priority) == ("isthmus", "isthmus")


POOL = """
version: 1
owners: [{name: o}]
clusters:
- {name: east, owner: o, node_groups: [{name: h20, chip: H20, nodes: 2, chips_per_node: 4}]}
"""
SITE = """
kind: kubernetes
node_groups:
  h20:
    labels: {{example.com/chip: {chip}}}
options:
  kubeconfig: {kubeconfig}
  image: i
  namespace: {namespace}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ()), ({"namespace": "isthmu"}, ("site.yaml:9", "unknown namespace 'isthmu'")),
        ({"chip": "h2o"}, ("site.yaml:5", "no node has label 'example.com/chip: h2o'", "did you mean 'h20'?")),
    ],
)  # fmt: skip
def test_the_command_says_where_a_site_does_not_fit(
    changes: dict[str, Any], words: tuple[str, ...], api_server: ApiServer, tmp_path: Path
) -> None:
    """On the real server, whose release alone is too old for holds: exit 2, the line, and the nearest word."""
    told = {"kubeconfig": api_server.kubeconfig(), "namespace": "isthmus", "chip": "h20", **changes}
    (tmp_path / "pool.yaml").write_text(POOL)
    (tmp_path / "site.yaml").write_text(SITE.format_map(told))
    out = io.StringIO()
    files = ("site", "check", str(tmp_path / "site.yaml"), "--pool", str(tmp_path / "pool.yaml"), "--json")
    assert main([*files], env=CliEnvironment(variables={}, stdout=out, stderr=out)) == 2
    wrong_checks = [one for one in json.loads(out.getvalue()) if not one["ok"] and one["check"] != "scheduler"]
    assert bool(wrong_checks) == bool(words), json.dumps(wrong_checks)
    assert all(word in out.getvalue() for word in words), out.getvalue()
