"""The REST interface over the real coordinator: each endpoint, and each way a request can be wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from fastapi.testclient import TestClient

from isthmus.control.queries.quotas import Quotas
from isthmus.control.rest.body_limit import MAX_BODY_BYTES
from isthmus.control.rest.create_app import create_app
from isthmus.control.service.auth import token_digest
from isthmus.control.service.control_service import ControlService
from isthmus.control.service.planner_queue import Planner
from isthmus.control.state.events import AgentReported, Event, JobCancelled
from isthmus.control.store.store_interface import MemoryStore, StoredToken
from isthmus.core.errors import IsthmusError
from isthmus.core.messages.agent_messages import (
    PROTOCOL_VERSION,
    AgentOrders,
    AgentReport,
    LogChunk,
    ObservedPart,
    StepMetrics,
)
from isthmus.core.pool import Cluster, Pool
from isthmus.core.views.api_views import JobFilter, JobView
from tests.control.driver import Driver
from tests.control.serving import EAST, POOL, WEST, cluster, job, plan_across, report, submission

pytestmark = pytest.mark.integration


class Server:
    """The application in this process, with a token for each role; `now_s` is its clock."""

    def __init__(self, quotas: Quotas | None = None, pool: Pool | None = POOL) -> None:
        self.now_s = 1000.0
        self.store = MemoryStore()
        for role, name in (("admin", "root"), ("user", "ann"), ("user", "bob"), ("owner", "owner-east")):
            self.add_token(role, name)
        self.add_token("owner", "owner-west")
        self.planner: Planner = plan_across
        self.shell = ControlService(
            self.store,
            pool,
            planner=lambda request: self.planner(request),
            clock=lambda: self.now_s,
            quotas=quotas,
        )
        self.http = TestClient(create_app(self.shell), raise_server_exceptions=False)

    def add_token(self, role: str, name: str) -> None:
        self.store.put_token(StoredToken(role=role, name=name, digest=token_digest(name), created_s=0))

    def call(self, method: str, path: str, body: object = None, token: str | None = "ann", **more: object):  # type: ignore[no-untyped-def]
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        data = body.model_dump(mode="json", by_alias=True) if hasattr(body, "model_dump") else body
        return self.http.request(method, path, json=data, headers=headers, **more)  # type: ignore[arg-type]

    def sync(self, what: AgentReport, token: str | None = None) -> AgentOrders:
        path = f"/v1/agents/{what.cluster.name}/sync"
        answer = self.call("POST", path, what, token=token or what.cluster.owner)
        assert answer.status_code == 200, answer.text
        return AgentOrders.model_validate(answer.json())

    def submit(self, token: str = "ann", **fields: object) -> JobView:
        answer = self.call("POST", "/v1/jobs", submission(**fields), token=token)  # type: ignore[arg-type]
        assert answer.status_code == 201, answer.text
        return JobView.model_validate(answer.json())

    def job(self, job_id: str) -> JobView:
        return JobView.model_validate(self.call("GET", f"/v1/jobs/{job_id}").json())

    def until(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not happened():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def prepared(self, **fields: object) -> JobView:
        """A job whose parts are ordered at both sites."""
        for site in (EAST, WEST):
            self.sync(report(site))
        found = self.submit("ann", **fields)
        self.until(lambda: self.job(found.id).state == "preparing")
        return self.job(found.id)

    def committed(self, **fields: object) -> JobView:
        """A job that both sites are ordered to run."""
        found = self.prepared(**fields)
        for site in (EAST, WEST, EAST):
            self.sync(report(site, ObservedPart(job=found.id, attempt=1, state="prepared")))
        return self.job(found.id)


def test_health_is_open_and_states_the_protocol(server: Server) -> None:
    """Anyone may ask whether the server answers and what it speaks."""
    answer = server.call("GET", "/v1/health", token=None)
    assert answer.status_code == 200
    assert answer.json()["protocol"] == PROTOCOL_VERSION


def test_a_job_is_planned_prepared_and_shown_with_its_parts(server: Server) -> None:
    """The way of a job as its user sees it, up to the orders at both sites."""
    found = server.prepared()
    assert [(part.cluster, part.desired) for part in found.parts] == [
        ("east", "prepared"),
        ("west", "prepared"),
    ]
    orders = server.sync(report(EAST))
    assert [(part.job, part.attempt, part.desired) for part in orders.parts] == [(found.id, 1, "prepared")]
    listed = server.call("GET", "/v1/jobs").json()
    assert [(one["id"], one["plans"]) for one in listed] == [(found.id, None)], "a list carries no plans"
    assert server.call("GET", f"/v1/jobs?limit=1&after={found.id}").json() == []
    assert server.call("GET", "/v1/jobs?after=nobody").status_code == 404
    plans = server.call("GET", f"/v1/jobs/{found.id}/plans").json()
    assert [plan["id"] for plan in plans["plans"]] == ["p1", "p2"]


def test_both_sites_are_told_to_run_only_once_both_are_prepared(server: Server) -> None:
    """All or none, through the real interface."""
    found = server.prepared()
    prepared = ObservedPart(job=found.id, attempt=1, state="prepared")
    assert server.sync(report(EAST, prepared)).parts[0].desired == "prepared"
    assert server.sync(report(WEST, prepared)).parts[0].desired == "running"
    assert server.sync(report(EAST, prepared)).parts[0].desired == "running"


def test_the_user_chooses_a_plan_that_exists(server: Server) -> None:
    """A manual job waits for its user; an unknown plan is not found."""
    for site in (EAST, WEST):
        server.sync(report(site))
    found = server.submit(policy="manual")
    server.until(lambda: server.job(found.id).state == "choosing")
    wrong = server.call("POST", f"/v1/jobs/{found.id}/choose", {"plan": "p9"})
    assert (wrong.status_code, wrong.json()["error"]) == (404, "NotFoundError")
    right = server.call("POST", f"/v1/jobs/{found.id}/choose", {"plan": "p2"})
    assert right.json()["plan"]["id"] == "p2"


def test_the_same_key_is_the_same_job(server: Server) -> None:
    """A submission repeated after a lost answer makes no second job; another job under its key conflicts."""
    first, again = server.submit(key="k"), server.submit(key="k")
    assert first.id == again.id
    other = server.call("POST", "/v1/jobs", submission(key="k", name="other"))
    assert (other.status_code, other.json()["error"]) == (409, "ConflictError")
    assert server.submit(token="bob", key="k").id != first.id, "a key is its user's own"


def test_many_jobs_are_submitted_at_once_each_for_itself(server: Server) -> None:
    """One refused leaves the others alone; answers come in order; the same keys again: the same jobs."""
    wishes = [submission(key="a"), submission(key="b"), submission(placement={"clusters": ["eats"]})]
    body = {"submissions": [wish.model_dump(mode="json") for wish in [*wishes, submission(key="a", name="x")]]}
    answer = server.call("POST", "/v1/jobs:bulk", body)
    assert answer.status_code == 200, answer.text
    first, second, typo, conflict = answer.json()
    assert (typo["error"]["error"], conflict["error"]["error"]) == ("InputError", "ConflictError")
    assert [one["id"] for one in server.call("GET", "/v1/jobs").json()] == [first["id"], second["id"]]
    assert server.call("POST", "/v1/jobs:bulk", body).json() == answer.json()


def test_a_field_of_a_newer_client_is_named_with_the_servers_version(server: Server) -> None:
    """A client that sends what this version does not know gets the field and the version in the error."""
    body = submission().model_dump(mode="json")
    body["job"]["teleport"] = True
    answer = server.call("POST", "/v1/jobs", body)
    assert answer.status_code == 422
    assert "body.job.teleport" in answer.json()["message"]
    assert f"protocol {PROTOCOL_VERSION}" in answer.json()["message"]


def test_only_an_ended_job_is_deleted_and_then_its_lines_are_gone(server: Server) -> None:
    """DELETE before the end conflicts; afterwards nothing of the job is left."""
    found = server.submit()
    assert server.call("DELETE", f"/v1/jobs/{found.id}").status_code == 409
    assert server.call("POST", f"/v1/jobs/{found.id}/cancel").json()["state"] == "cancelled"
    assert server.call("DELETE", f"/v1/jobs/{found.id}").status_code == 204
    assert server.call("GET", f"/v1/jobs/{found.id}").status_code == 404


def line(job_id: str, step: int, rank: int = 0) -> StepMetrics:
    return StepMetrics(job=job_id, attempt=1, rank=rank, step=step, values={"loss": 1.0})


def chunk(job_id: str, offset: int, text: str, rank: int = 0) -> LogChunk:
    return LogChunk(job=job_id, attempt=1, rank=rank, offset=offset, text=text)


def test_lines_are_stored_once_and_read_by_cursor(server: Server) -> None:
    """A report sent twice stores its lines once; a page says where the next one starts."""
    found = server.committed()
    part = ObservedPart(job=found.id, attempt=1, state="prepared")
    lines = (line(found.id, 0), line(found.id, 1))
    for _ in range(2):
        server.sync(report(EAST, part, metrics=lines, logs=(chunk(found.id, 0, "one\n"),)))
        server.sync(report(WEST, part, logs=(chunk(found.id, 0, "zero\n", rank=1),)))
    server.sync(report(EAST, part, logs=(chunk(found.id, 0, "one\ntwo\n"),)))
    page = server.call("GET", f"/v1/jobs/{found.id}/metrics?limit=1").json()
    rest = server.call("GET", f"/v1/jobs/{found.id}/metrics?after={page['next']}").json()
    assert [one["step"] for one in page["metrics"] + rest["metrics"]] == [0, 1]
    logs = server.call("GET", f"/v1/jobs/{found.id}/logs?rank=0").json()
    assert "".join(one["text"] for one in logs["chunks"]) == "one\ntwo\n"
    assert {one["cluster"] for one in logs["chunks"]} == {"east"}


def test_a_site_writes_only_into_jobs_that_run_there(server: Server) -> None:
    """Lines of an unknown job, or of one that has no part there, are dropped and not stored for others."""
    server.sync(report(cluster("east")))
    found = server.submit()
    server.sync(report(EAST, metrics=(line(found.id, 0), line("nobody", 0))))
    assert server.call("GET", f"/v1/jobs/{found.id}/metrics").json()["metrics"] == []


def test_lines_that_come_after_a_job_was_deleted_are_not_kept(server: Server) -> None:
    """The script: 1. two sites have a part; 2. cancelled, released, deleted; 3. one sends its last lines."""
    found = server.prepared()
    for site in (EAST, WEST):
        server.sync(report(site))
    server.call("POST", f"/v1/jobs/{found.id}/cancel")
    for site in (EAST, WEST):
        server.sync(report(site, parts=(ObservedPart(job=found.id, attempt=1, state="released"),)))
    assert server.call("DELETE", f"/v1/jobs/{found.id}").status_code == 204
    server.sync(report(EAST, metrics=(line(found.id, 0),), logs=(chunk(found.id, 0, "one\n"),)))
    assert server.store.metrics(found.id, after=0, limit=9).metrics == ()
    assert server.store.logs(found.id, after=0, rank=None, limit=9).chunks == ()


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("POST", "/v1/jobs", {"job": {}}, 422, "body."),
        ("POST", "/v1/jobs", ["not an object"], 422, "body"),
        ("GET", "/v1/jobs/x/metrics?limit=0", None, 422, "limit"),
        ("GET", "/v1/jobs/x", None, 404, "x"),
        ("POST", "/v1/jobs/x/cancel", None, 404, "x"),
        ("GET", "/v1/nothing", None, 404, "/v1/nothing"),
        ("PUT", "/v1/jobs", None, 405, "Not Allowed"),
    ],
)
def test_every_error_is_one_shape(
    server: Server, method: str, path: str, body: object, status: int, words: str
) -> None:
    """Whatever its source, an error is `error`, `message`, `hint`, and names what was wrong."""
    answer = server.call(method, path, body)
    assert answer.status_code == status
    assert set(answer.json()) >= {"error", "message", "hint"}
    assert words in answer.json()["message"]


def test_jobs_are_filtered_and_paged_latest_first(server: Server) -> None:
    """Filters combine; pages follow `Isthmus-Next-Job`; another user's jobs are an error, not an empty list."""
    ids = [server.submit(name=name).id for name in ("a", "b", "a", "c")]

    def listed(query: str, **options: str) -> tuple[list[str], str | None]:
        answer = server.call("GET", f"/v1/jobs?{query}", **options)
        assert answer.status_code == 200, answer.text
        return [one["id"] for one in answer.json()], answer.headers.get("Isthmus-Next-Job")

    assert listed("") == (ids, None)
    assert listed("newest_first=true&limit=3") == (ids[:0:-1], ids[1])
    assert listed(f"newest_first=true&limit=3&after={ids[1]}") == ([ids[0]], None)
    assert listed("name=a&newest_first=true") == ([ids[2], ids[0]], None)
    assert listed("state=succeeded&state=failed") == ([], None)
    assert listed("owner=nowhere") == ([], None)
    assert listed("since_s=1e12") == ([], None)
    assert listed("since_s=0&limit=1&name=a") == ([ids[0]], ids[0])
    other = server.call("GET", "/v1/jobs?user=somebody")
    assert (other.status_code, other.json()["error"]) == (403, "AuthError")


def test_a_filtered_page_examines_a_bounded_number_of_jobs() -> None:
    """A filter that nothing meets returns an empty page and where to go on, and the pages cover every job once."""
    pool = Driver("a")
    for number in range(30):
        pool.submit(f"j{number}")
    asked, pages, after = pool.coordinator, 0, None
    found: list[str] = []
    while pages == 0 or after is not None:
        page, after = asked.find_jobs(
            None, JobFilter(name="j7"), after=after, limit=100, newest_first=True, max_examined=10
        )
        found += [one.id for one in page]
        pages += 1
    assert (pages, found) == (3, ["j7"])


def test_jobs_of_an_owner_are_those_at_its_clusters(server: Server) -> None:
    """A job with a plan at east and west belongs to both owners' lists, and to no other."""
    found = server.prepared()
    for owner, expected in (("owner-east", [found.id]), ("owner-west", [found.id]), ("owner-north", [])):
        assert [one["id"] for one in server.call("GET", f"/v1/jobs?owner={owner}").json()] == expected


@pytest.mark.parametrize(
    "query",
    ["state=runing", "name=" + "a" * 64, "name=../x", "since_s=nan", "since_s=-1", "since_s=inf", "owner=a%20b",
     "&".join(["state=running"] * 200), "newest_first=maybe"],
)  # fmt: skip
def test_a_malformed_filter_is_refused(server: Server, query: str) -> None:
    """Every filter is validated and bounded before jobs are read."""
    assert server.call("GET", f"/v1/jobs?{query}").status_code == 422


def test_a_bug_in_the_server_is_not_shown_as_the_users_mistake(server: Server) -> None:
    """An unexpected exception is status 500 without its inner words."""
    server.shell.jobs = lambda *_, **__: 1 / 0  # type: ignore[assignment,return-value]
    answer = server.call("GET", "/v1/jobs")
    assert (answer.status_code, answer.json()["error"]) == (500, "IsthmusError")
    assert "zero" not in answer.text


@pytest.mark.parametrize("size", ["claimed", "sent"])
def test_a_body_that_is_too_large_is_refused_before_it_is_read(server: Server, size: str) -> None:
    """A length that is claimed, or sent without a claim, above the limit is answered with 413."""
    data = b"x" * (MAX_BODY_BYTES + 1)
    content = data if size == "claimed" else iter([data[:1000], data])
    answer = server.http.post("/v1/jobs", content=content, headers={"Authorization": "Bearer ann"})
    assert (answer.status_code, answer.json()["error"]) == (413, "InputError")


@pytest.mark.parametrize("extra", [{}, {"a_field_of_the_future": 1}])
def test_another_protocol_is_refused_by_its_number(server: Server, extra: dict[str, int]) -> None:
    """426 whether or not the rest of the message can be understood."""
    body = report().model_dump(mode="json") | {"protocol": 99} | extra
    answer = server.call("POST", "/v1/agents/east/sync", body, token="owner-east")
    assert (answer.status_code, answer.json()["error"]) == (426, "ProtocolError")
    assert "99" in answer.json()["message"]


@pytest.mark.parametrize(
    "wrong", [cluster("east").model_copy(update={"node_groups": cluster("east").node_groups[:0]}), "chip"]
)
def test_a_cluster_that_cannot_be_is_refused(server: Server, wrong: Cluster | str) -> None:
    """No node group, or an unknown chip: 422 with the reason, and the pool stays as it was."""
    body = report().model_dump(mode="json")
    if wrong == "chip":
        body["cluster"]["node_groups"][0]["chip"] = "H2O"
    else:
        body["cluster"]["node_groups"] = []
    answer = server.call("POST", "/v1/agents/east/sync", body, token="owner-east")
    assert answer.status_code == 422
    assert server.call("GET", "/v1/pool").json()["clusters"] == []


def test_of_two_agents_of_one_cluster_the_later_one_speaks(server: Server) -> None:
    """The script: 1. agent one reports; 2. agent two reports, and again; 3. one gets the error, and two goes on."""
    server.sync(report(EAST, incarnation="one"))
    first = server.call("POST", "/v1/agents/east/sync", report(EAST, incarnation="two"), token="owner-east")
    assert first.status_code == 503
    server.sync(report(EAST, incarnation="two"))
    answer = server.call("POST", "/v1/agents/east/sync", report(EAST, incarnation="one"), token="owner-east")
    assert (answer.status_code, answer.json()["error"]) == (409, "ConflictError")
    server.sync(report(EAST, incarnation="two"))


def test_a_planner_that_breaks_ends_the_job_with_the_reason(server: Server) -> None:
    """A planner's own error, or a bug in it, is the job's reason and not the server's end."""
    for site in (EAST, WEST):
        server.sync(report(site))
    server.planner = lambda *_: 1 / 0  # type: ignore[assignment]
    found = server.submit()
    server.until(lambda: server.job(found.id).state == "failed")
    assert "the planner failed" in server.job(found.id).reason


def test_a_site_that_falls_silent_is_no_longer_connected(server: Server) -> None:
    """Time alone is an event: without a report the site is not offered to the planner."""
    server.sync(report(EAST))
    assert server.call("GET", "/v1/pool").json()["clusters"][0]["connected"]
    server.now_s += 60
    server.shell.tick()
    assert not server.call("GET", "/v1/pool").json()["clusters"][0]["connected"]


def test_a_new_life_of_the_server_knows_every_job(server: Server) -> None:
    """What was answered is found again by a server that opens the same store; unfinished planning resumes."""
    found = server.prepared()
    with_clock = ControlService(server.store, POOL, planner=plan_across, clock=lambda: server.now_s)
    with_clock.start()
    assert with_clock.job(found.id) == server.job(found.id)
    with_clock.close()


def test_openapi_names_every_body_and_every_error(server: Server) -> None:
    """The interface describes itself: each operation has an answer model, and 401 except health."""
    document = server.call("GET", "/openapi.json", token=None).json()
    operations = [(path, op) for path, item in document["paths"].items() for op in item.values()]
    for path, operation in operations:
        assert operation["description"], path
        assert ("401" in operation["responses"]) == (path != "/v1/health")
    assert {"JobView", "AgentOrders", "PoolView", "ErrorBody"} <= set(document["components"]["schemas"])


def test_job_names_stay_within_a_name(server: Server) -> None:
    """A job id is its name, cut, and something unique: always a valid name itself."""
    found = server.submit(name="n" * 63)
    assert found.id.startswith("n" * 30 + "-")
    assert len(found.id) == 63
    assert job("n" * 63).name != found.id


def test_a_typo_in_the_placement_is_refused_at_once(server: Server) -> None:
    """422 with the nearest name; nothing is stored."""
    wish = submission(placement={"clusters": ["eats"]})
    answer = server.call("POST", "/v1/jobs", wish, token="ann")
    assert (answer.status_code, answer.json()["hint"]) == (422, "did you mean 'east'?")
    assert server.call("GET", "/v1/jobs", token="ann").json() == []


@pytest.mark.parametrize("query", ["after=9223372036854775808", "rank=9223372036854775808", "limit=0", "after=-1"])
def test_no_number_breaks_the_store(server: Server, query: str) -> None:
    """What no store can hold is refused as the caller's mistake."""
    found = server.submit()
    answer = server.call("GET", f"/v1/jobs/{found.id}/logs?{query}", token="ann")
    assert answer.status_code == 422


def test_a_log_that_does_not_replay_is_named_by_its_event() -> None:
    """A server that cannot rebuild its state says at which event, instead of starting with another state."""
    store = MemoryStore()
    store.append([JobCancelled(now_s=1, job_id="ghost")])
    with pytest.raises(IsthmusError, match="event 1 of the log, 'job-cancelled', cannot be replayed"):
        ControlService(store, POOL, planner=plan_across)


class Shared(MemoryStore):
    """A log to which another server appends a site's report between this one's first two looks at it."""

    shared = True
    looks = 0

    def events(self, after: int = 0) -> Iterator[tuple[int, Event]]:
        self.looks += 1
        if self.looks == 2:
            self.append([AgentReported.from_report(report(EAST), 1000.0)])
        return super().events(after)


def test_what_others_append_while_a_server_starts_is_part_of_what_it_begins_with() -> None:
    """The script: 1. a folds the log; 2. b takes in a site's report; 3. a looks whose agents are known."""
    started = ControlService(Shared(), POOL, planner=plan_across)
    assert [view.cluster.name for view in started.pool().clusters] == ["east"]
    assert started.agents.sync(report(EAST)).parts == ()
