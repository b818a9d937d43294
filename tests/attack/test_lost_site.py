"""A site is lost for good, with real processes: its workers end themselves; only then the job goes on elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from isthmus.agent import AgentConfig, run_agent
from isthmus.control.placement import PlanRequest
from isthmus.control.server.run_server import ServerConfig, ServerInfo, run_server
from isthmus.control.service.auth import ADMIN_TOKEN_FILE
from isthmus.control.state.coordinator_config import CoordinatorConfig
from isthmus.core.plan import Plan, PlanSet, Refusal, Stage
from isthmus.core.pool import Cluster
from tests.control.processes import until
from tests.control.serving import POOL, submission
from tests.forks import FORKS

WORKER = (sys.executable, str(Path(__file__).with_name("leased_stand_in.py")))
RULES = CoordinatorConfig(retry_s=0.1, agent_timeout_s=1, run_lease_s=3, run_lease_margin_s=1.5)


def plan_at_one(asked: PlanRequest) -> PlanSet:
    """Plan the whole job at the first site with a free chip."""
    for name in ("east", "west"):
        if asked.free_chips.get(name, {}).get("h20", 0):
            stage = Stage(cluster=name, node_group="h20", layers=(0, 4))
            plan = Plan(id=name, stages=(stage,), micro_batches=2, micro_batch_size=1, sequence_length=8)
            return PlanSet(plans=(plan,))
    return PlanSet(plans=(), refused=(Refusal(clusters=("east", "west"), reason="none free"),))


def serve(state: Path) -> None:
    def announce(listening: ServerInfo) -> None:
        (state / "url.tmp").write_text(listening.url)
        (state / "url.tmp").replace(state / "url")

    run_server(ServerConfig(state=state, port=0, pool=POOL, rules=RULES), announce, planner=plan_at_one)


def act(url: str, token: str, cluster: Cluster, state: Path) -> None:
    run_agent(AgentConfig(server=url, token=token, cluster=cluster, state=state, worker_command=WORKER))


class Processes:
    """A server and agents, each a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, {}
        self.start("server", serve, folder / "server")
        until((folder / "server" / "url").exists, "the server listens")
        self.url = (folder / "server" / "url").read_text()
        token = (folder / "server" / ADMIN_TOKEN_FILE).read_text().strip()
        self.http = httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {token}"})
        for site in POOL.clusters:
            self.start(site.name, act, self.url, token, site, folder / site.name)

    def start(self, name: str, target: object, *arguments: object) -> None:
        self.started[name] = FORKS.Process(target=target, args=arguments)
        self.started[name].start()

    def state(self, job: str) -> str:
        return str(self.http.get(f"/v1/jobs/{job}").json()["state"])

    def places(self, job: str) -> set[str]:
        """The clusters at which the job runs."""
        parts = self.http.get(f"/v1/jobs/{job}").json()["parts"]
        return {part["cluster"] for part in parts if part["observed"] == "running"}

    def workers(self) -> dict[int, list[int]]:
        """The process ids of the workers started so far, by attempt."""
        found: dict[int, list[int]] = {}
        for file in self.folder.glob("out/**/starts"):
            for line in file.read_text().splitlines():
                found.setdefault(int(line.split()[1]), []).append(int(line.split()[3]))
        return found

    def live_attempts(self) -> set[int]:
        return {attempt for attempt, pids in self.workers().items() if any(map(_lives, pids))}

    def close(self) -> None:
        self.http.close()
        for name in ("east", "west", "server"):
            self.started[name].terminate()
            self.started[name].join(20)
        for pids in self.workers().values():
            for pid in filter(_lives, pids):
                psutil.Process(pid).kill()


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.attack
def test_a_killed_agent_lets_the_job_go_on_elsewhere_only_after_its_workers_have_ended(processes: Processes) -> None:
    """kill -9 of the agent leaves its worker alone: it ends with the lease, and attempt 2 starts at the other site."""
    asked = submission(output=str(processes.folder / "out" / "{job}"), training=_long())
    job = processes.http.post("/v1/jobs", json=asked.model_dump(mode="json", by_alias=True)).json()["id"]
    until(lambda: processes.state(job) == "running", "attempt 1 runs")
    assert processes.live_attempts() == {1}
    lost, other = processes.places(job), {"east", "west"} - processes.places(job)
    processes.started[lost.pop()].kill()
    together = set[int]()

    def second_began() -> bool:
        together.update(processes.live_attempts() if 2 not in processes.workers() else ())
        return 2 in processes.workers()

    until(second_began, "attempt 2 begins")
    assert processes.live_attempts() == {2}, "the attempts never run together"
    assert together == {1}
    until(lambda: processes.state(job) == "running", "attempt 2 runs")
    assert processes.live_attempts() == {2}
    assert processes.places(job) == other


def _long() -> dict[str, int]:
    return {"steps": 2000, "sequence_length": 8, "micro_batch_size": 1, "global_batch_size": 2}
