"""The client: each verb, each way a server can refuse or be away."""

from __future__ import annotations

import inspect

import httpx
import pytest

from isthmus.client.api_client import RETRY_DELAYS_S, ApiClient
from isthmus.core import errors
from isthmus.core.errors import (
    AuthError,
    ConflictError,
    FileError,
    InputError,
    IsthmusError,
    NotFoundError,
    ProtocolError,
    UnavailableError,
)
from isthmus.core.messages.agent_messages import LogChunk
from isthmus.core.model import Model
from isthmus.core.views.api_views import Submission, TokenRequest
from tests.cli.fake_server import TOKEN, URL, FakeServer
from tests.cli.samples import make_job, make_metrics

MODEL = Model(path="m", architecture="LlamaForCausalLM", num_layers=2, hidden_size=8, vocab_size=256, config={"x": 1})


def test_every_verb_returns_what_the_server_holds() -> None:
    """Each method of the client is one verb of the REST interface, and its answer is the server's."""
    server = FakeServer()
    with server.client() as client:
        job = client.submit(Submission(job=make_job(), model=MODEL, key="k"))
        server.add(id=job.id, state="choosing", plan=None)
        server.metrics[job.id] = make_metrics(2, job=job.id)
        server.logs[job.id] = [LogChunk(job=job.id, attempt=1, rank=r, offset=0, text="x\n") for r in (0, 1)]

        assert client.health().version == "9.9"
        assert [one.id for one in client.jobs()] == [job.id]
        assert client.job(job.id).state == "choosing"
        assert [plan.id for plan in client.plans(job.id).plans] == ["p1", "p2"]
        assert client.choose(job.id, "p2").state == "preparing"
        assert client.cancel(job.id).state == "stopping"
        assert len(client.metrics(job.id, after=4).metrics) == 2
        assert [chunk.rank for chunk in client.logs(job.id, rank=1).chunks] == [1]
        assert len(client.pool().clusters) == 3
        assert client.create_token(TokenRequest(role="user", name="bo")).token == "isth_secret"
        server.add(id=job.id, state="cancelled")
        client.delete(job.id)
    assert server.jobs == {}


def test_the_same_key_is_the_same_job() -> None:
    """A submission that is sent twice with one key makes one job."""
    server = FakeServer()
    with server.client() as client:
        first, second = (client.submit(Submission(job=make_job(), model=MODEL, key="k")) for _ in range(2))
    assert first.id == second.id
    assert len(server.jobs) == 1


def simple_errors() -> list[type[IsthmusError]]:
    classes = (one for _, one in inspect.getmembers(errors, inspect.isclass))
    return [one for one in classes if issubclass(one, IsthmusError) and not issubclass(one, FileError)]


def answering(response: httpx.Response) -> ApiClient:
    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/health":
            return httpx.Response(200, json={"protocol": 1, "version": "1"})
        return response

    return ApiClient(URL, TOKEN, transport=httpx.MockTransport(handle), sleep=lambda _: None)


@pytest.mark.parametrize("kind", simple_errors(), ids=lambda kind: kind.__name__)
def test_an_error_crosses_the_wire_as_itself(kind: type[IsthmusError]) -> None:
    """An error body becomes the class it names, with message and hint."""
    body = kind("went wrong", hint="do this").as_dict()
    with answering(httpx.Response(kind.http_status, json=body)) as client, pytest.raises(kind) as caught:
        client.pool()
    assert type(caught.value) is kind
    assert (caught.value.message, caught.value.hint) == ("went wrong", "do this")


def test_a_file_error_of_the_server_keeps_its_message() -> None:
    """A `FileError` arrives as an `InputError` whose message still names the place."""
    body = FileError("unknown chip", file="pool.yaml", line=3).as_dict()
    with answering(httpx.Response(422, json=body)) as client, pytest.raises(InputError, match=r"pool.yaml:3"):
        client.pool()


@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, AuthError), (403, AuthError), (404, NotFoundError), (409, ConflictError), (422, InputError),
     (426, ProtocolError), (500, IsthmusError), (503, UnavailableError)],
)  # fmt: skip
@pytest.mark.parametrize("body", [b"<html>", b'"text"', b'{"error": "NoSuchError", "message": "m"}', b""])
def test_an_answer_without_a_known_error_goes_by_its_status(status: int, kind: type[IsthmusError], body: bytes) -> None:
    """Whatever stands between us and the server, the status decides."""
    with answering(httpx.Response(status, content=body)) as client, pytest.raises(kind) as caught:
        client.pool()
    assert type(caught.value) is kind


def test_a_class_that_is_no_error_of_ours_is_not_instantiated() -> None:
    """The name in an error body chooses among our errors only."""
    body = {"error": "ClassVar", "message": "m"}
    with answering(httpx.Response(404, json=body)) as client, pytest.raises(NotFoundError):
        client.pool()


@pytest.mark.parametrize("outages", range(len(RETRY_DELAYS_S) + 1))
def test_a_server_that_restarts_is_waited_for(outages: int) -> None:
    """As many refused connections as there are delays are survived."""
    server = FakeServer(outages=outages)
    with server.client() as client:
        assert client.pool().clusters


def test_no_server_says_how_to_start_one() -> None:
    """After the last delay the error names the address and `isthmus serve`."""
    server = FakeServer(outages=100)
    with server.client() as client, pytest.raises(UnavailableError, match=f"no server at {URL}") as caught:
        client.pool()
    assert "isthmus serve" in (caught.value.hint or "")


def test_a_delete_that_broke_off_is_not_repeated() -> None:
    """Its repetition would say "no such job" of a job that was deleted."""
    calls: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/health":
            return httpx.Response(200, json={"protocol": 1, "version": "1"})
        calls.append(request.method)
        raise httpx.ReadError("broken")

    with ApiClient(URL, TOKEN, transport=httpx.MockTransport(handle), sleep=lambda _: None) as client:
        with pytest.raises(UnavailableError, match="did not respond"):
            client.delete("j")
        with pytest.raises(UnavailableError):
            client.cancel("j")
    assert calls == ["DELETE", *["POST"] * (len(RETRY_DELAYS_S) + 1)]


def test_another_protocol_is_refused_before_anything_else() -> None:
    """The first call greets the server; one of another version is asked nothing further."""
    server = FakeServer(protocol=99)
    with server.client() as client, pytest.raises(ProtocolError, match="protocol 99"):
        client.pool()
    assert server.seen == ["GET /v1/health"]


def test_an_answer_of_another_shape_is_a_protocol_error() -> None:
    """A server that is not ours is recognised by its answers."""
    with answering(httpx.Response(200, json={"clusters": 3})) as client, pytest.raises(ProtocolError):
        client.pool()


def test_without_a_token_the_hint_says_where_to_put_one() -> None:
    """401 names the ways to give a token."""
    with FakeServer().client(token=None) as client, pytest.raises(AuthError) as caught:
        client.jobs()
    assert "--token-file" in (caught.value.hint or "")


@pytest.mark.parametrize("server", ["http://pool.example", "http://10.0.0.7:8470"])
def test_a_token_never_travels_unencrypted(server: str) -> None:
    """Beyond loopback a token needs https."""
    with pytest.raises(InputError, match="unencrypted"):
        ApiClient(server, TOKEN)


@pytest.mark.parametrize("server", ["pool.example", "ftp://x", "http://", "http://[::1", "https://h:port"])
def test_what_is_no_address_is_said_to_be_none(server: str) -> None:
    """A malformed server address is the user's to mend."""
    with pytest.raises(InputError):
        ApiClient(server, None)
