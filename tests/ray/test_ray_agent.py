"""An agent on a real Ray, and `isthmus site check` there: parts get cards of Ray's nodes and give everything back."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from isthmus.agent.adapters.scheduler_adapter import HoldRequest, RankNeed
from isthmus.agent.courier.courier import Courier
from isthmus.agent.service.agent_service import AgentService
from isthmus.cli import main
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.core.process.boot_clock import boot_time_s
from tests.agent.running_agent import LOOP, DrivenAgent
from tests.ray.ray_cluster import RayCluster
from tests.ray.samples import adapter_of, cluster_of
from tests.site.samples import order

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BARE_PYTHON = str(getattr(sys, "_base_executable", sys.executable))
"""The Python below the virtual environment, which has no Ray of its own."""
PLACES = ("east/h20", "east/h20")
POOL = """
version: 1
owners: [{{name: o}}]
clusters:
- {{name: east, owner: o, node_groups: [{{name: h20, chip: H20, nodes: {nodes}, chips_per_node: 2}}]}}
"""
SITE = """
kind: ray
node_groups:
  {group}:
    resource: {resource}
options:
  address: {address}
  python: {python}
"""


class RunningAgent(DrivenAgent):
    """An agent's service on a Ray cluster, driven by the test; `restart` is a new life of it."""

    def __init__(self, ray: RayCluster, state: Path, python: str = sys.executable) -> None:
        self._ray, self._state, self._python = ray, state, python
        self.courier = Courier(state)
        self._make()

    def _make(self) -> None:
        self.service = AgentService(
            cluster=cluster_of(self._ray),
            adapter=adapter_of(self._ray, self._state, self.courier, LOOP, python=self._python),
            state=self._state,
            clock=boot_time_s,
        )

    def restart(self, python: str = "") -> None:
        """Let another agent, with another courier, go on with the state folder."""
        self._python = python or self._python
        self.courier.close()
        self.courier = Courier(self._state)
        self._make()


@contextlib.contextmanager
def running_agent(ray: RayCluster, state: Path, python: str = sys.executable) -> Iterator[RunningAgent]:
    """Run an agent until it has given everything back."""
    agent = RunningAgent(ray, state, python)
    agent.until("cards are seen", lambda: agent.service.machine.free_chips() == {"h20": 4})
    yield agent
    agent.service.shut_down()
    agent.until("the agent stops", lambda: agent.service.stopped)
    agent.until("Ray has its cards back", lambda: not ray.used_cards())
    agent.courier.close()


@pytest.fixture
def agent(ray: RayCluster, tmp_path: Path) -> Iterator[RunningAgent]:
    with running_agent(ray, tmp_path / "state") as agent:
        yield agent


def test_a_part_runs_on_ray_through_a_restart_of_its_agent_and_returns_its_cards(
    agent: RunningAgent, ray: RayCluster
) -> None:
    """Ready, prepared, running on its cards; another agent finds its ranks; after the release no card is in use."""
    agent.until("ready", lambda: agent.state() == "ready", order("ready", places=PLACES))
    agent.until("prepared", lambda: agent.state() == "prepared", order("prepared", places=PLACES))
    agent.until("running", lambda: agent.state() == "running", order("running", places=PLACES))
    agent.until_cards_are_named()
    agent.restart()
    agent.tick_for(2.0)
    assert agent.state() == "running"
    assert list(ray.temporary.glob("isthmus-rank-*")), "the ranks' couriers have folders"
    agent.until("released", lambda: agent.state() == "released", order("released", places=PLACES))
    agent.until("Ray has its cards back", lambda: not ray.used_cards())
    agent.until("no node keeps a ticket or a copy", lambda: not list(ray.temporary.glob("isthmus-rank-*")))


@pytest.mark.parametrize(
    ("python", "words"),
    [
        ("no-such-python", ("no-such-python: not found", "set options.python")),
        (BARE_PYTHON, ("No module named 'ray'", "set options.python")),
    ],
)
def test_a_python_that_cannot_hold_is_the_reason_of_the_part(
    python: str, words: tuple[str, ...], ray: RayCluster, tmp_path: Path
) -> None:
    """1. The part waits and says why. 2. Jobs follow each other after pauses. 3. With another Python it is ready."""
    with running_agent(ray, tmp_path / "state", python) as agent:
        wanted = order("ready", places=PLACES)
        agent.until("the part says why it waits", lambda: all(word in agent.detail() for word in words), wanted)
        agent.until("there was a second try", lambda: "2 times in a row" in agent.detail(), wanted)
        assert agent.state() == "queued"
        agent.restart(sys.executable)
        agent.until("cards are seen", lambda: agent.service.machine.free_chips() == {"h20": 4})
        agent.until("ready", lambda: agent.state() == "ready", wanted)
        assert agent.detail() == ""


def test_a_hold_that_is_given_up_at_once_leaks_no_cards(whole: bool, ray: RayCluster, tmp_path: Path) -> None:
    """Ray loses the cards of a group that is removed while it is scheduled: asked for and released in every order.

    Ten pauses between both, each twice, or six times with `--whole`.
    """
    courier = Courier(tmp_path / "state")
    adapter = adapter_of(ray, tmp_path / "state", courier, LOOP)
    try:
        for number in range(60 if whole else 20):
            hold_id = uuid.UUID(int=number, version=4).hex
            need = RankNeed(node_group="h20", num_cards=1)
            adapter.hold(HoldRequest(id=hold_id, job="f", attempt=1, ranks=(need,), lease_s=60.0))
            time.sleep(number % 10 * 0.03)
            adapter.release(hold_id)
        ray.wait_unused(lambda: bool(adapter.observe().holds), timeout_s=90.0)
    finally:
        courier.close()


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({}, 0, ("Ray 2.",)),
        ({"resource": "GPUU"}, 2, ("site.yaml:5", "unknown resource 'GPUU'", "did you mean 'GPU'?")),
        ({"nodes": 3}, 2, ("site.yaml:4", "4 cards on 2 nodes, 6 on 3 in pool.yaml")),
        ({"group": "h2o"}, 2, ("site.yaml:4", "unknown node group 'h2o'", "did you mean 'h20'?")),
        ({"address": "http://127.0.0.1:9"}, 2, ("does not answer", "options.address")),
        ({"python": "no-such-python"}, 2, ("site.yaml:8", "no-such-python: not found", "set options.python")),
        ({"python": BARE_PYTHON}, 2, ("site.yaml:8", "No module named 'ray'", "set options.python")),
    ],
)
def test_a_check_of_the_site_says_what_fits_and_where_it_does_not(
    changes: dict[str, object], status: int, words: tuple[str, ...], ray: RayCluster, tmp_path: Path
) -> None:
    """Exit status 2, the line of the file, and the nearest word that Ray knows."""
    told = {"nodes": 2, "group": "h20", "resource": "GPU", "address": ray.address} | changes
    told = {"python": sys.executable} | told
    (tmp_path / "pool.yaml").write_text(POOL.format_map(told))
    (tmp_path / "site.yaml").write_text(SITE.format_map(told))
    out = io.StringIO()
    files = ("site", "check", str(tmp_path / "site.yaml"), "--pool", str(tmp_path / "pool.yaml"), "--json")
    assert main(files, env=CliEnvironment(variables={}, stdout=out, stderr=out)) == status, out.getvalue()
    assert all(word in out.getvalue() for word in words), out.getvalue()
    if status == 0:
        assert all(one["ok"] for one in json.loads(out.getvalue()))
