"""An agent on a Kubernetes cluster: a part gets cards of its pods, survives the agent, and gives all back."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from isthmus.agent.service.agent_service import AgentService
from isthmus.core.messages.agent_messages import AgentOrders, PartOrder
from isthmus.core.process.boot_clock import boot_time_s
from tests.kubernetes.clusters import StandInCluster
from tests.kubernetes.samples import CLUSTER
from tests.site.samples import order

LOOP = ("sh", "-c", 'echo "$ISTHMUS_CARDS" > "$1/cards"; while :; do sleep 0.05; done', "worker")
PLACES = ("east/h20", "east/h20")


class RunningAgent:
    """An agent's service on the stand-in's cluster, driven by the test; `restart` is a new life of it."""

    def __init__(self, cluster: StandInCluster, state: Path) -> None:
        self._cluster, self._state = cluster, state
        self.restart()

    def restart(self) -> None:
        adapter = self._cluster.adapter(LOOP)
        self.service = AgentService(cluster=CLUSTER, adapter=adapter, state=self._state, clock=boot_time_s)

    def until(self, what: str, happened: Callable[[], object], *parts: PartOrder, timeout_s: float = 90.0) -> None:
        """Tick, and repeat the server's orders, until something has happened."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self.service.tick()
            if parts:
                self.service.apply_orders(AgentOrders(parts=parts))
            if happened():
                return
            found = {part.job: f"{part.state} {part.detail}" for part in self.service.observed_parts()}
            assert time.monotonic() < deadline_s, f"{what}: {found}"
            time.sleep(0.05)

    def state(self) -> str:
        return next((part.state for part in self.service.observed_parts() if part.job == "a"), "")


@pytest.mark.slow
def test_a_part_runs_in_pods_through_a_restart_of_its_agent(tmp_path: Path) -> None:
    """Ready once its cards are held, running after a restart of the agent; after the release no object is left."""
    cluster = StandInCluster(tmp_path)
    try:
        agent = RunningAgent(cluster, tmp_path / "state")
        agent.until("cards are seen", lambda: agent.service.machine.free_chips() == {"h20": 8})
        for wanted in ("ready", "prepared", "running"):
            agent.until(wanted, lambda wanted=wanted: agent.state() == wanted, order(wanted, places=PLACES))
        part = agent.service.machine.parts["a", 1]
        folders = {rank: agent.service.state_folder.worker_folder(part, rank) for rank in part.workers}
        agent.until("both ranks run", lambda: all((folder / "cards").exists() for folder in folders.values()))
        for rank, folder in folders.items():
            agent.until("cards are named", (folder / "cards").read_text)
            assert (folder / "cards").read_text().strip() == ",".join(part.workers[rank].devices)
        agent.restart()
        for _ in range(20):
            agent.service.tick()
            time.sleep(0.05)
        assert (agent.state(), len(objects(cluster, "jobs"))) == ("running", 1)
        agent.until("released", lambda: agent.state() == "released", order("released", places=PLACES))
        agent.until("nothing is left", lambda: not any(objects(cluster, one) for one in ("jobs", "pods", "secrets")))
        agent.service.shut_down()
        agent.until("the agent stops", lambda: agent.service.stopped)
    finally:
        cluster.end()


def objects(cluster: StandInCluster, plural: str) -> list[str]:
    return [name for (_, found), _, name in cluster.server.objects if found == plural]
