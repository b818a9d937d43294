"""The stand-in and a real API server keep the rules that the adapter relies on; what only the real one can show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isthmus.agent.adapters.kubernetes.api_access import read_access
from isthmus.agent.adapters.kubernetes.kubernetes_client import KubernetesClient
from isthmus.agent.adapters.kubernetes.manifests import HoldPlan, ticket_secret, workload_path, workloads
from isthmus.core.errors import AuthError, InputError
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.api_stand_in import ApiStandIn
from tests.kubernetes.check_api_server import RULES, SECRETS, BreakableServer, secret
from tests.kubernetes.samples import NAMESPACE, client_of, filled, site_of
from tests.kubernetes.test_manifests import ID, KINDS, TWO_GROUPS, UNITS

Rule = Callable[[KubernetesClient, BreakableServer], None]


def names(rule: Rule) -> str:
    return rule.__name__


@pytest.mark.parametrize("rule", RULES, ids=names)
def test_the_stand_in_keeps_the_rule(rule: Rule) -> None:
    """What unit tests rely on."""
    server = filled(ApiStandIn())
    rule(client_of(server), server)


@pytest.fixture
def admin(api_server: ApiServer) -> KubernetesClient:
    return KubernetesClient(read_access(str(api_server.kubeconfig(admin=True))), timeout_s=20)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=names)
def test_the_real_server_keeps_the_rule(rule: Rule, admin: KubernetesClient, api_server: ApiServer) -> None:
    """The same rules, with etcd behind them."""
    rule(admin, api_server)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_real_server_takes_every_workload_as_it_is(kind: str, admin: KubernetesClient) -> None:
    """Nothing of a custom resource is dropped or refused; of a Job only what came after this server's release."""
    site = site_of(TWO_GROUPS, **KINDS[kind])
    units = UNITS[:1] if kind == "job-in-queue" else UNITS
    plan = HoldPlan(id=ID[:-1] + str(list(KINDS).index(kind)), claim=1, job="train", attempt=2, units=units)
    for body in workloads(site, plan):
        path = workload_path(site, NAMESPACE)
        found = admin.create(path, body)
        assert admin.delete(f"{path}/{body['metadata']['name']}"), "the next test finds all cards free"
        later = {"completionMode", "suspend", "ttlSecondsAfterFinished"} if body["apiVersion"] == "batch/v1" else set()
        assert missing(body["spec"], found["spec"]) <= later
    made = admin.create(SECRETS, ticket_secret(site, plan, 0, [b"a"]))
    assert (made["immutable"], made["data"]) == (True, {"0": "YQ=="})


def missing(sent: Any, kept: Any, place: str = "") -> set[str]:
    """Return the fields of `sent` that `kept` lacks or has otherwise."""
    if isinstance(sent, dict) and isinstance(kept, dict):
        return {one for key, value in sent.items() for one in missing(value, kept.get(key), key)}
    if isinstance(sent, list) and isinstance(kept, list) and len(sent) == len(kept):
        return {one for first, second in zip(sent, kept, strict=True) for one in missing(first, second, place)}
    return set() if sent == kept or (sent in ({}, []) and kept in (None, {}, [])) else {place}


@pytest.mark.slow
def test_the_real_server_refuses_what_a_definition_does_not_allow(admin: KubernetesClient) -> None:
    """A wrong value of a JobSet is an error of the request, by name of the field."""
    site = site_of(TWO_GROUPS, workload="jobset")
    (body,) = workloads(site, HoldPlan(id="f" * 32, claim=1, job="j", attempt=1, units=UNITS))
    body["spec"]["replicatedJobs"][0]["replicas"] = "many"
    with pytest.raises(InputError, match="replicas"):
        admin.create(workload_path(site, NAMESPACE), body)


@pytest.mark.slow
def test_the_agent_may_do_what_its_role_says_and_nothing_else(api_server: ApiServer) -> None:
    """A Secret is written and never read; other namespaces and verbs are refused, with verb and object."""
    agent = KubernetesClient(read_access(str(api_server.kubeconfig())), timeout_s=20)
    agent.create(SECRETS, secret("of-the-agent"))
    for path in (f"{SECRETS}/of-the-agent", "/api/v1/namespaces/kube-system/secrets", "/api/v1/namespaces"):
        with pytest.raises(AuthError, match="403"):
            agent.get(path)
    with pytest.raises(AuthError, match=r"POST .*/default/secrets: 403"):
        agent.create("/api/v1/namespaces/default/secrets", secret("elsewhere"))
    assert agent.delete(f"{SECRETS}/of-the-agent")
    assert agent.get("/api/v1/nodes")["kind"] == "NodeList"


@pytest.mark.slow
def test_a_token_that_the_server_does_not_know_is_an_error_of_rights(api_server: ApiServer, tmp_path: Path) -> None:
    """It names the server and shows no token."""
    file = tmp_path / "other.yaml"
    file.write_text(api_server.kubeconfig().read_text().replace("agent-token", "t0ken-of-none"))
    with pytest.raises(AuthError, match="does not know this agent") as found:
        KubernetesClient(read_access(str(file))).get("/api/v1/nodes")
    assert "t0ken" not in str(found.value)
