"""A body is read once from its bytes, and what is wrong with one is said as FastAPI says it."""

from __future__ import annotations

import json
from typing import Annotated

import pytest
from fastapi import APIRouter, FastAPI
from fastapi.testclient import TestClient
from pydantic import Field

from isthmus.control.rest.json_route import THREAD_PARSE_BYTES, JsonRoute
from isthmus.core.base_model import FrozenModel, Name
from isthmus.core.job import Job
from isthmus.core.job_parts.command_job import NO_FILE
from tests.control.samples import submission
from tests.control.test_server_api import Server


class Names(FrozenModel):
    """Names, and as much text as one likes."""

    names: Annotated[tuple[Name, ...], Field(max_length=3)]
    text: str = ""


def client(router: APIRouter) -> TestClient:
    @router.post("/names")
    def count(names: Names) -> int:
        return len(names.names)

    app = FastAPI()
    app.include_router(router)
    return TestClient(app)


@pytest.mark.parametrize(
    "body",
    [
        b'{"names": ["a", "b"]}',
        b'{"names": ["a"], "text": "%s"}' % (b"x" * THREAD_PARSE_BYTES),
        b'{"names": ["a", "-"]}',
        b'{"names": ["a", "b", "c", "d"]}',
        b'{"names": ["a"]',
        b"[]",
        b"",
        b"\xff",
        b'{"names": ' + b"[" * 100 + b"]" * 100 + b"}",
    ],
)
def test_the_answer_is_that_of_a_plain_route(body: bytes) -> None:
    """Right or wrong, small or large: the route changes what reading costs, and beside halves of surrogates nothing."""
    headers = {"Content-Type": "application/json"}
    ours, plain = client(APIRouter(route_class=JsonRoute)), client(APIRouter())
    answers = [each.post("/names", content=body, headers=headers) for each in (ours, plain)]
    assert answers[0].status_code == answers[1].status_code
    assert answers[0].content == answers[1].content


def test_the_document_describes_the_body() -> None:
    """The interface's own document is that of a plain route."""
    documents = [
        client(router).get("/openapi.json").json() for router in (APIRouter(route_class=JsonRoute), APIRouter())
    ]
    assert json.dumps(documents[0]) == json.dumps(documents[1])


@pytest.mark.parametrize(("more", "status"), [({}, 200), ({"command": {"arguments": ["x"]}}, 422)])
def test_a_command_job_that_is_written_by_hand_needs_no_fields_that_it_does_not_use(
    more: dict[str, object], status: int
) -> None:
    """Parsed from its bytes it lacks them; then it is read as a file of a user is."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/job")
    def name(job: Job) -> str:
        return f"{job.name} {job.model}"

    app = FastAPI()
    app.include_router(router)
    command = {"arguments": ["x"], "ranks": {"a": 1}}
    written = {"name": "c", "engine": "command", "command": command} | more
    answer = TestClient(app).post("/job", json=written)
    assert answer.status_code == status
    assert status != 200 or answer.json() == f"c {NO_FILE}"


@pytest.mark.parametrize(
    "config",
    ['{"\\ud800": null}', '{"a": "\\udfff"}', '{"a": ["\\ud800"]}', '{"a": "\ud800"}', '{"a": {"b": "\udc00x"}}'],
)
@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/jobs:dry-run", "/v1/jobs:bulk"])
def test_half_of_a_surrogate_pair_is_refused(path: str, config: str) -> None:
    """As an escape or in the bytes: a model's configuration has any fields, and no log could hold such a text."""
    server = Server()
    wanted = json.loads(submission().model_dump_json())
    wanted["model"]["config"] = "CONFIG"
    body = json.dumps({"submissions": [wanted]} if path.endswith("bulk") else wanted).replace('"CONFIG"', config)
    headers = {"Authorization": "Bearer ann", "Content-Type": "application/json"}
    with server.http:
        answer = server.http.post(path, content=body.encode("utf-8", "surrogatepass"), headers=headers)
    assert (answer.status_code, "surrogate" in answer.text) == (422, True)


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        ('{"a": Infinity}', True),
        ('{"a": [1, -Infinity]}', True),
        ('{"NaN": NaN}', True),
        ('{"Infinity": "NaN"}', False),
    ],
)
def test_a_number_that_json_does_not_have_is_refused(config: str, refused: bool) -> None:
    """A model's configuration has any fields, and the identity of a run could not keep such a number."""
    server = Server()
    wanted = json.loads(submission().model_dump_json())
    wanted["model"]["config"] = "CONFIG"
    body = json.dumps(wanted).replace('"CONFIG"', config)
    headers = {"Authorization": "Bearer ann", "Content-Type": "application/json"}
    with server.http:
        answer = server.http.post("/v1/jobs:dry-run", content=body, headers=headers)
    assert ((answer.status_code, "no number of JSON" in answer.text) == (422, True)) is refused
