"""Holds at the stand-in: asked for, granted, withdrawn and released, with lost replies, races and preemption."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from isthmus.agent.adapters.kubernetes.hold_record import HoldRecord
from isthmus.agent.adapters.kubernetes.kubernetes_adapter import KubernetesAdapter
from isthmus.agent.adapters.kubernetes.kubernetes_client import KubernetesClient
from isthmus.agent.adapters.kubernetes.render_kubernetes import render_kubernetes
from isthmus.agent.adapters.rendered_hold import HOLD_ID, PartRequest
from isthmus.agent.adapters.scheduler_adapter import ContainerNeed, HoldRequest, RankNeed, RankStart
from isthmus.core.errors import AuthError, InputError, UnavailableError
from tests.kubernetes.api_stand_in import ApiStandIn
from tests.kubernetes.cluster_controllers import ClusterControllers
from tests.kubernetes.samples import NAMESPACE, client_of, filled, pod, site_of


class PlainTickets:
    """Hands out a ticket by folder, and notes which were taken back."""

    def __init__(self) -> None:
        self.revoked: list[Path] = []

    def ticket(self, folder: Path, hold: Path | None = None) -> bytes:
        return f"{folder} {hold}".encode()

    def revoke(self, folder: Path) -> None:
        self.revoked.append(folder)


class Cluster:
    """A stand-in whose controllers act before each answer of a list, so that no test waits."""

    def __init__(self, folder: Path) -> None:
        self.server, self.folder, self.tickets = filled(ApiStandIn()), folder, PlainTickets()
        api = httpx.Client(base_url="https://api.example", transport=self.server.transport())
        self.controllers = ClusterControllers(api)
        self.server.answer, self.acts, self._inside = self._act, True, False

    def _act(self, method: str, path: str) -> None:
        if method == "GET" and path.endswith("/pods") and self.acts and not self._inside:
            self._inside = True
            self.controllers.step()
            self._inside = False

    def adapter(self, **options: str | float) -> KubernetesAdapter:
        return KubernetesAdapter(site_of(**options), self.folder, client_of(self.server), self.tickets, ("true",))

    def objects(self, plural: str) -> list[dict[str, Any]]:
        return [one for ((_, name), *_), one in self.server.objects.items() if name == plural]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.server.kill()


def request(num_ranks: int = 1, num_cards: int = 1, **changes: Any) -> HoldRequest:
    ranks = (RankNeed(node_group="h20", num_cards=num_cards),) * num_ranks
    return HoldRequest(**{"id": uuid.uuid4().hex, "job": "a", "attempt": 1, "ranks": ranks, "lease_s": 60.0} | changes)


@pytest.mark.parametrize("options", [{}, {"workload": "jobset"}, {"workload": "volcano"}, {"queue": "users"}])
def test_a_hold_is_granted_whole_and_released_whole(options: dict[str, str], cluster: Cluster) -> None:
    """With each kind of workload: cards of each rank on one node, and nothing left after the release."""
    adapter, wanted = cluster.adapter(**options), request(2, 3)
    adapter.hold(wanted)
    hold = adapter.hold(wanted)
    assert hold.state == "granted"
    assert {card.split("/")[1] for cards in hold.cards for card in cards} == {"n1", "n2"}
    assert [len(set(cards)) for cards in hold.cards] == [3, 3]
    look = adapter.observe()
    assert (look.holds, look.foreign) == ((hold,), ())
    assert all(one["metadata"]["ownerReferences"] for one in cluster.objects("secrets"))
    assert cluster.adapter(**options).observe().holds == (hold,)
    adapter.release(wanted.id)
    adapter.observe()
    adapter.observe()
    left = {plural: cluster.objects(plural) for plural in ("jobs", "jobsets", "pods", "secrets")}
    assert not any(left.values()), left
    assert adapter.hold(wanted).state == "ended"
    assert len(cluster.tickets.revoked) == 2


def test_a_hold_without_free_cards_asks_for_nothing(cluster: Cluster) -> None:
    """It waits at the agent: no object is made that would take some of the cards."""
    cluster.server.put("", "pods", pod("other", 3, "n1"), "other")
    adapter = cluster.adapter()
    assert adapter.hold(request(2, 4)).state == "waiting"
    assert not cluster.objects("jobs")
    assert adapter.hold(request(1, 4)).state == "granted"


def test_a_try_that_is_overtaken_is_withdrawn(cluster: Cluster) -> None:
    """Another user takes cards between the look and the pods: what was bound goes back, and the next try gets all."""
    adapter, wanted = cluster.adapter(bind_s=0), request(2, 4)
    adapter.observe()
    cluster.acts = False
    cluster.server.put("", "pods", pod("other", 1, "n2"), "other")
    cluster.server.lose_replies(0)
    cluster.acts = True
    assert adapter.hold(wanted).state == "waiting"
    adapter.observe()
    assert not cluster.objects("jobs")
    client_of(cluster.server).delete("/api/v1/namespaces/other/pods/other", grace_s=0)
    for _ in range(3):
        state = cluster.adapter().hold(wanted).state
    assert state == "granted"


@pytest.mark.parametrize("lost", range(1, 4))
def test_lost_replies_make_no_second_object(lost: int, cluster: Cluster) -> None:
    """Each of the requests of a hold is done and its reply lost in turn: asking again meets the same objects."""
    adapter, wanted = cluster.adapter(), request(2, 1)
    adapter.observe()
    cluster.acts = False
    cluster.server.lose_replies(lost)
    for _ in range(lost):
        with pytest.raises(UnavailableError):
            adapter.hold(wanted)
    cluster.acts = True
    other = cluster.adapter()
    hold = other.hold(wanted)
    assert hold.state == "granted"
    assert (len(cluster.objects("jobs")), len(cluster.objects("secrets")), len(cluster.objects("pods"))) == (1, 1, 2)
    assert cluster.objects("secrets")[0]["metadata"]["ownerReferences"]
    cluster.server.lose_replies(1)
    with pytest.raises(UnavailableError):
        other.release(wanted.id)
    adapter.release(wanted.id)
    assert not cluster.objects("jobs")


def test_a_hold_that_loses_a_pod_ends_whole(cluster: Cluster) -> None:
    """Its other pods go as well: never half a hold."""
    adapter, wanted = cluster.adapter(), request(2, 4)
    adapter.hold(wanted)
    assert adapter.hold(wanted).state == "granted"
    cluster.acts = False
    client_of(cluster.server).delete(f"/api/v1/namespaces/{NAMESPACE}/pods/isthmus-{wanted.id}-0-1-0", grace_s=0)
    names = [one["metadata"]["name"] for one in cluster.objects("pods")]
    client_of(cluster.server).delete(f"/api/v1/namespaces/{NAMESPACE}/pods/{names[0]}", grace_s=0)
    assert adapter.observe().holds == ()
    assert adapter.hold(wanted).state == "ended"
    cluster.acts = True
    adapter.observe()
    assert (cluster.objects("jobs"), cluster.objects("pods")) == ([], [])


def test_a_container_that_cannot_start_ends_the_hold_with_its_reason(cluster: Cluster) -> None:
    """A misspelt image is no hold that waits for ever."""
    adapter, wanted = cluster.adapter(), request()
    assert adapter.hold(wanted).state == "granted"
    (one,) = cluster.objects("pods")
    waiting = {"containerStatuses": [{"state": {"waiting": {"reason": "ImagePullBackOff"}}}]}
    one["status"] = {"phase": "Pending", **waiting}
    hold = adapter.hold(wanted)
    assert (hold.state, hold.detail) == ("ended", "ImagePullBackOff")


def test_a_commit_preempts_and_a_hold_does_not(cluster: Cluster) -> None:
    """Victims are pods of lower priority; a hold leaves them alone, and what is seen says which can be preempted."""
    cluster.server.put("", "pods", pod("victim", 4, "n1"), "other")
    cluster.server.put("", "pods", pod("high", 4, "n2", priority=2000), "other")
    options = {"priority": "isthmus", "preempting_priority": "isthmus-preempting"}
    adapter = cluster.adapter(**options)
    wanted = request(1, 4, victims=("k8s-of-another",))
    assert adapter.capabilities.preempts
    assert {job.priority: job.preemptible for job in adapter.observe().foreign} == {0: True, 2000: False}
    assert adapter.hold(wanted).state == "waiting"
    assert len(cluster.objects("pods")) == 2
    for _ in range(5):
        hold = adapter.commit(wanted)
    assert hold.cards == (("h20/n1/0", "h20/n1/1", "h20/n1/2", "h20/n1/3"),)
    assert adapter.commit(wanted) == hold
    with pytest.raises(InputError, match="preempting_priority"):
        cluster.adapter().commit(wanted)


def test_a_missing_right_is_named(cluster: Cluster) -> None:
    """The error has verb and object, and nothing is half done."""
    cluster.server.denied.add(("batch", "jobs", "create"))
    with pytest.raises(AuthError, match="create resource jobs"):
        cluster.adapter().hold(request())
    assert not cluster.objects("jobs")


def test_an_object_of_another_owner_under_our_name_is_refused(cluster: Cluster) -> None:
    """It is neither taken for ours nor deleted by a hold."""
    wanted = request()
    cluster.server.put(
        "batch",
        "jobs",
        {"metadata": {"name": f"isthmus-{wanted.id}-0"}, "spec": {"template": {}, "completions": 0}},
        NAMESPACE,
    )
    with pytest.raises(InputError, match="is not this agent's"):
        cluster.adapter().hold(wanted)


def test_a_pod_that_claims_a_hold_elsewhere_is_a_job_of_others(cluster: Cluster) -> None:
    """Our labels on another user's pod hide it from nobody."""
    adapter, wanted = cluster.adapter(), request()
    adapter.hold(wanted)
    forged = pod("forged", 2, "n2")
    forged["metadata"]["labels"] = {"isthmus.io/hold": wanted.id, "isthmus.io/site": "east"}
    cluster.server.put("", "pods", forged, "other")
    stranger = pod("stranger", 1, "n2", space=NAMESPACE)
    stranger["metadata"]["labels"] = {"isthmus.io/hold": "../..", "isthmus.io/site": "east"}
    cluster.server.put("", "pods", stranger, NAMESPACE)
    look = cluster.adapter().observe()
    assert sum(sum(job.wanted.values()) for job in look.foreign) == 3
    assert [hold.id for hold in look.holds] == [wanted.id]


class RecordingClient(KubernetesClient):
    """Notes what is created."""

    def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.created = [*getattr(self, "created", ()), body]
        return super().create(path, body)


@pytest.mark.parametrize("workload", ["job", "jobset", "volcano"])
def test_what_is_rendered_is_what_is_created(workload: str, cluster: Cluster) -> None:
    """`isthmus render` shows the objects of the first try, but for the id and the tickets."""
    site, wanted = site_of(workload=workload, max_minutes=5), request(2, 3)
    client = RecordingClient(client_of(cluster.server).access, transport=cluster.server.transport())
    KubernetesAdapter(site, cluster.folder, client, cluster.tickets, ("true",)).hold(wanted)
    start = RankStart(folder=Path("{worker_folder}"), cards=("{cards}",), command=("true", "{worker_folder}"))
    part = PartRequest(request=replace(wanted, id=HOLD_ID), ranks=(0, 1), starts=(start, start))
    shown = list(yaml.safe_load_all(render_kubernetes(site, part).text))
    made = json.loads(json.dumps(client.created).replace(wanted.id, HOLD_ID))
    assert [one["kind"] for one in shown] == [one["kind"] for one in made]
    for ours, theirs in zip(shown, made, strict=True):
        if ours["kind"] == "Secret":
            assert ours.pop("data").keys() == theirs.pop("data").keys()
        assert ours == theirs


def test_pods_have_the_rendered_image_for_the_life_of_a_hold(cluster: Cluster) -> None:
    """1. A hold is asked for with an image by digest: its pods have it from the site's registry, with its limits. 2. A
    later request of the same hold changes nothing. 3. A start that needs another image is not made in these pods.
    """
    image = f"train@sha256:{'a' * 64}"
    need = ContainerNeed(image=image, cpu_cores=1.5, memory_bytes=1 << 20)
    adapter, wanted = cluster.adapter(registry="hub.example/pool"), request(1, 1, containers={"h20": need})
    assert adapter.capabilities.images
    adapter.hold(wanted)
    (container,) = cluster.objects("jobs")[0]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"hub.example/pool/{image}"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1", "cpu": "1500m", "memory": str(1 << 20)}
    later = cluster.adapter(registry="hub.example/pool")
    hold = later.hold(replace(wanted, containers={}))
    assert (hold.state, len(cluster.objects("jobs"))) == ("granted", 1)
    folder = cluster.folder / "rank"
    folder.mkdir()
    other = RankStart(folder=folder, cards=hold.cards[0], hold=wanted.id, image="train@sha256:" + "b" * 64)
    with pytest.raises(UnavailableError, match="the pods of the hold have image train@sha256:a"):
        later.start(other)
    assert not (folder / "start.json").exists()
    later.start(replace(other, image=image, command=(sys.executable, "-m", "any"), variables={"A": "b"}))
    ordered = json.loads((folder / "start.json").read_text())
    assert (ordered["program"], ordered["environment"]["A"]) == (["{python}", "-m", "any"], "b")


def test_pods_see_the_files_of_the_sites_claim(cluster: Cluster) -> None:
    """At the folder where the agent's machine has the same, which the adapter declares."""
    adapter = cluster.adapter(storage_claim="data", storage_path="/data")
    adapter.hold(request(1, 1))
    spec = cluster.objects("jobs")[0]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert adapter.capabilities.storage_path == "/data"
    assert {"name": "storage", "mountPath": "/data"} in container["volumeMounts"]
    assert {"name": "storage", "persistentVolumeClaim": {"claimName": "data"}} in spec["volumes"]
    for wrong in ({"storage_claim": "data"}, {"storage_claim": "data", "storage_path": "data"}):
        with pytest.raises(InputError, match=r"names no storage_path|cannot be a folder"):
            cluster.adapter(**wrong)


def test_an_image_without_a_registry_is_refused_before_anything_is_asked_for(cluster: Cluster) -> None:
    """The field of `site.yaml` is named."""
    wanted = request(1, 1, containers={"h20": ContainerNeed(image="train@sha256:" + "a" * 64)})
    with pytest.raises(InputError, match="names no registry"):
        cluster.adapter().hold(wanted)
    assert (cluster.objects("jobs"), cluster.objects("secrets")) == ([], [])


def test_what_a_lost_reply_leaves_of_an_ended_hold_is_deleted_at_a_later_look(cluster: Cluster) -> None:
    """1. A hold is granted. 2. It has ended, and the agent goes before its objects are deleted. 3. No one asks for the
    hold any more: a look of the next agent deletes the rest.
    """
    adapter, wanted = cluster.adapter(), request(2, 3)
    adapter.hold(wanted)
    assert adapter.hold(wanted).state == "granted"
    HoldRecord(cluster.folder / "holds", wanted.id).release()
    assert cluster.objects("secrets")
    cluster.adapter().observe()
    assert (cluster.objects("secrets"), cluster.objects("jobs")) == ([], [])
