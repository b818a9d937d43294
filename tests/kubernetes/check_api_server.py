"""`check_api_server`: what the adapter relies on, for the stand-in and for a real API server alike."""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Protocol

import httpx
import pytest

from isthmus.agent.adapters.kubernetes.kubernetes_client import ExpiredVersionError, KubernetesClient
from isthmus.agent.adapters.kubernetes.watched_list import list_objects
from isthmus.core.errors import ConflictError, InputError, NotFoundError, UnavailableError

SECRETS = "/api/v1/namespaces/isthmus/secrets"


class BreakableServer(Protocol):
    """An API server that a test breaks."""

    def kill(self) -> None:
        """End it at once."""

    def restart(self) -> None:
        """Start it from what was kept."""

    def compact(self) -> None:
        """Let it forget old versions."""


def secret(name: str, label: str = "", data: bytes = b"x") -> dict[str, Any]:
    """Return an object to play with."""
    return {
        "apiVersion": "v1", "kind": "Secret", "type": "Opaque",
        "metadata": {"name": name, **({"labels": {"group": label}} if label else {})},
        "data": {"0": base64.b64encode(data).decode()},
    }  # fmt: skip


def check_api_server(client: KubernetesClient, server: BreakableServer) -> None:
    """Check every rule of this module."""
    for rule in RULES:
        rule(client, server)


def a_name_is_taken_once(client: KubernetesClient, _server: BreakableServer) -> None:
    """A second object of a name is refused; deleted, the name is free and the id another."""
    name = _name()
    first = client.create(SECRETS, secret(name))
    with pytest.raises(ConflictError):
        client.create(SECRETS, secret(name))
    assert client.delete(f"{SECRETS}/{name}")
    assert not client.delete(f"{SECRETS}/{name}")
    with pytest.raises(NotFoundError):
        client.get(f"{SECRETS}/{name}")
    assert client.create(SECRETS, secret(name))["metadata"]["uid"] != first["metadata"]["uid"]


def a_patch_is_merged(client: KubernetesClient, _server: BreakableServer) -> None:
    """It keeps what it does not name, and changes the version."""
    name = _name()
    before = client.create(SECRETS, secret(name, "g"))
    owner = {"apiVersion": "v1", "kind": "Secret", "name": "other", "uid": str(uuid.uuid4())}
    after = client.patch(f"{SECRETS}/{name}", {"metadata": {"ownerReferences": [owner]}})
    assert (after["data"], after["metadata"]["labels"]) == (before["data"], before["metadata"]["labels"])
    assert after["metadata"]["ownerReferences"][0]["uid"] == owner["uid"]
    assert after["metadata"]["resourceVersion"] != before["metadata"]["resourceVersion"]


def lists_are_by_label_and_page(client: KubernetesClient, _server: BreakableServer) -> None:
    """Pages together are the list."""
    label = _name()
    names = sorted(f"{label}-{number}" for number in range(7))
    for name in names:
        client.create(SECRETS, secret(name, label))
    items, _ = list_objects(client, SECRETS, "SecretList", labelSelector=f"group={label}")
    assert sorted(item["metadata"]["name"] for item in items) == names
    found, more = list[str](), ""
    for _ in range(10):
        page = {"limit": 3, "labelSelector": f"group={label}", **({"continue": more} if more else {})}
        answer = client.get(SECRETS, **page)
        found += [item["metadata"]["name"] for item in answer["items"]]
        more = answer["metadata"].get("continue", "")
        if not more:
            break
    assert sorted(found) == names


def a_watch_has_every_event_in_order(client: KubernetesClient, server: BreakableServer) -> None:
    """From the version of a list on, also through the death of the server: none is missing and none comes twice."""
    label = _name()
    _, version = list_objects(client, SECRETS, "SecretList")
    client.create(SECRETS, secret(f"{label}-a", label))
    client.patch(f"{SECRETS}/{label}-a", {"metadata": {"annotations": {"n": "1"}}})
    with client.watch(SECRETS, version, 20) as (lines, _cut):
        first = list(islice(_events(lines, label), 2))
    server.kill()
    with pytest.raises(UnavailableError):
        client.get(SECRETS)
    server.restart()
    client.create(SECRETS, secret(f"{label}-b", label))
    client.delete(f"{SECRETS}/{label}-a")
    with client.watch(SECRETS, first[-1][2], 20) as (lines, _cut):
        second = list(islice(_events(lines, label), 2))
    found = [(kind, name.removeprefix(label)) for kind, name, _ in (*first, *second)]
    assert found == [("ADDED", "-a"), ("MODIFIED", "-a"), ("ADDED", "-b"), ("DELETED", "-a")]


def a_compacted_version_is_gone(client: KubernetesClient, server: BreakableServer) -> None:
    """A watch or a page of a version that was forgotten says 410, and a list answers."""
    for number in range(3):
        client.create(SECRETS, secret(_name(), f"x{number}"))
    page = client.get(SECRETS, limit=2)
    version = page["metadata"]["resourceVersion"]
    client.create(SECRETS, secret(_name()))
    server.kill()
    server.compact()
    server.restart()
    with pytest.raises(ExpiredVersionError):
        client.get(SECRETS, **{"limit": 2, "continue": page["metadata"]["continue"]})
    assert _first_code(client, version) == httpx.codes.GONE
    assert list_objects(client, SECRETS, "SecretList")[0]


def what_is_not_served_is_not_found(client: KubernetesClient, _server: BreakableServer) -> None:
    """An unknown collection is 404, and the version of the server is known."""
    with pytest.raises(NotFoundError):
        client.get("/apis/nothing.example/v1/things")
    assert client.get_version() >= (1, 20)


def a_name_that_cannot_be_is_refused(client: KubernetesClient, _server: BreakableServer) -> None:
    """It is an error of the request, not one to repeat."""
    with pytest.raises(InputError):
        client.create(SECRETS, secret("Not A Name"))


RULES: tuple[Callable[[KubernetesClient, BreakableServer], None], ...] = (
    a_name_is_taken_once, a_patch_is_merged, lists_are_by_label_and_page, a_watch_has_every_event_in_order,
    a_compacted_version_is_gone, what_is_not_served_is_not_found, a_name_that_cannot_be_is_refused,
)  # fmt: skip


def _name() -> str:
    return f"kit-{uuid.uuid4().hex[:12]}"


def _events(lines: Iterator[bytes], label: str) -> Iterator[tuple[str, str, str]]:
    for line in lines:
        found = json.loads(line)
        metadata = found["object"].get("metadata", {})
        if (metadata.get("labels") or {}).get("group") == label:
            yield found["type"], metadata["name"], metadata["resourceVersion"]


def _first_code(client: KubernetesClient, version: str) -> object:
    """Return the code with which a watch from `version` ends, as its status or as its first event."""
    try:
        with client.watch(SECRETS, version, 5) as (lines, _cut):
            return json.loads(next(lines))["object"].get("code")
    except ExpiredVersionError:
        return httpx.codes.GONE
