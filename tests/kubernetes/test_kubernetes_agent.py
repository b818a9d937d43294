"""An agent on a Kubernetes cluster: a part gets cards of its pods, survives the agent, and gives all back."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.agent.service.agent_service import AgentService
from isthmus.agent.service.use_found_topology import use_found_topology
from isthmus.core.process.boot_clock import boot_time_s
from tests.agent.running_agent import LOOP, DrivenAgent
from tests.kubernetes.clusters import StandInCluster
from tests.kubernetes.samples import CLUSTER
from tests.site.samples import order

PLACES = ("east/h20", "east/h20")


class RunningAgent(DrivenAgent):
    """An agent's service on the stand-in's cluster, driven by the test; `restart` is a new life of it."""

    def __init__(self, cluster: StandInCluster, state: Path) -> None:
        self._cluster, self._state = cluster, state
        self.restart()

    def restart(self) -> None:
        adapter = self._cluster.adapter(LOOP)
        self.service = AgentService(cluster=CLUSTER, adapter=adapter, state=self._state, clock=boot_time_s)


@pytest.mark.slow
def test_a_part_runs_in_pods_through_a_restart_of_its_agent(tmp_path: Path) -> None:
    """Ready once its cards are held, running after a restart of the agent; after the release no object is left."""
    cluster = StandInCluster(tmp_path)
    try:
        agent = RunningAgent(cluster, tmp_path / "state")
        agent.until("cards are seen", lambda: agent.service.machine.free_chips() == {"h20": 8})
        for wanted in ("ready", "prepared", "running"):
            agent.until(wanted, lambda wanted=wanted: agent.state() == wanted, order(wanted, places=PLACES))
        agent.until_cards_are_named()
        agent.restart()
        agent.tick_for(1.0)
        assert (agent.state(), len(objects(cluster, "jobs"))) == ("running", 1)
        agent.until("released", lambda: agent.state() == "released", order("released", places=PLACES))
        agent.until("nothing is left", lambda: not any(objects(cluster, one) for one in ("jobs", "pods", "secrets")))
        agent.service.shut_down()
        agent.until("the agent stops", lambda: agent.service.stopped)
    finally:
        cluster.end()


def objects(cluster: StandInCluster, plural: str) -> list[str]:
    return [name for (_, found), _, name in cluster.server.objects if found == plural]


@pytest.mark.slow
def test_labels_of_the_nodes_are_the_topology_of_the_node_group(tmp_path: Path) -> None:
    """Without labels of a level there is none."""
    cluster = StandInCluster(tmp_path)
    try:
        assert use_found_topology(CLUSTER, cluster.adapter(LOOP)) is CLUSTER
        for ((_, plural), _, name), body in cluster.server.objects.items():
            if plural == "nodes":
                body["metadata"]["labels"]["network.topology.nvidia.com/leaf"] = f"leaf-{name}"
        topology = use_found_topology(CLUSTER, cluster.adapter(LOOP)).node_groups[0].topology
        assert topology is not None
        assert [one.name for one in topology.tors] == [f"leaf-{name}" for name in sorted(objects(cluster, "nodes"))]
    finally:
        cluster.end()
