"""Strangers and users attack the server's port: silent and slow connections, floods, hogs, malformed requests."""

from __future__ import annotations

import json
import logging
import resource
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

import httpx
import psutil
import pytest

from isthmus.cli.environment.bounded_log import MAX_MESSAGE_CHARS, BoundedLog
from isthmus.control.rest.event_stream import MAX_STREAMS_PER_CALLER
from isthmus.control.server.connection_limits import (
    BODY_GRACE_S,
    HEAD_LIMIT_S,
    ConnectionCaps,
    ConnectionLimits,
    address_key,
    caps_within,
)
from isthmus.control.server.run_server import ServerConfig
from isthmus.control.service.access.login_backoff import FREE_FAILURES, MAX_ADDRESSES, MAX_DELAY_S, LoginBackoff
from isthmus.control.store.store_interface import AuditFilter
from tests.control.processes import serve, until
from tests.control.test_server_process import served
from tests.control.test_stream import Streaming
from tests.forks import FORKS

pytestmark = pytest.mark.attack

CAPS = ConnectionCaps(in_all=8, unproven=4, per_address=3, per_caller=2)


def test_a_newcomer_takes_the_place_of_the_oldest_unproven_connection_of_its_address() -> None:
    """Silent connections of one address push each other out, never a proven one or one of another address."""
    limits = ConnectionLimits(CAPS)
    proven, _ = limits.open("10.0.0.1", 0)
    assert proven is not None
    assert limits.prove(proven, "user ann")
    limits.open("10.0.0.2", 0)
    silent = [limits.open("10.0.0.1", at)[0] for at in (1, 2, 3)]
    made, victim = limits.open("10.0.0.1", 4)
    assert made is not None
    assert victim is silent[0]
    assert limits.num_open == 5


def test_many_addresses_push_out_the_oldest_of_all() -> None:
    """Beyond the limit in all a newcomer still comes in, whatever addresses the attacker has."""
    limits = ConnectionLimits(CAPS)
    first, _ = limits.open("10.0.0.1", 0)
    for i in range(2, 5):
        limits.open(f"10.0.0.{i}", i)
    made, victim = limits.open("10.0.0.9", 9)
    assert made is not None
    assert victim is first


def test_a_caller_has_a_bounded_number_of_connections_and_leaves_room_for_others() -> None:
    """Proven connections are limited by caller, and in all below the total, so that newcomers find a place."""
    limits = ConnectionLimits(CAPS)
    made = [limits.open("10.0.0.1", 0)[0] for _ in range(3)]
    assert all(one is not None for one in made)
    assert [limits.prove(one, "user ann") for one in made if one] == [True, True, False]
    for i in range(4):
        one, _ = limits.open(f"10.0.1.{i}", 1)
        assert one is not None
        assert limits.prove(one, f"user u{i}")
    last, _ = limits.open("10.0.2.1", 2)
    assert last is not None
    assert not limits.prove(last, "user late")
    assert limits.open("10.0.3.1", 3)[0] is not None


def test_a_dribbled_head_or_body_does_not_move_its_deadline() -> None:
    """Slowloris: the deadline of a head is absolute; that of a body grows with its bytes, not with its pieces."""
    limits = ConnectionLimits(CAPS)
    made, _ = limits.open("10.0.0.1", 0)
    assert made is not None
    for now_s in (1, 5, 9):
        made.on_head_awaited(now_s)
    assert limits.overdue(HEAD_LIMIT_S - 0.1) == []
    assert limits.overdue(HEAD_LIMIT_S) == [made]
    made.on_request_complete()
    assert limits.overdue(1e9) == []
    for now_s in range(20):
        made.on_body_awaited(100 + now_s, 1)
    assert limits.overdue(100 + BODY_GRACE_S - 0.1) == []
    assert limits.overdue(100 + BODY_GRACE_S + 1) == [made]


def test_overdue_connections_are_named_a_few_at_a_time() -> None:
    """Thousands of connections that run out together are closed in small shares."""
    limits = ConnectionLimits(CAPS)
    made = [limits.open(f"10.0.0.{i}", 0)[0] for i in range(3)]
    first = limits.overdue(HEAD_LIMIT_S, 2)
    assert len(first) == 2
    for one in first:
        limits.close(one)
    assert set(limits.overdue(HEAD_LIMIT_S, 2)) == set(made) - set(first)


def test_addresses_of_one_network_count_as_one() -> None:
    """A host has 2^64 IPv6 addresses; an IPv4 address in IPv6 form is the same address."""
    assert address_key("2001:db8::1") == address_key("2001:db8::ffff:1") != address_key("2001:db8:0:1::1")
    assert address_key("::ffff:10.0.0.1") == address_key("10.0.0.1")


@pytest.mark.parametrize("max_files", [64, 256, 1024, 20_000, 65_536])
def test_connections_stay_below_the_limit_of_files(max_files: int) -> None:
    """Files for the store and the log are kept free, however low the limit is."""
    caps = caps_within(max_files)
    assert caps.in_all <= max_files * 3 // 4
    assert caps.per_address <= caps.unproven < caps.in_all


def test_failures_of_an_address_limit_it_with_a_growing_delay() -> None:
    """Ten are free; then the delay grows to its limit, and time makes it free again."""
    backoff = LoginBackoff()
    delays = [backoff.record_failure("10.0.0.1", 0.0) for _ in range(100)]
    assert set(delays[: int(FREE_FAILURES) - 1]) == {0.0}
    assert delays[10:] == sorted(delays[10:])
    assert delays[-1] == MAX_DELAY_S
    assert not backoff.is_limited("10.0.0.2", 0.0)
    assert not backoff.is_limited("10.0.0.1", 1e5)


def test_failures_from_many_addresses_are_limited_together_and_in_bounded_memory() -> None:
    """A botnet has an address for each guess: all of them share a budget."""
    backoff = LoginBackoff()
    for i in range(MAX_ADDRESSES + 500):
        backoff.record_failure(f"a{i}", 0.0)
    assert backoff.is_limited("new", 0.0)
    by_address, num_unlisted = backoff.take_report()
    assert (len(by_address), num_unlisted) == (MAX_ADDRESSES, 500)


def test_a_repeated_warning_is_left_out_and_counted() -> None:
    """A storm of one line takes a few lines; the next one says how many were left out; long messages are cut."""
    now_s = [0.0]
    bounded = BoundedLog(lambda: now_s[0])

    def log(text: str, *values: object) -> str | None:
        record = logging.LogRecord("x", logging.WARNING, "f", 1, text, values, None)
        return record.getMessage() if bounded.filter(record) else None

    written = [log("accept failed: %s", i) for i in range(100_000)]
    assert sum(one is not None for one in written) <= 20
    now_s[0] = 60.0
    assert "repeated 99980 times" in (log("accept failed: %s", "again") or "")
    assert len(log("%s", "x" * 100_000) or "") < MAX_MESSAGE_CHARS + 50


def test_storms_of_many_kinds_share_a_budget() -> None:
    """Text that the attacker varies does not get around the limit."""
    bounded = BoundedLog(lambda: 0.0)
    records = [logging.LogRecord("x", logging.ERROR, "f", 1, f"kind {i}", (), None) for i in range(5000)]
    assert sum(bounded.filter(record) for record in records) <= 300


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Streaming]:
    server = Streaming(tmp_path)
    yield server
    server.close()


def connect(server: Streaming, source: str = "127.0.0.1") -> socket.socket:
    made = socket.create_connection(("127.0.0.1", httpx.URL(server.url).port), 10, (source, 0))
    made.settimeout(10)
    return made


def answer_to(server: Streaming, *pieces: bytes, source: str = "127.0.0.1") -> bytes:
    """Send raw bytes and read until the server closes, or 1 s nothing comes."""
    with connect(server, source) as made:
        for piece in pieces:
            made.sendall(piece)
        made.settimeout(1)
        found = b""
        try:
            while data := made.recv(65536):
                found += data
        except (TimeoutError, ConnectionResetError):
            pass
        return found


def head(server: Streaming, path: str = "/v1/jobs", who: str = "ann", more: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.tokens[who]}\r\n{more}\r\n".encode()


def test_silent_connections_hold_up_no_one(server: Streaming) -> None:
    """The script: 1. a stranger opens 400 connections and sends nothing or half a head; 2. users are answered."""
    with ExitStack() as stack:
        for i in range(400):
            made = stack.enter_context(connect(server, f"127.0.0.{2 + i % 4}"))
            if i % 2:
                made.sendall(b"GET /v1/jobs HTTP/1.1\r\nHost:")
        for _ in range(5):
            assert server.call("GET", "/v1/jobs").status_code == 200


@pytest.fixture
def hasty_server(tmp_path: Path) -> Iterator[Streaming]:
    """A server with short time limits."""
    caps = replace(caps_within(1024), head_limit_s=0.3, body_grace_s=0.3)
    server = Streaming(tmp_path, caps)
    yield server
    server.close()


def accepts_more(made: socket.socket) -> bool:
    """Send another byte; return whether the connection is still open."""
    try:
        made.sendall(b"a")
    except OSError:
        return False
    return True


def test_a_slow_head_and_a_slow_body_are_cut(hasty_server: Streaming) -> None:
    """Bytes that dribble in keep no connection open, neither before a token nor after a refusal."""
    server = hasty_server
    refused = b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
    for start in (b"GET / HTTP/1.1\r\nX: ", b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\nGET /v1", refused):
        with connect(server) as made:
            made.sendall(start)
            until(lambda: not accepts_more(made), "the connection is cut", 8)


def test_a_flood_of_bad_tokens_is_refused_and_a_good_one_from_there_works(server: Streaming) -> None:
    """After ten failures an address gets 429 with a delay; a valid token from it works, and the log has two lines."""
    bad = b"GET /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer nothing\r\n\r\n"
    answers = [answer_to(server, bad.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")) for _ in range(30)]
    statuses = [int(answer.split(b" ")[1]) for answer in answers]
    assert statuses[:9] == [401] * 9
    assert statuses[12:] == [429] * 18
    assert b"retry-after:" in answers[-1].lower()
    split = answer_to(server, bad[:20], bad[20:])
    assert split.startswith(b"HTTP/1.1 429")
    assert server.call("GET", "/v1/jobs").status_code == 200
    assert httpx.get(server.url + "/v1/health").status_code == 200


def test_a_good_token_among_bad_ones_that_arrive_together_is_served(server: Streaming) -> None:
    """Each new connection of a limited address is judged by what it has sent, also where many are accepted at once."""
    bad = b"GET /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer nothing\r\nConnection: close\r\n\r\n"
    good = head(server, more="Connection: close\r\n")
    for _ in range(20):
        answer_to(server, bad)
    sent = [good if i % 10 == 5 else bad if i % 3 else b"" for i in range(60)]
    with ExitStack() as stack:
        made = [stack.enter_context(connect(server)) for _ in sent]
        for one, request in zip(made, sent, strict=True):
            one.sendall(request)
        answers = [one.recv(65536) for one, request in zip(made, sent, strict=True) if request]
    expected = [b"HTTP/1.1 200" if request is good else b"HTTP/1.1 429" for request in sent if request]
    assert [answer[:12] for answer in answers] == expected


def test_failed_logins_are_in_the_audit_log_by_address(server: Streaming) -> None:
    """Aggregated: one record for an address, without the tokens that were sent."""
    for _ in range(5):
        guess = b"GET /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer s3cret-guess\r\nConnection: close\r\n\r\n"
        answer_to(server, guess, source="127.0.0.7")
    pages: list[httpx.Response] = []

    def failures() -> list[dict[str, object]]:
        pages.append(server.call("GET", "/v1/audit", "root"))
        return [one for one in pages[-1].json()["records"] if one["action"] == "login-failed"]

    until(failures, "the failures are reported")
    assert failures()[0]["address"] == "127.0.0.7"
    assert "s3cret-guess" not in pages[-1].text


def test_one_user_cannot_take_all_event_streams(server: Streaming) -> None:
    """Beyond its share a user is refused with 429, and another user still gets a stream."""
    with ExitStack() as stack:
        streams = [stack.enter_context(server.events("ann")) for _ in range(MAX_STREAMS_PER_CALLER)]
        assert {next(stream)[0] for stream in streams} == {"hello"}
        assert server.call("GET", "/v1/events", "ann").status_code == 429
        assert next(stack.enter_context(server.events("bob")))[0] == "hello"
    assert server.call("GET", "/v1/jobs", "ann").status_code == 200


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ("Content-Length: 0\r\nContent-Length: 5\r\n", b"400"),
        ("Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", b"400"),
        ("Transfer-Encoding: chunked, identity\r\n", b"501"),
        ("Content-Length: -5\r\n", b"400"),
        ("Authorization: Bearer other\r\n", b"400"),
        ("Host: y\r\n", b"400"),
        ("X-Big: " + "a" * 20_000 + "\r\n", b"431"),
        ("Bad Header: 1\r\n", b"400"),
    ],
)
def test_a_request_that_two_readers_may_read_differently_is_refused(
    server: Streaming, more: str, status: bytes
) -> None:
    """Request smuggling and oversized heads: refused, the connection closed, and what follows is not served."""
    smuggled = head(server, "/v1/jobs")
    answer = answer_to(server, head(server, more=more) + b"0\r\n\r\n" + smuggled)
    assert answer.split(b" ")[1] in (status, b"400")
    assert answer.count(b"HTTP/1.1 ") == 1, "nothing that follows is answered"


def test_headers_do_not_change_the_address_that_counts(server: Streaming) -> None:
    """`X-Forwarded-For` names another address for each guess: the limit holds, and no record has that address."""
    statuses = []
    for i in range(20):
        request = f"GET /v1/jobs HTTP/1.1\r\nHost: evil\r\nX-Forwarded-For: 9.9.9.{i}\r\nForwarded: for=9.9.9.9\r\n"
        statuses.append(answer_to(server, f"{request}Connection: close\r\n\r\n".encode()).split(b" ")[1])
    assert statuses[-1] == b"429"
    assert "9.9.9" not in server.call("GET", "/v1/audit", "root").text


def test_no_page_of_the_server_names_a_foreign_host_or_runs_a_script(server: Streaming) -> None:
    """The description of the interface is one page of its own; every answer forbids frames, scripts and guessing."""
    page = httpx.get(server.url + "/docs")
    assert page.status_code == 200
    assert "/v1/jobs/{job_id}/cancel" in page.text
    assert "http://" not in page.text
    assert "https://" not in page.text
    assert "<script" not in page.text
    for answer in (page, httpx.get(server.url + "/v1/jobs"), httpx.get(server.url + "/openapi.json")):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_words_of_strangers_make_no_line_in_log_or_audit(server: Streaming, caplog: pytest.LogCaptureFixture) -> None:
    """Control characters, escapes and direction marks of a path or token reach neither raw."""
    with caplog.at_level(logging.DEBUG):
        answer_to(server, b"GET /v1/%0aERROR%1b[31m%E2%80%AE HTTP/1.1\r\nHost: x\r\n\r\n")
        answer_to(server, head(server, "/v1/jobs/%0aroot:%20forged%1b%5b2J", "owner-east"))
        page = server.call("GET", "/v1/audit", "root")
    text = page.text + caplog.text
    assert not any(char in json.dumps(page.json(), ensure_ascii=False) for char in "\n\x1b\u202e")
    assert "\nERROR\x1b" not in text
    assert "\nroot: forged" not in text


def serve_with_log(state: Path) -> None:
    """Be a server that writes its log to `<state>/log`."""
    state.mkdir(mode=0o700)
    logging.basicConfig(filename=state / "log")
    serve(state, 0, ("", 0))


def unused_files(pid: int) -> tuple[int, int]:
    """Return the lowest file number that a process does not use, and the one after the highest that it uses."""
    used = {int(one.name) for one in Path(f"/proc/{pid}/fd").iterdir()}
    return next(number for number in count() if number not in used), max(used) + 1


@pytest.mark.slow
def test_a_server_without_free_files_pauses_and_goes_on(tmp_path: Path) -> None:
    """The script: 1. accept fails for lack of files; 2. the oldest silent ones are closed; 3. users are answered.

    The server has a process of its own, so that its limit is no limit of the test's process. The silent connections
    leave no number below theirs unused: under a limit at such a number, closing them all would free none.
    """
    state = tmp_path / "s"
    process = FORKS.Process(target=serve_with_log, args=(state,))
    process.start()
    try:
        until((state / "url").exists, "the server listens")
        url, pid = httpx.URL((state / "url").read_text()), process.pid or 0
        authorization = {"Authorization": f"Bearer {(state / 'admin.token').read_text().strip()}"}
        assert httpx.get(url.join("/v1/jobs"), headers=authorization).status_code == 200
        open_before = psutil.Process(pid).num_fds()
        with ExitStack() as stack:
            for _ in range(40):
                stack.enter_context(socket.create_connection((url.host, url.port), 10))
            until(lambda: psutil.Process(pid).num_fds() > open_before + 30, "the connections are accepted")

            def are_numbered_densely() -> bool:
                """Open one more connection where a number is unused."""
                lowest, end = unused_files(pid)
                if lowest < end:
                    stack.enter_context(socket.create_connection((url.host, url.port), 10))
                return lowest == end

            until(are_numbered_densely, "no number is unused")
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (unused_files(pid)[1],) * 2)
            for _ in range(5):  # more than what the server itself may close meanwhile
                stack.enter_context(socket.create_connection((url.host, url.port), 10))
            for _ in range(3):
                assert httpx.get(url.join("/v1/jobs"), headers=authorization, timeout=10).status_code == 200
            until(lambda: "since no file was free" in (state / "log").read_text(), "the log says why they were closed")
        assert len((state / "log").read_text().splitlines()) < 5, "a try that fails is no line of the log"
    finally:
        process.kill()
        process.join()


def test_the_audit_log_says_what_was_refused(server: Streaming) -> None:
    """A user's attempts at another's job and at an admin's request are recorded with name, token and address."""
    job = server.submit("bob")
    server.call("POST", f"/v1/jobs/{job}/cancel", "ann")
    server.call("GET", "/v1/audit", "ann")
    records = server.call("GET", "/v1/audit?user=ann", "root").json()["records"]
    refused = [(one["subject"], one["address"]) for one in records if one["action"] == "refused"]
    assert refused == [(job, "127.0.0.1"), ("GET /v1/audit", "127.0.0.1")]
    assert AuditFilter(user="ann").user == "ann"
    assert all(one["token"].startswith("t-") for one in records)


def test_a_slow_tls_handshake_is_cut_and_others_are_served(tmp_path: Path) -> None:
    """Half a ClientHello holds a connection for the time of a head only; asyncio would wait for 60 s."""
    caps = replace(caps_within(1024), head_limit_s=0.5)
    with served(ServerConfig(state=tmp_path / "s", port=0, self_signed=True, connections=caps)) as listening:
        url = httpx.URL(listening.url)
        assert listening.certificate is not None
        trust = ssl.create_default_context(cafile=str(listening.certificate.trust))
        with socket.create_connection(("127.0.0.1", url.port)) as half, socket.socket() as silent:
            silent.connect(("127.0.0.1", url.port))
            half.sendall(b"\x16\x03\x01\x02\x00\x01")
            answer = httpx.get(f"https://127.0.0.1:{url.port}/v1/health", verify=trust)
            assert answer.headers["strict-transport-security"]
            for one in (half, silent):
                one.settimeout(5)
                with suppress(ConnectionResetError):
                    assert one.recv(1) == b""
