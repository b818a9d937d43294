"""An agent on a real Slurm: parts get the cards that Slurm names, and give everything back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from isthmus.agent.service.agent_service import AgentService
from isthmus.core.messages.agent_messages import AgentOrders, PartOrder
from isthmus.core.pool import Cluster, NodeGroup
from isthmus.core.process.boot_clock import boot_time_s
from tests.site.samples import order
from tests.slurm.samples import adapter_of
from tests.slurm.slurm_cluster import SlurmCluster

LOOP = ("sh", "-c", 'echo "$ISTHMUS_CARDS" > "$1/cards"; while :; do sleep 0.05; done', "worker")
PLACES = ("east/h20", "east/h20")


class RunningAgent:
    """An agent's service on a Slurm cluster, driven by the test; `restart` is a new life of it."""

    def __init__(self, slurm: SlurmCluster, state: Path) -> None:
        self._slurm, self._state, self._orders = slurm, state, tuple[PartOrder, ...]()
        self.restart()

    def restart(self) -> None:
        group = NodeGroup(name="h20", chip="H20", nodes=self._slurm.num_nodes, chips_per_node=self._slurm.num_cards)
        self.service = AgentService(
            cluster=Cluster(name="east", owner="o", node_groups=(group,)),
            adapter=adapter_of(self._slurm, self._state, LOOP),
            state=self._state,
            clock=boot_time_s,
        )

    def until(self, what: str, happened: Callable[[], object], *parts: PartOrder, timeout_s: float = 40.0) -> None:
        """Tick, and repeat the server's orders, until something has happened."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self.service.tick()
            if parts:
                self.service.apply_orders(AgentOrders(parts=parts))
            if happened():
                return
            assert time.monotonic() < deadline_s, f"{what}: {self.states}"
            time.sleep(0.05)

    @property
    def states(self) -> dict[str, str]:
        return {f"{part.job}/{part.attempt}": f"{part.state} {part.detail}" for part in self.service.observed_parts()}

    def state(self, job: str = "a") -> str:
        found = [part.state for part in self.service.observed_parts() if part.job == job]
        return found[0] if found else ""

    def num_jobs(self) -> int:
        return len(self._slurm.run("squeue", "-h", "-o", "%A").split())


@pytest.fixture
def agent(alpha: SlurmCluster, tmp_path: Path) -> Iterator[RunningAgent]:
    alpha.wait_empty()
    agent = RunningAgent(alpha, tmp_path / "state")
    agent.until("cards are seen", lambda: agent.service.machine.free_chips() == {"h20": 8})
    yield agent
    agent.service.shut_down()
    agent.until("the agent stops", lambda: agent.service.stopped)
    alpha.wait_empty()


@pytest.mark.slow
def test_a_part_runs_on_the_cards_that_slurm_names_and_returns_them(agent: RunningAgent) -> None:
    """Queued until Slurm has granted its cards, then ready, prepared, running; after the release no job is left."""
    agent.until("ready", lambda: agent.state() == "ready", order("ready", places=PLACES))
    assert agent.num_jobs() == 1
    agent.until("prepared", lambda: agent.state() == "prepared", order("prepared", places=PLACES))
    agent.until("running", lambda: agent.state() == "running", order("running", places=PLACES))
    part = agent.service.machine.parts["a", 1]
    folders = {rank: agent.service.state_folder.worker_folder(part, rank) for rank in part.workers}
    agent.until("both ranks run", lambda: all((folder / "cards").exists() for folder in folders.values()))
    for rank, folder in folders.items():
        agent.until("cards are named", (folder / "cards").read_text)
        assert (folder / "cards").read_text().strip() == ",".join(part.workers[rank].devices)
    agent.until("released", lambda: agent.state() == "released", order("released", places=PLACES))
    agent.until("Slurm has its cards back", lambda: agent.num_jobs() == 0)


@pytest.mark.slow
def test_a_restarted_agent_finds_its_holds_and_workers(agent: RunningAgent) -> None:
    """No second allocation, no second start; the part ends as if the agent had never gone."""
    agent.until("prepared", lambda: agent.state() == "prepared", order("prepared", places=PLACES))
    agent.until("running", lambda: agent.state() == "running", order("running", places=PLACES))
    part = agent.service.machine.parts["a", 1]
    folder = agent.service.state_folder.worker_folder(part, 0)
    agent.until("rank 0 runs", (folder / "cards").exists)
    agent.restart()
    for _ in range(20):
        agent.service.tick()
        time.sleep(0.05)
    assert (agent.state(), agent.num_jobs()) == ("running", 1)
    agent.until("released", lambda: agent.state() == "released", order("released", places=PLACES))


@pytest.mark.slow
def test_a_part_preempts_a_users_job_only_when_it_is_prepared(agent: RunningAgent, alpha: SlurmCluster) -> None:
    """The user's job is seen with its cards; `ready` leaves it alone, `prepared` has Slurm requeue it."""
    service = agent.service
    service.machine.site.policy = service.machine.site.policy.model_copy(update={"preemptible_from": "middle"})
    users = alpha.run("sbatch", "--parsable", "--gpus=8", "-n2", "--wrap", "sleep 600", "-o", "/dev/null").strip()
    name = f"slurm-{users}"
    agent.until("the user's job is seen", lambda: (name, 0) in service.machine.parts)
    assert service.machine.free_chips() == {"h20": 0}
    victims = ({"job": name, "attempt": 0},)
    wanted = order("ready", places=PLACES, victims=victims, priority="high")
    agent.until("ready", lambda: agent.state() == "ready", wanted)
    assert alpha.run("squeue", "-h", "-j", users, "-o", "%t").strip() == "R"
    wanted = order("prepared", places=PLACES, victims=victims, priority="high")
    agent.until("prepared", lambda: agent.state() == "prepared", wanted)
    assert alpha.run("squeue", "-h", "-j", users, "-o", "%t").strip() in ("PD", "CG")
    agent.until("released", lambda: agent.state() == "released", order("released", places=PLACES))
    alpha.run("scancel", users)
