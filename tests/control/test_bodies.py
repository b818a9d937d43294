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
        b'{"names": ["a"], "text": "\\ud800"}',
        b'{"names": ["a"]',
        b"[]",
        b"",
        b"\xff",
        b'{"names": ' + b"[" * 100 + b"]" * 100 + b"}",
    ],
)
def test_the_answer_is_that_of_a_plain_route(body: bytes) -> None:
    """Right or wrong, small or large: the route changes what reading costs, and nothing else."""
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
