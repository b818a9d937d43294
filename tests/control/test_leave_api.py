"""Cordon, drain and leave by REST and the command line: the real application, and agents that obey."""

from __future__ import annotations

import io
import json
from collections.abc import Callable

import httpx
import pytest

from isthmus.cli import main
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.core.messages.agent_messages import ObservedPart
from isthmus.core.views.access_views import AuditFilter, AuditRecord
from tests.control.serving import EAST, WEST, report
from tests.control.test_server_api import Server

pytestmark = pytest.mark.integration


class Shell:
    """The command line of `who` on the application in this process; while it sleeps, `agents` act."""

    def __init__(self, server: Server, who: str) -> None:
        self.server, self.who = server, who
        self.agents: list[Callable[[], object]] = []

    def run(self, *words: str) -> tuple[int, str]:
        """Run a command; return its exit status and what it has printed."""
        out, err = io.StringIO(), io.StringIO()
        env = CliEnvironment(
            stdout=out, stderr=err, sleep=self._sleep, transport=httpx.MockTransport(self._ask),
            variables={"ISTHMUS_SERVER": "http://127.0.0.1:1"} | ({"ISTHMUS_TOKEN": self.who} if self.who else {}),
        )  # fmt: skip
        status = main([*words], env=env)
        return status, out.getvalue() + err.getvalue()

    def _ask(self, request: httpx.Request) -> httpx.Response:
        """Pass a request to the application."""
        answer = self.server.http.request(
            request.method, request.url.raw_path.decode(), content=request.content, headers=dict(request.headers)
        )
        return httpx.Response(answer.status_code, content=answer.content, headers=dict(answer.headers))

    def _sleep(self, _seconds: float) -> None:
        if self.agents:
            self.agents.pop(0)()


def obeying(server: Server, job: str, state: str) -> Callable[[], object]:
    """Both sites report their part of `job` in a state, with the checkpoint that was asked for."""

    def act() -> None:
        for site in (EAST, WEST):
            server.sync(report(site, ObservedPart.model_validate({"job": job, "attempt": 1, "state": state})))

    return act


def test_an_owner_drains_its_site_and_sees_the_progress(server: Server) -> None:
    """The command says which jobs it waits for, and ends when the site is empty; the job waits again."""
    found = server.committed()
    shell = Shell(server, "owner-east")
    shell.agents = [obeying(server, found.id, "released")]
    status, text = shell.run("site", "drain", "east", "--deadline", "10m")
    assert (status, f"east: waits for {found.id}" in text, "east is drained" in text) == (0, True, True)
    assert server.job(found.id).state == "waiting"
    _, shown = shell.run("site", "show", "east")
    assert "none: drained by owner-east" in shown
    _, listed = shell.run("site", "list", "--json")
    assert json.loads(listed)[0]["duty"]["state"] == "drained"
    status, text = shell.run("site", "uncordon", "east")
    assert (status, text) == (0, "east takes new parts\n")


def test_a_command_that_does_not_wait_says_what_is_left(server: Server) -> None:
    """The server goes on with a drain of which no command waits."""
    found = server.committed()
    status, text = Shell(server, "root").run("site", "drain", "east", "--no-wait", "--json")
    assert (status, json.loads(text)["duty"]["jobs"]) == (0, [found.id])


def test_a_site_leaves_with_one_command(server: Server) -> None:
    """Steps: drain; the parts are released; the agent is told to end and says so; the rest is listed."""
    found = server.committed()

    def end() -> None:
        obeying(server, found.id, "released")()
        assert server.sync(report(EAST)).leaves
        assert server.call("POST", "/v1/agents/east/left", {}, token="owner-east").json()["gone"]

    shell = Shell(server, "owner-east")
    shell.agents = [end]
    status, text = shell.run("site", "leave", "east", "--json")
    assert status == 0, text
    outcome = json.loads(text)
    assert {"kind": "site", "name": "east"} in outcome["removed"]
    assert {one["kind"] for one in outcome["left"]} == {"history", "usage", "audit"}
    assert [one.cluster.name for one in server.shell.pool().clusters] == ["west"]
    actions = [one.action for one in _audit(server)]
    assert ("site-leaving" in actions, "site-left" in actions) == (True, True)


@pytest.mark.attack
def test_a_site_with_the_only_checkpoints_of_a_job_leaves_only_if_they_are_given_up(server: Server) -> None:
    """The refusal names the job and what can be done, and changes nothing: the site is not even closed."""
    found = server.committed(checkpoints={"folder": "c/{job}", "copies": 0})
    for rank, site in enumerate((EAST, WEST)):
        name = site.name
        worker = {"rank": rank, "cluster": name, "host": "10.0.0.1", "port": 4000 + rank}
        part = {"job": found.id, "attempt": 1, "state": "running", "workers": [worker]}
        server.sync(report(site, ObservedPart.model_validate(part), free_storage_bytes=10**12))
    assert server.job(found.id).state == "running"
    shell = Shell(server, "owner-east")
    status, text = shell.run("site", "leave", "east")
    assert (status, f"'east' has the only checkpoints of {found.id}" in text, "--discard-checkpoints" in text) == (
        6, True, True,
    ), text  # fmt: skip
    assert json.loads(shell.run("site", "list", "--json")[1])[0]["duty"]["state"] == "open"

    def end() -> None:
        obeying(server, found.id, "released")()
        server.sync(report(EAST))
        server.call("POST", "/v1/agents/east/left", {}, token="owner-east")

    shell.agents = [end]
    status, text = shell.run("site", "leave", "east", "--discard-checkpoints")
    assert (status, "east has left the pool" in text) == (0, True), text
    assert "gives up checkpoints that no other site has" in {one.detail for one in _audit(server)}


@pytest.mark.attack
def test_a_late_report_does_not_bring_a_site_back(server: Server) -> None:
    """Race: 1. the agent sends a report, which is delayed; 2. it says that it has ended; 3. the report arrives."""
    server.sync(report(EAST))
    server.call("POST", "/v1/sites/east/leave", {}, token="owner-east")
    assert server.sync(report(EAST)).leaves
    server.call("POST", "/v1/agents/east/left", {}, token="owner-east")
    late = server.call("POST", "/v1/agents/east/sync", report(EAST), token="owner-east")
    assert (late.status_code, "has left the pool" in late.json()["message"]) == (409, True)
    assert server.shell.pool().clusters == ()
    again = server.call("POST", "/v1/agents/east/left", {}, token="owner-east")
    assert again.status_code == 200, "an answer that was lost is asked for again"
    server.sync(report(EAST, incarnation="i2"))
    assert [one.cluster.name for one in server.shell.pool().clusters] == ["east"], "a new agent joins as before"


def test_a_site_without_contact_leaves_at_once_if_nothing_runs_there(server: Server) -> None:
    """The command is idempotent: what is gone already is no error, whoever removed it."""
    server.sync(report(EAST))
    server.now_s += 1000
    server.shell.tick()
    shell = Shell(server, "root")
    assert shell.run("site", "leave", "east")[0] == 0
    assert server.shell.pool().clusters == ()
    status, text = shell.run("site", "leave", "east", "--json")
    assert (status, json.loads(text)["removed"]) == (0, [])
    status, text = shell.run("site", "leave", "eats")
    assert (status, "the pool has no site eats" in text) == (0, True), "a misspelt name is not said to have left"


def test_an_agent_that_ends_too_early_is_refused(server: Server) -> None:
    """Neither a site that does not leave, nor one that has parts yet, is removed on an agent's word."""
    found = server.committed()
    answer = server.call("POST", "/v1/agents/east/left", {}, token="owner-east")
    assert (answer.status_code, "it is not leaving" in answer.json()["message"]) == (409, True)
    server.call("POST", "/v1/sites/east/leave", {}, token="root")
    answer = server.call("POST", "/v1/agents/east/left", {}, token="owner-east")
    assert (answer.status_code, "it still has parts" in answer.json()["message"]) == (409, True)
    other = server.call("POST", "/v1/agents/east/left", {}, token="owner-west")
    assert other.status_code == 404, "to other owners the site does not exist"
    assert server.job(found.id).state == "stopping"


@pytest.mark.parametrize("limit", ["0s", "8d", "x"])
def test_a_deadline_out_of_range_is_named(server: Server, limit: str) -> None:
    """Before anything is asked of the server."""
    server.sync(report(EAST))
    status, text = Shell(server, "root").run("site", "drain", "east", "--deadline", limit)
    assert status == 2
    assert limit in text
    assert server.shell.pool().clusters[0].duty.state == "open"


def _audit(server: Server) -> tuple[AuditRecord, ...]:
    server.shell.audit.flush()
    return server.store.audit(AuditFilter(), 0, 1000)
