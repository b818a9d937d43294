"""What is sent to an API server passes the published schemas, strictly: of each release and kind of workload."""

from __future__ import annotations

import base64
import copy
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from isthmus.agent.adapters.kubernetes.manifests import (
    TICKETS,
    HoldPlan,
    HoldUnit,
    owned_by,
    ticket_secret,
    workload_names,
    workload_path,
    workloads,
)
from isthmus.core.errors import InputError
from isthmus.core.pool import Cluster, NodeGroup
from tests.kubernetes.samples import site_of

pytestmark = pytest.mark.integration

RELEASES = [f"1.{minor}" for minor in range(25, 38)]
ID = "0123456789abcdef" * 2
TWO_GROUPS = Cluster(
    name="east",
    owner="o",
    node_groups=(
        NodeGroup(name="h20", chip="H20", nodes=2, chips_per_node=4, cpus_per_node=64, memory_bytes_per_node=2**39),
        NodeGroup(name="a100", chip="A100", nodes=1, chips_per_node=8),
    ),
)
UNITS = (
    HoldUnit(node_group="h20", num_cards=2, ranks=(0, 1, 3), nodes=("n1", "n2")),
    HoldUnit(node_group="a100", num_cards=8, ranks=(2,)),
)
PLAN = HoldPlan(id=ID, claim=3, job="train", attempt=2, units=UNITS)
KINDS: dict[str, dict[str, str | float]] = {
    "job": {}, "job-with-files": {"storage_claim": "data", "storage_path": "/data"},
    "job-in-queue": {"queue": "users"}, "jobset": {"workload": "jobset"},
    "jobset-in-queue": {"workload": "jobset", "queue": "users", "priority": "low"},
    "volcano": {"workload": "volcano", "queue": "q", "priority": "low", "max_minutes": 60},
}  # fmt: skip


def bodies_of(kind: str) -> list[dict[str, Any]]:
    units = UNITS[:1] if kind == "job-in-queue" else UNITS
    return list(workloads(site_of(TWO_GROUPS, **KINDS[kind]), HoldPlan(**{**vars(PLAN), "units": units})))


def jobs_in(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the Jobs, or the pods, that a workload has inside, as objects of the API."""
    if body["apiVersion"] == "batch/v1":
        return [body]
    if body["kind"] == "JobSet":
        inner = [one["template"] for one in body["spec"]["replicatedJobs"]]
        return [{"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **one} for one in inner]
    pods = [copy.deepcopy(task["template"]) for task in body["spec"]["tasks"]]
    return [{"apiVersion": "v1", "kind": "Pod", **pod} for pod in pods]


@pytest.mark.parametrize("kind", KINDS)
def test_every_object_passes_the_strict_schemas_of_all_releases(kind: str) -> None:
    """Jobs, Secrets and the pods inside: no unknown field, no value of another type."""
    site = site_of(TWO_GROUPS, **KINDS[kind])
    secret = ticket_secret(site, PLAN, 0, [b"one", b"two", b"three"])
    for release in RELEASES:
        for body in bodies_of(kind):
            for one in jobs_in(body):
                kubernetes_validate.validate(one, release, strict=True)
        kubernetes_validate.validate(secret, release, strict=True)


def test_the_schemas_find_what_they_should() -> None:
    """A check that cannot fail proves nothing."""
    (body, *_) = bodies_of("job")
    body["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"] = ["x"]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(body, "1.30", strict=True)
    (body,) = bodies_of("jobset")
    body["spec"]["suspended"] = True
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(body, definition("jobsets.jobset.x-k8s.io"))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("jobset", "jobsets.jobset.x-k8s.io"), ("jobset-in-queue", "jobsets.jobset.x-k8s.io"),
        ("volcano", "jobs.batch.volcano.sh"),
    ],
)  # fmt: skip
def test_custom_resources_pass_their_definitions(kind: str, name: str) -> None:
    """Every field of ours is one of the definition."""
    for body in bodies_of(kind):
        jsonschema.validate(body, definition(name))


def definition(name: str) -> dict[str, Any]:
    """Return the schema of a definition, strict where it names fields."""
    documents = yaml.safe_load_all((Path(__file__).parent / "crds.yaml").read_text())
    found = next(one for one in documents if one["metadata"]["name"] == name)
    schema = found["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return strict(schema)


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    found = {
        key: strict(value) if isinstance(value, dict) and key == "items" else value for key, value in schema.items()
    }
    if "properties" in schema:
        found["properties"] = {name: strict(one) for name, one in schema["properties"].items()}
        found["additionalProperties"] = False
    return found


def test_a_hold_is_named_by_its_id_everywhere() -> None:
    """So the API server refuses a second one, and every object is found by its label."""
    for kind in KINDS:
        site = site_of(TWO_GROUPS, **KINDS[kind])
        bodies = bodies_of(kind)
        names = workload_names(site, ID, len(UNITS) if kind != "job-in-queue" else 1)
        assert tuple(one["metadata"]["name"] for one in bodies) == names
        assert all(ID in name and len(name) <= 63 for name in names)
        assert all(one["metadata"]["labels"]["isthmus.io/hold"] == ID for one in bodies)
        assert ID in workload_path(site, "ns") + names[0]


def test_kueue_admits_what_is_suspended() -> None:
    """With a queue a Job or JobSet is created suspended, with the queue and the priority as labels."""
    (job,), (jobset,) = bodies_of("job-in-queue"), bodies_of("jobset-in-queue")
    for body in (job, jobset):
        assert body["spec"]["suspend"] is True
        assert body["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "users"
    assert jobset["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == "low"
    assert "priorityClassName" not in jobs_in(jobset)[0]["spec"]["template"]["spec"]
    with pytest.raises(InputError, match=r"options\.workload: jobset"):
        workloads(site_of(TWO_GROUPS, queue="users"), PLAN)


def test_volcano_starts_all_or_none() -> None:
    """The gang is every pod; one that fails or is evicted ends the job."""
    (body,) = bodies_of("volcano")
    assert body["spec"]["minAvailable"] == 4
    assert {(one["event"], one["action"]) for one in body["spec"]["policies"]} == {
        ("PodFailed", "TerminateJob"), ("PodEvicted", "TerminateJob")
    }  # fmt: skip
    assert body["spec"]["queue"] == "q"


def test_pods_have_their_share_and_no_rights() -> None:
    """Cards, cores and memory of the node group; no token of the API server, no privilege, a ticket as a file."""
    first, second = (one["spec"]["template"]["spec"] for one in bodies_of("job"))
    limits = first["containers"][0]["resources"]["limits"]
    assert limits == {"nvidia.com/gpu": "2", "cpu": "32", "memory": str(2**38)}
    assert second["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert first["nodeSelector"] == {"example.com/chip": "h20"}
    (wish,) = first["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert wish["preference"]["matchExpressions"][0]["values"] == ["n1", "n2"]
    assert "affinity" not in second
    for spec in (first, second):
        assert spec["automountServiceAccountToken"] is False
        (container,) = spec["containers"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert "env" not in container
        assert f"{TICKETS}/$(JOB_COMPLETION_INDEX)" in container["command"]


def test_tickets_are_in_the_secret_alone() -> None:
    """Neither a workload nor a label has anything of them; the Secret goes with its workload."""
    site = site_of(TWO_GROUPS)
    secret = ticket_secret(site, PLAN, 0, [b"s3cret-a", b"s3cret-b"])
    assert [base64.b64decode(secret["data"][key]) for key in ("0", "1")] == [b"s3cret-a", b"s3cret-b"]
    bodies = workloads(site, PLAN)
    assert "s3cret" not in str(bodies)
    named = bodies[0]["spec"]["template"]["spec"]["volumes"][0]["secret"]["secretName"]
    assert named == secret["metadata"]["name"]
    (owner,) = owned_by({**bodies[0], "metadata": {**bodies[0]["metadata"], "uid": "u-1"}})["metadata"][
        "ownerReferences"
    ]
    assert owner == {"apiVersion": "batch/v1", "kind": "Job", "name": bodies[0]["metadata"]["name"], "uid": "u-1"}
