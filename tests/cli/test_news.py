"""Waiting for news of a job: by the event stream while there is one, by the clock otherwise."""

from __future__ import annotations

from collections.abc import Iterator

import httpx

from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.client.api_client import ApiClient
from isthmus.client.job_events import POLLS_UNTIL_RETRY, JobEvents
from isthmus.core.errors import NotFoundError

HELLO = "event: hello\nid: 5\ndata: {}\n\n"
CHANGED = "event: job\nid: 7\ndata: {}\n\n"


class Broken(httpx.SyncByteStream):
    """A stream that breaks after its text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __iter__(self) -> Iterator[bytes]:
        yield self.text.encode()
        raise httpx.ReadError("connection reset")


class Streams:
    """A server whose event streams are, one after the other, `answers`; then it has no such endpoint."""

    def __init__(self, *answers: str | httpx.SyncByteStream) -> None:
        self.answers, self.asked_after = list(answers), list[str | None]()
        self.slept_s, self.notes = list[float](), list[str]()
        self.now_s = 100.0

    def handle(self, request: httpx.Request) -> httpx.Response:
        self.asked_after.append(request.headers.get("last-event-id"))
        if not self.answers:
            return httpx.Response(404, json=NotFoundError("no such page").as_dict())
        answer = self.answers.pop(0)
        if isinstance(answer, str):
            return httpx.Response(200, text=answer, headers={"Content-Type": "text/event-stream"})
        return httpx.Response(200, stream=answer, headers={"Content-Type": "text/event-stream"})

    def news(self) -> JobEvents:
        transport = httpx.MockTransport(self.handle)
        shell = CliEnvironment(sleep=self.slept_s.append, now=lambda: self.now_s)
        client = ApiClient("http://127.0.0.1:1", "t", transport=transport, sleep=lambda _: None)
        return JobEvents(shell, client, "j", 1.0, self.notes.append)


def test_an_event_ends_the_waiting_and_looks_stay_apart() -> None:
    """A change is news; what is left of the interval is still waited for."""
    server = Streams(HELLO + CHANGED)
    with server.news() as news:
        news.wait()
    assert (server.slept_s, server.notes, server.asked_after) == ([1.0], [], [None])


def test_a_cut_stream_is_said_once_and_resumed_later() -> None:
    """The script: 1. the stream breaks; 2. looks go by the clock; 3. it is resumed after the last event."""
    server = Streams(Broken(HELLO + CHANGED), HELLO + CHANGED)
    with server.news() as news:
        for _ in range(2 + POLLS_UNTIL_RETRY):
            news.wait()
        assert len(server.notes) == 1
        assert "broke" in server.notes[0]
        assert "polling every 1 s" in server.notes[0]
        assert server.asked_after == [None]
        news.wait()
    assert server.asked_after == [None, "7"]
    assert server.slept_s == [1.0] * (3 + POLLS_UNTIL_RETRY)


def test_a_server_that_ends_its_stream_is_looked_at_by_the_clock() -> None:
    """A stream that is over is said like one that was cut."""
    server = Streams(HELLO)
    with server.news() as news:
        news.wait()
    assert "the server closed the event stream" in server.notes[0]


def test_a_server_without_streams_is_looked_at_quietly() -> None:
    """An older server: by the clock, asked for a stream once, and no word about it."""
    server = Streams()
    with server.news() as news:
        news.wait()
        news.wait()
    assert (server.slept_s, server.notes, server.asked_after) == ([1.0, 1.0], [], [None])


def test_a_gateway_that_answers_something_else_is_looked_at_by_the_clock() -> None:
    """A page in place of the stream counts as no stream just now."""
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text="<html>"))
    slept: list[float] = []
    shell = CliEnvironment(sleep=slept.append, now=lambda: 0.0)
    with JobEvents(shell, ApiClient("http://127.0.0.1:1", transport=transport), "j", 2.0, lambda _: None) as news:
        news.wait()
    assert slept == [2.0]
