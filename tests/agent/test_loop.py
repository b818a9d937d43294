"""The agent's loop against a server of the test: when it reports, how it waits, what makes it give up."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest

from isthmus.agent.courier.courier import Courier
from isthmus.agent.metrics.metrics_listener import MetricsListener
from isthmus.agent.service.agent_loop import (
    FAST_POLL_S,
    POLL_S,
    AgentConfig,
    AgentLoop,
    Backoff,
    run_agent,
    stop_workers,
)
from isthmus.agent.service.remove_state_folder import RemovedFiles, remove_state_folder
from isthmus.agent.service.sync_client import SyncClient
from isthmus.core.errors import AuthError, ConflictError, InputError, IsthmusError, ProtocolError, UnavailableError
from isthmus.core.messages.agent_messages import AgentOrders, AgentReport
from isthmus.core.process.state_folder_lock import lock_state_folder
from tests.agent.test_shell import Site
from tests.site.samples import EAST, order, orders

pytestmark = pytest.mark.integration


class Answering:
    """A server that gives the answers set by the test, then repeats the last one, and keeps the reports."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, object]] = [(200, AgentOrders().model_dump(mode="json"))]
        self.reports: list[AgentReport] = []
        self.tokens: set[str] = set()
        self.paths: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                outer.paths.append(self.path)
                if self.path.endswith("/sync"):
                    outer.reports.append(AgentReport.model_validate_json(body))
                outer.tokens.add(self.headers["authorization"])
                status, answer = outer.answers.pop(0) if len(outer.answers) > 1 else outer.answers[0]
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: object) -> None:
                pass

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()

    def will_say(self, *answers: tuple[int, object] | AgentOrders) -> None:
        self.answers = [
            (200, answer.model_dump(mode="json")) if isinstance(answer, AgentOrders) else answer for answer in answers
        ]

    def close(self) -> None:
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


@pytest.fixture
def server() -> Iterator[Answering]:
    server = Answering()
    yield server
    server.close()


@pytest.fixture
def loop(tmp_path: Path, server: Answering) -> Iterator[AgentLoop]:
    site = Site(tmp_path)
    with SyncClient(server.url, "secret", "east") as exchange:
        yield AgentLoop(site.shell, exchange, random.Random(0))


def test_the_loop_shows_its_exchanges_on_its_page(tmp_path: Path, server: Answering) -> None:
    """The page of metrics is made every two seconds, and counts the answers and failures before it."""
    with (
        closing(MetricsListener("127.0.0.1", 0)) as listener,
        SyncClient(server.url, "secret", "east") as exchange,
    ):
        loop = AgentLoop(Site(tmp_path).shell, exchange, random.Random(0), metrics=listener)
        server.will_say((503, {"message": "disk full"}), AgentOrders(poll_after_s=1))
        for at_s in (0.0, 10.0, 20.0):
            loop.step(at_s)
        text = httpx.get(f"http://127.0.0.1:{listener.address[1]}/metrics", timeout=20).text
    assert 'isthmus_agent_syncs_total{outcome="failed"} 1.0' in text
    assert 'isthmus_agent_syncs_total{outcome="answered"} 1.0' in text
    assert 'isthmus_agent_devices{node_group="h20"} 3.0' in text


def test_it_reports_when_due_and_no_sooner(loop: AgentLoop, server: Answering) -> None:
    """With nothing new it keeps to the server's pace."""
    server.will_say(AgentOrders(poll_after_s=5))
    assert loop.step(0.0) == POLL_S
    loop.step(4.9)
    assert len(server.reports) == 1
    loop.step(5.0)
    assert len(server.reports) == 2
    assert server.tokens == {"Bearer secret"}


def test_while_something_changes_it_is_quick(loop: AgentLoop, server: Answering) -> None:
    """What orders changed is reported at once, a part on its way every 50 ms, whatever the server's pace."""
    server.will_say(*[orders(order("prepared"))] * 2, AgentOrders(poll_after_s=60))
    assert loop.step(0.0) == 0.0
    assert loop.step(0.0) == pytest.approx(FAST_POLL_S)
    assert [part.state for part in server.reports[1].parts] == ["prepared"]


def test_news_do_not_wait_for_their_turn(loop: AgentLoop, server: Answering) -> None:
    """A part that changed at the site is reported at once."""
    server.will_say(orders(order("prepared", lease_s=60)), AgentOrders(poll_after_s=60))
    loop.step(0.0)
    loop.step(1.0)
    num = len(server.reports)
    loop.service.apply_orders(orders(order("released")))
    loop.step(1.01)
    assert len(server.reports) == num + 1


def test_waits_double_up_to_5_s_and_are_never_in_step(loop: AgentLoop, server: Answering) -> None:
    """Alone, it tries after 0.2 s, 0.4 s, ... 5 s, each shortened by up to half; then it starts at 0.2 s again."""
    backoff = Backoff(random.Random(1))
    waits = [backoff.next_wait_s() for _ in range(8)]
    most = [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    assert all(top / 2 <= wait <= top for wait, top in zip(waits, most, strict=True))
    backoff.reset()
    assert backoff.next_wait_s() <= 0.2


@pytest.mark.parametrize("answer", [(503, {"message": "disk full"}), (500, b"oops"), (200, b"[]"), (200, b"{")])
def test_a_server_in_trouble_is_asked_again(loop: AgentLoop, server: Answering, answer: tuple[int, object]) -> None:
    """Errors of the server, and answers that are none, are waited out; then the same is reported again."""
    server.will_say(answer, AgentOrders())
    assert 0.1 <= loop.step(0.0) <= 0.2
    loop.step(0.2)
    assert len(server.reports) == 2


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ((401, {"message": "no valid token"}), AuthError),
        ((403, {"message": "another owner's"}), AuthError),
        ((409, {"message": "another agent"}), ConflictError),
        ((422, {"message": "unknown chip"}), InputError),
        ((426, {"message": "protocol 1"}), ProtocolError),
        ((200, {"protocol": 2, "whatever": []}), ProtocolError),
        ((200, {"protocol": 1, "whatever": []}), ProtocolError),
    ],
)
def test_a_refusal_is_an_error_and_workers_go_on(
    loop: AgentLoop, server: Answering, answer: tuple[int, object], error: type[IsthmusError]
) -> None:
    """What waiting cannot mend is raised in the server's words; nothing is stopped."""
    server.will_say(orders(order("prepared")), orders(order("running")), answer)
    loop.step(0.0)
    loop.step(1.0)
    with pytest.raises(error):
        loop.step(2.0)
    assert [part.state for part in loop.service.machine.observed_parts()] == ["running"]


@pytest.mark.attack
def test_output_of_workers_that_the_server_refuses_ends_no_agent(loop: AgentLoop, server: Answering) -> None:
    """Workers run programs of users: what one has written is left out, and not sent again."""
    folder = loop.service.state_folder.runs / "j" / "1" / "rank-0"
    folder.mkdir(parents=True)
    (folder / "log").write_text("hello\n")
    server.will_say((422, {"message": "no such text"}), AgentOrders())
    loop.step(0.0)
    assert [len(one.logs) for one in server.reports] == [1, 0]
    assert loop.service.outbox.is_attempt_drained(folder.parent)


def test_nobody_there_is_unavailable(tmp_path: Path) -> None:
    """A closed port is waited out like a server in trouble."""
    with (
        SyncClient("http://127.0.0.1:9", "t", "east") as exchange,
        pytest.raises(UnavailableError, match="no valid response"),
    ):
        exchange.sync(Site(tmp_path).shell.report("i")[0])


def test_a_certificate_file_that_is_none_is_named(tmp_path: Path) -> None:
    """The path is in the message."""
    with pytest.raises(InputError, match="nothing"):
        SyncClient("https://x", "t", "east", tmp_path / "nothing")


def config(server: Answering, state: Path) -> AgentConfig:
    return AgentConfig(server=server.url, token="t", cluster=EAST, state=state)


def test_the_agent_of_a_site_that_leaves_ends_and_says_so_until_it_is_heard(tmp_path: Path, server: Answering) -> None:
    """Steps: the server says that the empty site leaves; the agent ends; the answer to its last message is lost."""
    leaving = (200, AgentOrders(leaves=True).model_dump(mode="json"))
    server.will_say(leaving, leaving, (503, {"message": "lost"}), (200, {"site": "east", "gone": True}))
    run_agent(config(server, tmp_path))
    assert server.paths == ["/v1/agents/east/sync"] * 2 + ["/v1/agents/east/left"] * 2


def test_the_files_of_an_agent_that_has_left_are_removed(tmp_path: Path, server: Answering) -> None:
    """What the agent made goes; files of others, jobs of the site's own users and the targets of links stay."""
    state, outside = tmp_path / "state", tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    leaving = (200, AgentOrders(leaves=True).model_dump(mode="json"))
    server.will_say(leaving, leaving, (200, {"site": "east", "gone": True}))
    run_agent(config(server, state))
    (state / "runs").mkdir(exist_ok=True)
    (state / "runs" / "link").symlink_to(outside)
    (state / "notes").touch()
    (state / "node_images").write_text("/srv/unpacked")
    (state / "local" / "own").mkdir(parents=True)
    with lock_state_folder(state, "agent"), pytest.raises(UnavailableError, match="another agent uses"):
        remove_state_folder(state)
    found = remove_state_folder(state)
    assert found.left == (str(state / "local"), str(state / "notes"), "/srv/unpacked of the site's nodes")
    assert sorted(one.name for one in state.iterdir()) == ["local", "notes"]
    assert (outside / "kept").exists()


def test_the_folder_of_an_agent_goes_with_its_last_file_and_no_other_folder_does(
    tmp_path: Path, server: Answering
) -> None:
    """The courier's private key goes too; repeating it is no error; a folder without an agent's identity stays."""
    state, other = tmp_path / "state", tmp_path / "other"
    leaving = (200, AgentOrders(leaves=True).model_dump(mode="json"))
    server.will_say(leaving, leaving, (200, {"site": "east", "gone": True}))
    run_agent(config(server, state))
    courier = Courier(state)
    courier.ticket(state / "runs" / "part")
    courier.close()
    (state / "ray" / "holders" / "1").mkdir(parents=True)
    assert remove_state_folder(state).left == ()
    assert not state.exists()
    assert remove_state_folder(state) == RemovedFiles(removed=(), left=())
    (other / "runs").mkdir(parents=True)
    with pytest.raises(InputError, match="is not the state folder of an agent"):
        remove_state_folder(other)
    assert (other / "runs").exists()


def test_a_second_agent_on_the_same_state_is_turned_away(tmp_path: Path, server: Answering) -> None:
    """Two agents never count the same devices from one table."""
    with lock_state_folder(tmp_path, "agent"), pytest.raises(UnavailableError, match="another agent uses"):
        run_agent(config(server, tmp_path))


def test_a_storage_folder_that_is_absent_is_named(tmp_path: Path, server: Answering) -> None:
    """A mistyped folder would otherwise be made, empty, on the system's disk, and every job would lack its files."""
    with pytest.raises(InputError, match="no-disk does not exist"):
        run_agent(replace(config(server, tmp_path), storage=tmp_path / "no-disk"))


def test_an_agent_that_was_replaced_ends_with_the_reason(tmp_path: Path, server: Answering) -> None:
    """Another agent speaks for the cluster: this one releases everything and raises."""
    server.will_say((409, {"message": "another agent of cluster 'east' has taken over"}))
    with pytest.raises(ConflictError, match="taken over"):
        run_agent(config(server, tmp_path))


def test_a_stopped_agent_tells_what_it_gave_back(tmp_path: Path, server: Answering) -> None:
    """The last report of an agent that is asked to end says `released`."""
    server.will_say(orders(order("prepared")))
    stop = threading.Event()
    thread = threading.Thread(target=run_agent, args=(config(server, tmp_path), stop))
    thread.start()
    held = threading.Event()
    while not any(report.parts for report in list(server.reports)):
        assert not held.wait(0.01)
    stop.set()
    thread.join(10)
    assert not thread.is_alive()
    assert [part.state for part in server.reports[-1].parts] == ["released"]


@pytest.mark.parametrize(
    ("saves_first", "said"), [(False, "go on from their last"), (True, "Ctrl-C again stops at once")]
)
def test_an_agent_that_stops_says_what_becomes_of_running_parts(
    tmp_path: Path, server: Answering, caplog: pytest.LogCaptureFixture, saves_first: bool, said: str
) -> None:
    """It names their number, and whether they are saved first; a second Ctrl-C ends that wait."""
    site, at_once = Site(tmp_path), threading.Event()
    folder = site.run()
    at_once.set()
    with SyncClient(server.url, "secret", "east") as exchange:
        loop = AgentLoop(site.shell, exchange, random.Random(0))
        site.adapter.stop = lambda folder, force: site.adapter.end(folder, 143)  # type: ignore[method-assign]
        with caplog.at_level("WARNING"):
            stop_workers(loop, saves_first=saves_first, at_once=at_once)
    assert said in caplog.text
    assert "running parts (1)" in caplog.text
    assert site.shell.stopped
    assert folder.exists()


@pytest.mark.parametrize("interactive", [True, False])
def test_the_first_interrupt_of_a_person_stops_an_idle_agent_as_well(
    tmp_path: Path, server: Answering, interactive: bool
) -> None:
    """Nothing is to be saved: the agent ends, and its handlers are gone."""
    before = signal.getsignal(signal.SIGINT)
    interrupt = threading.Thread(target=lambda: (_reported(server), os.kill(os.getpid(), signal.SIGINT)))
    interrupt.start()
    run_agent(dataclasses.replace(config(server, tmp_path), interactive=interactive))
    interrupt.join()
    assert signal.getsignal(signal.SIGINT) is before


def _reported(server: Answering) -> None:
    while not server.reports:
        threading.Event().wait(0.01)


@pytest.mark.attack
def test_a_copied_state_folder_ends_the_agent_before_it_reports_or_stops_anything(
    tmp_path: Path, server: Answering
) -> None:
    """The part table of the copy names workers of the original, which an agent would stop or call ended."""
    config = AgentConfig(server=server.url, token="t", cluster=EAST, state=tmp_path / "state", host="127.0.0.1")
    stopped = threading.Event()
    stopped.set()
    run_agent(config, stopped)
    assert [report.identity.session for report in server.reports if report.identity] == [1]
    shutil.copytree(tmp_path / "state", tmp_path / "copy")
    with pytest.raises(ConflictError, match="was copied or restored"):
        run_agent(replace(config, state=tmp_path / "copy"), stopped)
    assert len(server.reports) == 1
