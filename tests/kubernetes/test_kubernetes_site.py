"""Nodes and pods of a cluster as cards and jobs; what `site.yaml` may say; hostile objects of other users."""

from __future__ import annotations

import random
from typing import Any

import pytest

from isthmus.agent.adapters.kubernetes.kubernetes_objects import parse_count, parse_node, parse_pod
from isthmus.agent.adapters.kubernetes.kubernetes_site import KubernetesSite
from isthmus.core.errors import InputError, UnavailableError
from isthmus.core.owner.site_file import NodeSelector, SiteFile
from tests.kubernetes.samples import CLUSTER, GPU, node, pod, site_of


def named(body: dict[str, Any], uid: str = "u") -> dict[str, Any]:
    return {**body, "metadata": {"uid": uid, **body["metadata"]}}


def cards_of(site: KubernetesSite, *bodies: dict[str, Any]) -> dict[str, tuple[int, bool]]:
    found = site.card_nodes([parse_node(named(body), [GPU]) for body in bodies])
    return {one.name: (len(one.cards), one.usable) for one in found}


def test_nodes_with_the_labels_and_cards_of_a_group_are_its_nodes() -> None:
    """Cards are what the device plugin has as allocatable; nodes of other groups and without cards are left out."""
    site = site_of()
    none = node("n3")
    del none["status"]["allocatable"][GPU]
    assert cards_of(site, node("n2", 8), node("n1"), none, node("n4", group="a100")) == {
        "n1": (4, True),
        "n2": (8, True),
    }
    (first,) = site.card_nodes([parse_node(named(node("n1", 2)), [GPU])])
    assert first.cards == ("h20/n1/0", "h20/n1/1")


@pytest.mark.parametrize(
    ("change", "usable"),
    [
        ({"unschedulable": True}, False), ({"taints": [{"key": "other", "effect": "NoSchedule"}]}, False),
        ({"taints": [{"key": GPU, "effect": "NoSchedule"}]}, True),
        ({"taints": [{"key": "soft", "effect": "PreferNoSchedule"}]}, True),
    ],
)  # fmt: skip
def test_cards_of_a_node_that_takes_no_pods_are_not_given_out(change: dict[str, Any], usable: bool) -> None:
    """Cordoned and tainted nodes keep their cards; a taint named like the card is tolerated by holds."""
    assert cards_of(site_of(), node("n1", **change)) == {"n1": (4, usable)}
    silent = node("n1")
    silent["status"]["conditions"] = [{"type": "Ready", "status": "Unknown"}]
    assert cards_of(site_of(), silent) == {"n1": (4, False)}


def test_jobs_of_others_are_seen_with_cards_and_priority() -> None:
    """The pods of one owner are one job; a running one has cards of its node that no hold has."""
    site = site_of()
    nodes = site.card_nodes([parse_node(named(node(name)), [GPU]) for name in ("n1", "n2")])
    owner = [{"uid": "owner", "controller": True}]
    first, second = pod("a", 2, "n1", priority=5), pod("b", 2, "n2", priority=7)
    for one in (first, second):
        one["metadata"]["ownerReferences"] = owner
    bodies = [named(first, "u1"), named(second, "u2"), named(pod("c", 3), "u3"), named(pod("d", 0), "u4")]
    parsed = [one for one in (parse_pod(body, [GPU]) for body in bodies) if one is not None]
    jobs = site.foreign_jobs(parsed, nodes, {"h20/n1/0"}, preempts_below=6)
    assert [(job.name, job.priority, dict(job.wanted), job.cards, job.running, job.preemptible) for job in jobs] == [
        ("k8s-owner", 7, {"h20": 4}, ("h20/n1/1", "h20/n1/2", "h20/n2/0", "h20/n2/1"), True, False),
        ("k8s-u3", 0, {"h20": 3}, (), False, True),
    ]


def test_a_pod_asks_for_the_most_that_it_has_at_a_time() -> None:
    """Containers run together; those before them run one by one."""
    body = named(pod("a", 2))
    body["spec"]["containers"].append({"resources": {"requests": {GPU: "1"}}})
    body["spec"]["initContainers"] = [{"resources": {"limits": {GPU: "2"}}}, {}]
    found = parse_pod(body, [GPU])
    assert found is not None
    assert found.count(GPU) == 3


@pytest.mark.parametrize(
    ("text", "count"), [("8", 8), ("1k", 1000), ("1500m", 1), ("2e3", 2000), ("1Ki", 1024), ("1.5", 1), (4, 4)]
)
def test_quantities_are_read(text: object, count: int) -> None:
    """As Kubernetes writes them, rounded down."""
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "-1", "1x", "1e999", "eight", "1" * 40, None, [], "１"])
def test_what_is_no_quantity_is_refused(text: object) -> None:
    """It is never taken for no cards."""
    with pytest.raises(ValueError, match="not a quantity"):
        parse_count(text)


def test_a_mangled_object_is_read_or_refused() -> None:
    """Whatever is in a node or a pod, the outcome is an object or `UnavailableError`, and no other exception."""
    rng = random.Random(5)
    odd: list[Any] = [None, 3, "", "x", [], {}, [None], {"a": None}, "9" * 30, True, -1.5]

    def mangled(value: Any) -> Any:
        if rng.random() < 0.08:
            return rng.choice(odd)
        if isinstance(value, dict):
            return {key: mangled(one) for key, one in value.items() if rng.random() > 0.03}
        return [mangled(one) for one in value] if isinstance(value, list) else value

    num_read, refused = 0, set[str]()
    for _ in range(800):
        for parse, body in (
            (parse_node, node("n1", taints=[{"key": "k", "effect": "NoSchedule"}])),
            (parse_pod, pod("a", 2, "n1")),
        ):
            try:
                parse(mangled(named(body)), [GPU])
                num_read += 1
            except UnavailableError as error:
                refused.add(str(error).partition(" cannot be read")[0])
    assert 100 < num_read < 1600
    assert refused == {"a node of the API server", "a pod of the API server"}


def site(options: dict[str, Any] | None = None, **selector: Any) -> KubernetesSite:
    groups = {"h20": NodeSelector(**selector)}
    return KubernetesSite(SiteFile(kind="kubernetes", node_groups=groups, options=options or {"image": "i"}), CLUSTER)


@pytest.mark.parametrize(
    ("options", "selector", "words"),
    [
        ({}, {}, "names no image"),
        ({"image": "i", "worklod": "job"}, {}, "did you mean 'workload'"),
        ({"image": "i", "workload": "jobsett"}, {}, "did you mean 'jobset'"),
        ({"image": "i", "namespace": "A b"}, {}, "'A b' cannot be a name"),
        ({"image": "i", "queue": "../x"}, {}, "cannot be a name"),
        ({"image": "i", "bind_s": -1}, {}, "options.bind_s: '-1' is no number"),
        ({"image": "i", "grace_s": "nan"}, {}, "is no number"),
        ({"image": "i"}, {"partition": "p"}, "Kubernetes has no partitions"),
        ({"image": "i"}, {"labels": {"a b": "c"}}, "cannot be a label"),
        ({"image": "i"}, {"labels": {"a": "c\nd"}}, "cannot be a label"),
        ({"image": "i"}, {"labels": {"a": "x" * 64}}, "cannot be a label"),
        ({"image": "i"}, {"resource": "nvidia.com/gpu'"}, "cannot be the name of a resource"),
    ],
)
def test_what_kubernetes_cannot_have_is_refused(options: dict[str, Any], selector: dict[str, Any], words: str) -> None:
    """At the edge, with the nearest word."""
    with pytest.raises(InputError, match=words):
        site(options, **selector) if options else site({"python": "p"}, **selector)


def test_a_group_without_an_entry_is_refused() -> None:
    """Every node group says how its nodes are known."""
    with pytest.raises(InputError, match="names no labels for node group 'h20'"):
        KubernetesSite(SiteFile(kind="kubernetes", options={"image": "i"}), CLUSTER)
