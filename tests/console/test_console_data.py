"""What the console reads and does is the REST interface: the same authority, the same answers, nothing beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.control.rest.console.static_files import console_files
from isthmus.control.rest.middleware import PUBLIC_PATHS
from isthmus.core.views.api_views import Submission
from isthmus.core.views.queue_status import QueuePage
from tests.console.browser_like import Browser
from tests.control.conftest import _running_server
from tests.control.serving import EAST, WEST, report
from tests.control.test_server_api import Server

pytestmark = pytest.mark.integration
CALLERS = ("root", "ann", "bob", "owner-east", "owner-west")
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4, "hidden_size": 64, "vocab_size": 300,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 64,
}  # fmt: skip
JOB = """
name: tiny
model: /models/m
data: {paths: [/data/text], tokenizer: bytes}
training: {steps: 2, sequence_length: 8, micro_batch_size: 1, global_batch_size: 2}
checkpoints: {folder: "/checkpoints/{job}"}
output: /results/{job}
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A pool with jobs of two users: one prepared at both sites, one waiting each."""
    with _running_server() as made:
        running = made.prepared()
        price = {"cluster": "east", "node_group": "h20", "per_chip_hour": "2.5"}
        published = made.call("POST", "/v1/tariffs", {"currency": "EUR", "prices": [price]}, token="owner-east")
        assert published.status_code == 201, published.text
        for site in (EAST, WEST):
            made.sync(report(site, free_chips={"h20": 0}))
        for user in ("ann", "bob"):
            waiting = made.submit(user)
            made.until(
                lambda job=waiting, who=user: (
                    made.call("GET", f"/v1/jobs/{job.id}", token=who).json()["state"] == "waiting"
                )
            )
        made.running_id = running.id  # type: ignore[attr-defined]
        yield made


def requested() -> set[str]:
    """Return the paths of all requests in the bundle, the values in them replaced by `{}`."""
    own = {
        name: file for name, file in console_files().items() if name.endswith(".js") and not name.startswith("vendor/")
    }
    found = set()
    for file in own.values():
        for path in re.findall(r"[`\"'](/v1/[^`\"']*)[`\"']", file.content.decode()):
            found.add(
                re.sub(r"\$\{[^}]*\}", "{}", path.partition("?")[0]).rstrip("{}")
                if "${state}" in path
                else re.sub(r"\$\{[^}]*\}", "{}", path.partition("?")[0])
            )
    return found


def test_the_console_asks_documented_requests_alone(server: Server) -> None:
    """Each path in its files is one of the REST interface, which the description lists."""
    known = {re.sub(r"\{[^}]*\}", "{}", path) for path in server.http.get("/openapi.json").json()["paths"]}
    asked = requested()
    assert asked >= {"/v1/session", "/v1/pool", "/v1/queue/page", "/v1/jobs:dry-run", "/v1/audit"}
    for path in asked:
        assert any(_same(path, one) for one in known), path


def _same(asked: str, known: str) -> bool:
    """Return whether two paths agree, segment by segment; a value agrees with any word."""
    pairs = list(zip(asked.split("/"), known.split("/"), strict=False))
    return asked.count("/") == known.count("/") and all("{}" in pair or pair[0] == pair[1] for pair in pairs)


READS = (
    "/v1/session", "/v1/pool", "/v1/jobs", "/v1/jobs?newest_first=true&limit=1", "/v1/queue", "/v1/queue/page",
    "/v1/usage", "/v1/tariffs", "/v1/limits", "/v1/audit", "/v1/invitations", "/v1/ledger/check", "/v1/ledger",
    "/v1/statements/user/ann?month=1970-01", "/v1/statements/owner/owner-east?month=1970-01",
)  # fmt: skip


@pytest.mark.attack
@given(st.sampled_from(CALLERS), st.sampled_from(READS))
def test_a_session_reads_what_its_token_reads_and_nothing_else(server: Server, caller: str, path: str) -> None:
    """The same status and the same body, for every caller and request; that it is a session is all that differs."""
    browser = _browser_of(server, caller)
    by_token, by_session = server.call("GET", path, token=caller), browser.call("GET", path)
    assert by_session.status_code == by_token.status_code
    if path not in ("/v1/session", "/v1/audit"):  # the id of session or token; the audit log grows by what is asked
        assert by_session.json() == by_token.json() or "now_s" in by_token.text


_browsers: dict[tuple[int, str], Browser] = {}


def _browser_of(server: Server, caller: str) -> Browser:
    key = id(server), caller
    if key not in _browsers:
        _browsers[key] = Browser(server)
        assert _browsers[key].sign_in(caller).status_code == 201
    return _browsers[key]


@pytest.mark.attack
def test_what_a_caller_may_not_see_does_not_exist_for_it(server: Server) -> None:
    """A job of another user is not found, whatever is asked of it, as one that there never was."""
    job = server.running_id  # type: ignore[attr-defined]
    bob = _browser_of(server, "bob")
    for path in ("", "/plans", "/queue", "/ranks", "/metrics", "/history", "/logs"):
        found, never = bob.call("GET", f"/v1/jobs/{job}{path}"), bob.call("GET", f"/v1/jobs/no-such-job{path}")
        assert (found.status_code, never.status_code) == (404, 404), path
        assert found.text.replace(job, "X") == never.text.replace("no-such-job", "X"), path
    for path, body in (
        ("choose", {"plan": "p1"}),
        ("cancel", None),
        ("preempt", {"victims": [{"cluster": "east", "job": "x"}]}),
    ):
        assert bob.call("POST", f"/v1/jobs/{job}/{path}", body).status_code == 404, path
    assert bob.call("GET", f"/v1/statements/job/{job}?month=1970-01").status_code == 404
    west = _browser_of(server, "owner-west")
    assert [one["cluster"]["name"] for one in west.call("GET", "/v1/pool").json()["clusters"]] == ["west"]
    assert west.call("POST", "/v1/sites/east/cordon").status_code == 404


def test_a_stranger_gets_no_answer_but_the_files_of_the_console(server: Server) -> None:
    """Every request of the interface, without a session, and with halves that were made up."""
    for path, methods in server.http.get("/openapi.json").json()["paths"].items():
        if path in PUBLIC_PATHS:
            continue
        for method in methods:
            address = re.sub(r"\{[^}]*\}", "x", path)
            answer = server.http.request(method, address)
            assert answer.status_code in (401, 429), (method, path)
            assert "clusters" not in answer.text


def test_a_page_of_the_queue_starts_anywhere_and_knows_the_length(server: Server) -> None:
    """For an admin all jobs with a place, for a user its own, which have the same places."""

    def page(query: str, token: str) -> QueuePage:
        answer = server.call("GET", f"/v1/queue/page?{query}", token=token)
        assert answer.status_code == 200, answer.text
        return QueuePage.model_validate(answer.json())

    every = page("", "root")
    assert [one.place for one in every.jobs] == [1, 2]
    assert every.length == 2
    second = page("start=1&limit=1", "root")
    assert (second.start, second.length, second.jobs[0].id) == (1, 2, every.jobs[1].id)
    mine = page("", "bob")
    assert (mine.length, [one.user for one in mine.jobs]) == (1, ["bob"])
    assert mine.jobs[0].place == every.jobs[1].place == 2
    assert page("start=10", "root").jobs == ()
    for wrong in ("start=-1", "limit=0", "limit=201", "start=x", "start=9223372036854775808"):
        assert server.call("GET", f"/v1/queue/page?{wrong}", token="root").status_code == 422, wrong
    assert server.call("GET", "/v1/queue/page", token="owner-east").status_code == 403


def test_prices_are_listed_to_their_owner_and_to_users(server: Server) -> None:
    """Another owner does not see them."""
    listed = server.call("GET", "/v1/tariffs", token="ann").json()
    assert listed == {
        "currency": "EUR",
        "more": False,
        "prices": [
            {"resource": "east/h20", "job_class": "all", "begins_ms": 1_000_000, "begin_min": 0, "end_min": 1440,
             "price_millionths": 2_500_000}
        ],
    }  # fmt: skip
    assert server.call("GET", "/v1/tariffs", token="owner-east").json() == listed
    assert server.call("GET", "/v1/tariffs", token="owner-west").json()["prices"] == []


def test_limits_are_for_the_operator(server: Server) -> None:
    """With the users that have most of them in use."""
    found = server.call("GET", "/v1/limits", token="root").json()
    assert found["limits"]["live_jobs_per_user"] == 1000
    assert [(one["user"], one["live_jobs"]) for one in found["users"]] == [("ann", 2), ("bob", 1)]
    for other in ("ann", "owner-east"):
        assert server.call("GET", "/v1/limits", token=other).status_code == 403


def read(server: Server, text: str, config: str = "", token: str = "ann") -> tuple[int, dict[str, object]]:
    answer = server.call("POST", "/v1/jobs:read", {"text": text, "config": config}, token=token)
    return answer.status_code, answer.json()


def test_the_text_of_a_job_becomes_its_submission(server: Server) -> None:
    """As the command line reads the file: the same job, and the model from the text of its configuration."""
    status, found = read(server, JOB, json.dumps(CONFIG))
    assert status == 200, found
    submission = Submission.model_validate(found)
    assert submission.job.training.steps == 2
    assert (submission.model.path, submission.model.num_layers) == ("/models/m", 4)
    assert read(server, JOB, json.dumps(CONFIG), token="owner-east")[0] == 403


@pytest.mark.attack
@pytest.mark.parametrize(
    ("text", "config", "says"),
    [
        (JOB.replace("steps: 2", "steps: two"), "{}", "job.yaml:5"),
        (JOB.replace("/models/m", "m"), "{}", "which the server does not know"),
        (JOB.replace("/models/m", "~/m"), "{}", "which the server does not know"),
        (JOB.replace("/models/m", "Qwen/Qwen3-8B"), "{}", "which the server does not know"),
        (JOB.replace("/models/m", "hf://Qwen/Qwen3-8B"), "{}", "which the server does not know"),
        (JOB + "stack: /etc/passwd.yaml", "{}", "unknown stack"),
        (JOB.replace("tokenizer: bytes", "tokenizer: bytes, chat_template: /etc/passwd"), "{}", "read where the job"),
        (JOB, "", "paste or upload the config.json"),
        (JOB, "[]", "JSON object"),
        (JOB, "{", "not JSON"),
        ("a: &a [*a]", "{}", "refers to itself"),
        ("a: !!python/object/apply:os.system [id]", "{}", "has the tag"),
        ("", "{}", "contains no fields"),
    ],
)
def test_a_text_is_refused_with_its_line_and_reads_no_file_of_the_server(
    server: Server, text: str, config: str, says: str
) -> None:
    """What would be read on the user's machine, a path in its folder, a name of the Hub, is refused by its field."""
    status, found = read(server, text, config)
    assert status in (400, 422), found
    assert says in json.dumps(found), found
    assert "root:" not in json.dumps(found)
