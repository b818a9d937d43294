"""Rendered images at a real Slurm: each rank runs in a container inside its step, which leaves nothing behind."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from isthmus.agent.containers.image_tool import build_image
from isthmus.core.job import Job
from isthmus.core.messages.agent_messages import DesiredState, PartOrder
from isthmus.core.owner.owner_policy import OwnerPolicy
from tests.agent.test_containers import HOST, why_not
from tests.site.samples import JOB, order
from tests.slurm.running_agent import RunningAgent
from tests.slurm.slurm_cluster import SlurmCluster

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.skipif(bool(why_not()), reason=why_not())]

LIMIT_BYTES = 512 << 20
PROGRAM = """
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
seen = {
    "pid": os.getpid(),
    "capabilities": [l.split()[1] for l in open("/proc/self/status") if l.startswith("CapEff")][0],
    "variables": {name: os.environ.get(name) for name in ("NCCL_DEBUG", "PART_OF", "ISTHMUS_CARDS")},
    "lanes": json.loads((folder / "spec.json").read_text())["lanes"],
}
(folder / "seen.tmp").write_text(json.dumps(seen))
(folder / "seen.tmp").rename(folder / "seen.json")
while True: time.sleep(0.05)
"""


@pytest.fixture
def agent(alpha: SlurmCluster, tmp_path: Path) -> Iterator[RunningAgent]:
    tmp_path.chmod(0o755)
    build_image(tmp_path / "images", "host", "1", HOST)
    (tmp_path / "templates").mkdir()
    settings = [
        {"name": "PART_OF", "value": "${cluster}", "passed_as": "environment"},
        {"name": "memory.bytes", "value": str(LIMIT_BYTES), "passed_as": "container"},
        {"name": "lanes", "value": "9", "passed_as": "file"},
    ]
    template = {"name": "site", "class": "resources", "settings": settings}
    (tmp_path / "templates" / "site.yaml").write_text(yaml.safe_dump(template))
    workers = {"templates": str(tmp_path / "templates"), "containers": {"images": str(tmp_path / "images")}}
    policy = OwnerPolicy.model_validate({"workers": workers})
    alpha.wait_empty()
    agent = RunningAgent(alpha, tmp_path / "state", (sys.executable, "-c", PROGRAM), policy)
    agent.until("cards are seen", lambda: agent.service.machine.free_chips() == {"h20": 8})
    yield agent
    agent.service.shut_down()
    agent.until("the agent stops", lambda: agent.service.stopped)


def wanted(desired: DesiredState, **runtime: object) -> PartOrder:
    job = Job.model_validate(JOB.model_dump() | {"runtime": runtime})
    return order(desired, places=("east/h20", "east/h20")).model_copy(update={"spec": job})


def start(agent: RunningAgent) -> list[Path]:
    """Start a part; return the folders of its ranks once both run."""
    for desired in ("ready", "prepared", "running"):
        asked = wanted(desired, image="host:1", communication={"NCCL_DEBUG": "INFO"})
        agent.until(desired, lambda desired=desired: agent.state() == desired, asked)
    part = agent.service.machine.parts["a", 1]
    folders = [agent.service.state_folder.worker_folder(part, rank) for rank in part.workers]
    agent.until("both ranks run", lambda: all((folder / "seen.json").exists() for folder in folders))
    return folders


def left(agent: RunningAgent) -> list[str]:
    """Return the containers that `runc` knows."""
    known = agent.service.state_folder.path / "containers"
    return [one.name for one in known.iterdir()] if known.exists() else []


def test_ranks_at_slurm_run_in_containers_with_the_settings_of_job_and_owner(agent: RunningAgent) -> None:
    """What the program sees is what `render.json` says; a stop ends container and step."""
    for folder in start(agent):
        seen = json.loads((folder / "seen.json").read_text())
        cards = seen["variables"].pop("ISTHMUS_CARDS")
        assert cards.startswith("h20/alpha")
        assert seen == {
            "pid": 1, "capabilities": "0" * 16, "variables": {"NCCL_DEBUG": "INFO", "PART_OF": "east"}, "lanes": 9
        }  # fmt: skip
        limits = json.loads((folder / "bundle" / "config.json").read_text())["linux"]["resources"]["memory"]
        assert limits["limit"] == LIMIT_BYTES
        known = {one["name"]: one["from"] for one in json.loads((folder / "render.json").read_text())}
        assert (known["NCCL_DEBUG"], known["PART_OF"]) == ("job", "template site")
    agent.until("released", lambda: agent.state() == "released", wanted("released"))
    agent.until("Slurm has its cards back", lambda: agent.num_jobs() == 0)
    assert left(agent) == []


def test_a_killed_rank_leaves_no_container(agent: RunningAgent) -> None:
    """1. The step's runner kills every process of the rank, also the watcher of the container. 2. It then removes the
    container, before the end is recorded."""
    folders = start(agent)
    assert len(left(agent)) == 2
    for folder in folders:
        agent.service.adapter.stop(folder, force=True)
    agent.until("both have ended", lambda: all((folder / "exit").exists() for folder in folders))
    assert left(agent) == []
    assert not [folder for folder in folders if (folder / "bundle" / "rootfs").exists()]
    agent.until("released", lambda: agent.state() == "released", wanted("released"))
    agent.until("Slurm has its cards back", lambda: agent.num_jobs() == 0)


def test_an_image_that_the_site_lacks_asks_slurm_for_nothing(agent: RunningAgent) -> None:
    """The order is refused with the nearest name, before an allocation."""
    agent.until("refused", lambda: agent.state() == "refused", wanted("ready", image="hots:1"))
    assert "did you mean 'host:1'?" in agent.states["a/1"]
    assert agent.num_jobs() == 0
