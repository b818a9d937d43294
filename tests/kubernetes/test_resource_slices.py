"""Cards of a DRA driver: their nodes' inventory from slices, their use by claims, by the published schemas."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from isthmus.agent.adapters.kubernetes.kubernetes_checks import check_kubernetes
from isthmus.agent.adapters.kubernetes.resource_slices import device_counts, parse_claim, parse_slice
from isthmus.core.errors import FieldError, UnavailableError
from tests.kubernetes.samples import GPU, client_of, node, site_of
from tests.kubernetes.test_holds import Cluster, request

DRIVER = "gpu.example.com"


def slice_of(node_name: str, cards: int, *, part: int = 0, generation: int = 1, driver: str = DRIVER) -> dict[str, Any]:
    """Return a slice of a node's pool, as a driver publishes it."""
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": f"{node_name}-{driver}-{generation}-{part}"},
        "spec": {
            "driver": driver,
            "nodeName": node_name,
            "pool": {"name": node_name, "generation": generation, "resourceSliceCount": 1},
            "devices": [{"name": f"gpu-{part}-{card}"} for card in range(cards)],
        },
    }


def claim_of(name: str, node_name: str, cards: int, **metadata: Any) -> dict[str, Any]:
    """Return a claim of another user's pod that has cards of a node."""
    results = [
        {"request": "r", "driver": DRIVER, "pool": node_name, "device": f"gpu-0-{card}"} for card in range(cards)
    ]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": "other", **metadata},
        "spec": {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": DRIVER, "count": cards}}]}},
        "status": {"allocation": {"devices": {"results": results}}} if cards else {},
    }


class DeviceCluster(Cluster):
    """A stand-in whose nodes have no device plugin, and four cards of the driver each."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for number in (1, 2):
            plain = node(f"n{number}")
            del plain["status"]["allocatable"][GPU]
            self.server.objects = {
                key: one for key, one in self.server.objects.items() if one["metadata"]["name"] != f"n{number}"
            }
            self.server.put("", "nodes", plain)
            self.put_slice(slice_of(f"n{number}", 4))

    def put_slice(self, body: dict[str, Any]) -> None:
        self.server.put("resource.k8s.io", "resourceslices", body)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[DeviceCluster]:
    cluster = DeviceCluster(tmp_path)
    yield cluster
    cluster.server.kill()


@pytest.mark.parametrize("release", ["1.34", "1.37"])
def test_the_samples_are_what_kubernetes_serves(release: str) -> None:
    """The strict schemas of the releases that have them know every field."""
    for body in (slice_of("n1", 4), claim_of("c", "n1", 2)):
        kubernetes_validate.validate(body, release, strict=True)


def test_cards_come_from_slices_where_no_device_plugin_gives_them(cluster: DeviceCluster) -> None:
    """Beside nodes with a device plugin, whose count stays as it is."""
    cluster.server.put("", "nodes", node("n3", 2))
    cluster.put_slice(slice_of("n3", 8))
    look = cluster.adapter(device_driver=DRIVER).observe()
    assert {one.name: len(one.cards) for one in look.nodes} == {"n1": 4, "n2": 4, "n3": 2}
    assert cluster.adapter().observe().nodes[0].name == "n3", "without the option slices are not read"


def test_a_hold_takes_cards_that_no_claim_has(cluster: DeviceCluster) -> None:
    """Claims of other users' pods are jobs of others, and a hold that does not fit beside them waits."""
    cluster.server.put("resource.k8s.io", "resourceclaims", claim_of("theirs", "n1", 3), "other")
    cluster.server.put("resource.k8s.io", "resourceclaims", claim_of("waits", "n1", 0), "other")
    extended = {"annotations": {"resource.kubernetes.io/extended-resource-claim": "true"}}
    cluster.server.put("resource.k8s.io", "resourceclaims", claim_of("pods", "n2", 4, **extended), "other")
    adapter = cluster.adapter(device_driver=DRIVER, preempting_priority="isthmus-preempting")
    (job,) = adapter.observe().foreign
    assert (dict(job.wanted), len(job.cards), job.running, job.preemptible) == ({"h20": 3}, 3, True, False)
    assert {card.split("/")[1] for card in job.cards} == {"n1"}
    assert adapter.hold(request(2, 4)).detail == "no free cards"


def test_of_a_pool_the_newest_generation_counts_and_a_device_once() -> None:
    """A driver replaces its slices one after the other."""
    slices = [
        slice_of("n1", 4, generation=1), slice_of("n1", 2, generation=2), slice_of("n1", 1, part=1, generation=2),
        slice_of("n1", 2, generation=2), slice_of("n2", 8, driver="nic.example.com"),
    ]  # fmt: skip
    assert device_counts(map(parse_slice, slices), DRIVER) == {"n1": 3}
    everywhere = slice_of("n1", 4)
    del everywhere["spec"]["nodeName"]
    assert device_counts([parse_slice(everywhere)], DRIVER) == {}


@pytest.mark.parametrize(
    "change", [{"spec": None}, {"spec": {"driver": "d", "pool": {"name": "p", "generation": "x"}}}]
)
def test_a_slice_that_cannot_be_read_is_an_error(change: dict[str, Any]) -> None:
    """It is never taken for no cards."""
    with pytest.raises(UnavailableError, match="ResourceSlice"):
        parse_slice(slice_of("n1", 4) | change)
    broken = claim_of("c", "n1", 1)
    broken["status"]["allocation"]["devices"]["results"] = [{"driver": DRIVER}]
    with pytest.raises(UnavailableError, match="ResourceClaim"):
        parse_claim(broken)


def test_the_check_names_an_unknown_driver_and_counts_the_cards(cluster: DeviceCluster) -> None:
    """With the nearest word; a server without the API says which release has it."""
    found = check_kubernetes(site_of(device_driver=DRIVER), client_of(cluster.server))
    assert [one.detail for one in found if not one.ok] == []
    assert "8 cards on 2 nodes" in next(one.detail for one in found if one.check == "cards")
    wrong = check_kubernetes(site_of(device_driver="gpu.exmaple.com"), client_of(cluster.server))
    (one,) = [one for one in wrong if one.check == "device_driver"]
    assert (one.ok, one.hint) == (False, f"did you mean '{DRIVER}'?")


def test_a_server_without_devices_is_an_error_of_the_site_file(cluster: DeviceCluster) -> None:
    """Older than 1.32, or with the API switched off."""
    cluster.server.hidden = {"resource.k8s.io"}
    with pytest.raises(FieldError, match=r"options\.device_driver.*serves no resource\.k8s\.io"):
        cluster.adapter(device_driver=DRIVER).observe()
