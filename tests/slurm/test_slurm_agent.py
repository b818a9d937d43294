"""An agent on a real Slurm: parts get the cards that Slurm names, and give everything back."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from isthmus.agent.adapters.scheduler_adapter import HoldRequest, RankNeed, RankStart
from isthmus.core.errors import UnavailableError
from tests.agent.running_agent import LOOP
from tests.site.samples import order
from tests.slurm.running_agent import RunningAgent
from tests.slurm.samples import adapter_of
from tests.slurm.slurm_cluster import SlurmCluster

PLACES = ("east/h20", "east/h20")


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
    agent.until_cards_are_named()
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
    agent.tick_for(1.0)
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


@pytest.mark.slow
def test_a_part_is_refused_if_slurm_would_preempt_another_job(agent: RunningAgent, alpha: SlurmCluster) -> None:
    """Two jobs could make room; an order that names the one that Slurm would not take disturbs neither."""
    service = agent.service
    service.machine.site.policy = service.machine.site.policy.model_copy(update={"preemptible_from": "middle"})
    names = []
    for _ in range(2):
        submitted = alpha.run("sbatch", "--parsable", "--gpus=4", "-N1", "--wrap", "sleep 600", "-o", "/dev/null")
        names.append(f"slurm-{submitted.strip()}")
        agent.until("the user's job is seen", lambda: (names[-1], 0) in service.machine.parts)
    needs = (RankNeed(node_group="h20", num_cards=1),) * 2
    request = HoldRequest(id="0" * 32, job="a", attempt=1, ranks=needs, lease_s=60, victims=tuple(names))
    (chosen,) = service.adapter.probe(request).victims
    (spared,) = set(names) - {chosen}
    wanted = order("ready", places=PLACES, victims=({"job": spared, "attempt": 0},), priority="high")
    agent.until("refused", lambda: agent.state() == "refused", wanted)
    assert f"would preempt {chosen}, which the order does not name" in agent.states["a/1"]
    wanted = order("ready", job="b", places=PLACES, victims=({"job": chosen, "attempt": 0},), priority="high")
    agent.until("ready", lambda: agent.state("b") == "ready", wanted)
    assert alpha.run("squeue", "-h", "-o", "%t").split() == ["R", "R"]
    alpha.run("scancel", "--user=root")


@pytest.mark.slow
def test_a_hold_that_slurm_has_lost_ends_and_asks_for_nothing(alpha: SlurmCluster, tmp_path: Path) -> None:
    """Two looks agree that the allocation is gone: the id is used up, no other allocation is made under it, and a start
    on the cards of the lost one is an error that may be repeated."""
    adapter = adapter_of(alpha, tmp_path / "state", LOOP)
    need = RankNeed(node_group="h20", num_cards=1)
    request = HoldRequest(id="1" * 32, job="a", attempt=1, ranks=(need,), lease_s=60)
    hold = adapter.hold(request)
    assert hold.state == "granted"
    alpha.run("scancel", "--user=root")
    alpha.wait_empty()
    alpha.wait_idle()
    assert [adapter.hold(request).state for _ in range(3)] == ["granted", "ended", "ended"]
    assert alpha.live_jobs() == []
    folder = tmp_path / "worker"
    folder.mkdir()
    with pytest.raises(UnavailableError, match="not granted, or has other cards"):
        adapter.start(RankStart(folder=folder, cards=("h20/alpha2/9",), hold=request.id))


@pytest.mark.slow
def test_the_limit_of_a_users_job_is_when_it_ends(agent: RunningAgent, alpha: SlurmCluster) -> None:
    """The report to the server has Slurm's own time; a job without a limit has no end."""
    limited, endless = [
        alpha.run("sbatch", "--parsable", limit, "--gpus=1", "--wrap", "sleep 600", "-o", "/dev/null").strip()
        for limit in ("--time=30", "--time=UNLIMITED")
    ]
    local_jobs = agent.service.machine.local_jobs
    agent.until("the users' jobs are seen", lambda: len(local_jobs()) == 2)
    ends = {job.name: job.ends_at_s for job in local_jobs()}
    said = alpha.run("squeue", "-h", "-j", limited, "-o", "%e").strip()
    assert ends == {f"slurm-{limited}": datetime.fromisoformat(said).timestamp(), f"slurm-{endless}": None}
    alpha.run("scancel", limited, endless)
