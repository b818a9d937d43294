"""The event stream of a real server: its contents, its receivers, where it resumes, and which streams it cuts."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from isthmus.control.rest import event_stream
from isthmus.control.server.connection_limits import ConnectionCaps
from isthmus.control.server.run_server import ServerConfig, ServerInfo, run_server
from isthmus.control.service.change_feed import Change, ChangeFeed
from isthmus.core.messages.agent_messages import ObservedPart, StepMetrics
from tests.control.processes import UNVERIFIED, until
from tests.control.serving import EAST, POOL, WEST, plan_across, report, submission

pytestmark = pytest.mark.integration

Told = tuple[str, int | None, dict[str, object]]


class Streaming:
    """A real server in a thread, with tokens for two users and the owners."""

    def __init__(self, folder: Path, connections: ConnectionCaps | None = None, **more: Any) -> None:
        self.stop, self._ready = threading.Event(), threading.Event()
        config = ServerConfig(state=folder, pool=POOL, connections=connections, **({"port": 0} | more))
        self.thread = threading.Thread(
            target=run_server,
            args=(config, self._announce),
            kwargs={"stop": self.stop, "planner": plan_across},
        )
        self.thread.start()
        assert self._ready.wait(20)
        self.tokens = {"root": (folder / "admin.token").read_text().strip()}
        for role, name in (
            ("user", "ann"),
            ("user", "bob"),
            ("owner", "owner-east"),
            ("owner", "owner-west"),
        ):
            made = self.call("POST", "/v1/tokens", "root", {"role": role, "name": name})
            self.tokens[name] = made.json()["token"]

    def _announce(self, listening: ServerInfo) -> None:
        self.url = listening.url
        self._ready.set()

    def headers(self, who: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.tokens[who]}"}

    def call(self, method: str, path: str, who: str = "ann", body: object = None) -> httpx.Response:
        headers = self.headers(who)
        return httpx.request(method, self.url + path, json=body, headers=headers, timeout=10, verify=UNVERIFIED)

    def submit(self, who: str = "ann", **fields: object) -> str:
        body = submission(**fields).model_dump(mode="json")  # type: ignore[arg-type]
        return str(self.call("POST", "/v1/jobs", who, body).json()["id"])

    @contextmanager
    def events(self, who: str = "ann", after: int | None = None, **query: str) -> Iterator[Iterator[Told]]:
        headers = self.headers(who) | ({} if after is None else {"Last-Event-ID": str(after)})
        with httpx.stream(
            "GET", f"{self.url}/v1/events", params=query, headers=headers, timeout=10, verify=UNVERIFIED
        ) as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            yield _parsed(answer)

    def close(self) -> float:
        begun = time.monotonic()
        self.stop.set()
        self.thread.join(20)
        return time.monotonic() - begun


def _parsed(answer: httpx.Response) -> Iterator[Told]:
    fields: dict[str, str] = {}
    for line in answer.iter_lines():
        if line.startswith(":"):
            continue
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif fields:
            number = int(fields["id"]) if "id" in fields else None
            yield fields["event"], number, json.loads(fields["data"])
            fields = {}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Streaming]:
    server = Streaming(tmp_path)
    yield server
    server.close()


def test_a_follower_hears_of_its_own_jobs_only(server: Streaming) -> None:
    """A user receives the events of their own jobs, an admin those of all; deletions too."""
    with server.events("ann") as ann, server.events("root") as root:
        assert [next(ann)[0], next(root)[0]] == ["hello", "hello"]
        bobs, anns = server.submit("bob"), server.submit("ann")
        assert next(ann)[2]["id"] == anns
        heard = set()
        while heard < {bobs, anns}:
            heard.add(next(root)[2]["id"])
        for who, job in (("bob", bobs), ("ann", anns)):
            server.call("POST", f"/v1/jobs/{job}/cancel", who)
            server.call("DELETE", f"/v1/jobs/{job}", who)
        kinds = []
        while "deleted" not in kinds:
            kind, _, data = next(ann)
            assert data["id"] == anns
            kinds.append(kind)


def test_a_follower_resumes_where_it_was_cut(server: Streaming) -> None:
    """The script: 1. a stream is cut; 2. two jobs change; 3. resumed, it tells of both in order."""
    with server.events() as events:
        _, number, _ = next(events)
    first, second = server.submit(), server.submit()
    server.call("POST", f"/v1/jobs/{first}/cancel")
    with server.events(after=number) as events:
        next(events)
        told = [next(events), next(events)]
    assert {data["id"]: data["state"] for _, _, data in told}[first] == "cancelled"
    assert {data["id"] for _, _, data in told} == {first, second}
    numbers = [number for _, number, _ in told if number is not None]
    assert numbers == sorted(numbers)


def test_one_job_is_told_at_once_and_its_lines_are_announced(server: Streaming) -> None:
    """What `watch` follows: the job as it is, its history, then a word whenever metrics or logs of it have come."""
    for site in (EAST, WEST):
        body = report(site).model_dump(mode="json", by_alias=True)
        server.call("POST", f"/v1/agents/{site.name}/sync", site.owner, body)
    job = server.submit()
    with server.events(job=job) as events:
        assert next(events)[0] == "hello"
        told = []
        while "reserving" not in told:
            kind, _, data = next(events)
            told += [str(data["kind"])] if kind == "history" else []
        assert told == ["submitted", "planned", "waiting", "reserving"]
        line = StepMetrics(job=job, attempt=1, rank=0, step=0, values={"loss": 1.0})
        part = ObservedPart(job=job, attempt=1, state="prepared")
        for site in (WEST, EAST):
            body = report(site, part).model_dump(mode="json", by_alias=True)
            server.call("POST", f"/v1/agents/{site.name}/sync", site.owner, body)
        body = report(EAST, part, metrics=(line,)).model_dump(mode="json", by_alias=True)
        assert server.call("POST", "/v1/agents/east/sync", "owner-east", body).status_code == 200
        while next(events)[0] != "lines":
            pass


def test_who_may_not_see_jobs_has_no_stream(server: Streaming) -> None:
    """Owners are refused; another's job is not found; a number that is none is named."""
    job = server.submit("bob")
    assert server.call("GET", "/v1/events", "owner-east").status_code == 403
    assert server.call("GET", f"/v1/events?job={job}", "ann").status_code == 404
    headers = server.headers("ann") | {"Last-Event-ID": "first"}
    assert httpx.get(f"{server.url}/v1/events", headers=headers).status_code == 422


def test_a_server_that_ends_waits_for_no_stream(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Open streams end with it: none is left that the server has to cancel after its time for an orderly end."""
    server = Streaming(tmp_path)
    with server.events() as events:
        next(events)
        closing = threading.Thread(target=server.close)
        closing.start()
        assert list(events) == []
        closing.join(20)
        assert not closing.is_alive()
    assert "graceful shutdown exceeded" not in caplog.text


def test_a_reader_that_reads_nothing_is_cut_and_delays_nobody(
    server: Streaming, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script: 1. one opens a stream and reads nothing; 2. jobs come; 3. all is answered, it is cut."""
    opened: list[event_stream.OpenStreams] = []
    really_open = event_stream.OpenStreams.open

    def spy(streams: event_stream.OpenStreams, follower: event_stream.EventSubscription) -> event_stream.EventStream:
        opened.append(streams)
        return really_open(streams, follower)

    monkeypatch.setattr(event_stream, "SEND_TIMEOUT_S", 0.3)
    monkeypatch.setattr(event_stream.OpenStreams, "open", spy)
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(("127.0.0.1", httpx.URL(server.url).port))
        request = f"GET /v1/events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.tokens['ann']}\r\n\r\n"
        reader.sendall(request.encode())
        assert reader.recv(10) == b"HTTP/1.1 2"
        wish = submission(output="x" * 50_000 + "{job}").model_dump(mode="json")
        answer = server.call("POST", "/v1/jobs:bulk", body={"submissions": [wish] * 200})
        assert answer.status_code == 200
        until(lambda: opened[0].num_open == 0, "it is cut", 10)


def test_changes_are_told_once_and_newest_first_state_only() -> None:
    """Of a job changed often only the last change is sent; deletions are sent to the user of the job."""
    changes = ChangeFeed()
    for job, user in (("a", "ann"), ("b", "bob")):
        changes.record_submission(job, user)
        changes.record_change(job, 1 if job == "a" else 2)
    changes.record_change("a", 3)
    assert changes.changes_after(0, 10) == [Change(2, "b"), Change(3, "a")]
    assert changes.changes_after(2, 10) == [Change(3, "a")]
    assert changes.changes_after(0, 10, "ann") == [Change(3, "a")]
    changes.record_deletion("a", 4)
    assert changes.changes_after(0, 10, "ann") == [Change(4, "a", deleted=True)]
    assert changes.changes_after(0, 1, "bob") == [Change(2, "b")]
    assert (changes.latest_change("a"), changes.latest_change("z")) == (Change(4, "a", deleted=True), None)


def test_jobs_of_a_snapshot_have_changed_at_its_event() -> None:
    """A subscriber that has seen the snapshot's event gets later changes only; an earlier one gets every job."""
    changes = ChangeFeed()
    changes.restore({"a": "ann", "b": "bob"}, 7)
    changes.record_change("a", 8)
    assert changes.changes_after(7, 10) == [Change(8, "a")]
    assert changes.changes_after(6, 10) == [Change(7, "b"), Change(8, "a")]
    assert changes.changes_after(0, 10, "bob") == [Change(7, "b")]
