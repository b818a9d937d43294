"""A watched list loses no event and acts on none twice, through broken watches, compaction and odd answers."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from isthmus.agent.adapters.kubernetes.kubernetes_client import ExpiredVersionError
from isthmus.agent.adapters.kubernetes.watched_list import ObjectCache, WatchedList, list_objects
from isthmus.core.errors import IsthmusError, UnavailableError
from tests.kubernetes.api_stand_in import ApiStandIn
from tests.kubernetes.samples import client_of, filled, node
from tests.until import until

NODES = "/api/v1/nodes"


def names(item: Any) -> str:
    return item["metadata"]["name"]


def event(kind: str, uid: str, version: str, name: str = "a") -> bytes:
    return json.dumps(
        {"type": kind, "object": {"metadata": {"uid": uid, "resourceVersion": version, "name": name}}}
    ).encode()


def test_events_are_applied_by_id_and_twice_is_once() -> None:
    """An object that is deleted and made again under its name is another one."""
    cache = ObjectCache(names)
    cache.replace([], "1")
    for line in (event("ADDED", "u1", "2"), event("ADDED", "u1", "2"), event("MODIFIED", "u1", "3", "b")):
        cache.apply(line)
    assert (cache.objects, cache.version) == ({"u1": "b"}, "3")
    cache.apply(event("ADDED", "u2", "4", "b"))
    for _ in range(2):
        cache.apply(event("DELETED", "u1", "5"))
    assert cache.objects == {"u2": "b"}
    cache.apply(b'{"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "9"}}}')
    assert (cache.objects, cache.version) == ({"u2": "b"}, "9")


@pytest.mark.parametrize(
    "line",
    [
        b"", b"{", b"[]", b"3", b'{"type": "ADDED"}', b'{"type": "ADDED", "object": 3}',
        b'{"type": "ADDED", "object": {"metadata": {}}}', b'{"type": "ADDED", "object": {"metadata": {"uid": "u"}}}',
        b'{"type": "ADDED", "object": {"metadata": {"uid": 3, "resourceVersion": "2"}}}',
        b'{"type": "RENAMED", "object": {"metadata": {"uid": "u", "resourceVersion": "2"}}}',
        b'{"type": "ERROR", "object": {"code": 500}}', b'{"type": "ERROR", "object": []}', b"[" * 100_000,
    ],
)  # fmt: skip
def test_an_event_that_cannot_be_read_is_an_error(line: bytes) -> None:
    """It is never skipped: what it said would be lost."""
    cache = ObjectCache(names)
    cache.replace([], "1")
    with pytest.raises(UnavailableError):
        cache.apply(line)
    assert (cache.objects, cache.version) == ({}, "1")


def test_a_compacted_version_is_told_from_other_errors() -> None:
    """410 asks for a full list."""
    with pytest.raises(ExpiredVersionError):
        ObjectCache(names).apply(b'{"type": "ERROR", "object": {"code": 410}}')


def test_a_list_is_read_page_by_page_at_one_version() -> None:
    """More objects than a page has are all there."""
    server = ApiStandIn()
    for number in range(1203):
        server.put("", "nodes", node(f"n{number:04d}"))
    items, version = list_objects(client_of(server), NODES, "NodeList")
    assert ([names(item) for item in items], version) == ([f"n{number:04d}" for number in range(1203)], "1303")


@pytest.mark.parametrize(
    "answer",
    [
        b'{"kind": "PodList", "metadata": {"resourceVersion": "1"}, "items": []}',
        b'{"kind": "NodeList", "metadata": {"resourceVersion": "1"}, "items": {}}',
        b'{"kind": "NodeList", "metadata": {}, "items": []}', b'{"kind": "NodeList", "items": []}',
        b'{"kind": "NodeList", "metadata": {"resourceVersion": "1", "continue": "again"}, "items": []}',
    ],
)  # fmt: skip
def test_a_list_of_another_kind_or_without_end_is_an_error(answer: bytes) -> None:
    """It is never taken for an empty one."""
    server = ApiStandIn()
    server.answer = lambda _method, path: answer if path == NODES else None
    with pytest.raises(UnavailableError):
        list_objects(client_of(server), NODES, "NodeList")


def test_events_arrive_between_looks() -> None:
    """What changes after the list comes by the watch."""
    server = filled(ApiStandIn())
    nodes = WatchedList(client_of(server), NODES, "NodeList", names)
    assert sorted(nodes.refresh().values()) == ["n1", "n2"]
    server.put("", "nodes", node("n3"))
    until(lambda: sorted(nodes.refresh().values()) == ["n1", "n2", "n3"])


def test_no_event_is_lost_or_acted_on_twice(whole: bool) -> None:
    """Kills, compactions and changes in random order: the list ends equal to the server's, by versions that only grow.

    Steps: 1. a change; 2. the server dies, its log is compacted, or both; 3. changes while no watch is open; 4. a look
    that may fail; 5. at the end all looks agree with the server.
    """
    rng, server = random.Random(3), filled(ApiStandIn())
    client = client_of(server)
    watched = WatchedList(client, NODES, "NodeList", lambda item: (names(item), item["metadata"]["resourceVersion"]))
    present = ["n1", "n2"]
    for number in range(1000 if whole else 60):
        act = rng.choice(("add", "add", "remove", "kill", "compact", "both"))
        if act == "add":
            present.append(f"m{number}")
            server.put("", "nodes", node(f"m{number}"))
        elif act == "remove" and present:
            client.delete(f"{NODES}/{present.pop(rng.randrange(len(present)))}")
        if act in ("kill", "both"):
            server.kill()
        if act in ("compact", "both"):
            server.put("", "nodes", node(f"c{number}"))
            present.append(f"c{number}")
            server.compact()
        try:
            watched.refresh()
        except IsthmusError:
            assert act in ("kill", "both")
        server.restart()
    until(lambda: sorted(name for name, _ in watched.refresh().values()) == sorted(present))
    wanted = {
        (names(one), one["metadata"]["resourceVersion"])
        for (key, *_), one in server.objects.items()
        if key[1] == "nodes"
    }
    assert set(watched.refresh().values()) == wanted
