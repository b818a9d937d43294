"""Training through proxies and RoCE gateways by `pool.yaml` alone: every loss has the bits of a run without them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from isthmus.core.job import Job
from isthmus.core.messages.agent_messages import RankMap, StepMetrics
from isthmus.core.messages.worker_folder import WorkerFolder, WorkerSpec
from isthmus.core.plan import Plan
from isthmus.core.pool import Pool
from isthmus.wan.management_network import management_network
from isthmus.wan.netns import (
    NAMESPACE_FOLDER,
    effective_capabilities,
    emulated_namespaces,
    stale_namespaces,
    unavailable_reason,
)
from tests.e2e.site import all_metrics, choose, clusters_of, losses, make_job, running, state_is, submit, wait_until
from tests.forks import ForkedProgram
from tests.free_ports import free_ports

pytestmark = pytest.mark.slow
STEPS = 12
WHY = unavailable_reason(effective_capabilities())


def crossing_pool(folder: Path) -> dict[str, Any]:
    """Return two clusters whose workers cross a lossy link through proxies; write their key."""
    key = folder / "link.key"
    key.touch(mode=0o600)
    key.write_text("5a" * 32)
    document = clusters_of({"nanjing": 1, "hangzhou": 1}, 1.0)
    for cluster in document["clusters"]:
        cluster["access"] = {"proxy": {"listen": f"127.0.0.1:{free_ports(1)[0]}"}}
    document["links"][0] |= {"loss": 0.001, "crossing": {"key": "link.key", "transport": "tcp", "streams": 2}}
    return document


def train_directly(job: Job, plan: Plan, folder: Path) -> dict[int, float]:
    """Run the same plan with workers that connect directly, without server, agents, links or proxies."""
    workers = [WorkerFolder(folder / str(stage)) for stage in range(len(plan.stages))]
    own = {"checkpoints": job.checkpoints.model_copy(update={"folder": str(folder / "checkpoints")})}
    alone = job.model_copy(update=own | {"output": str(folder / "result")})
    for rank, worker in enumerate(workers):
        worker.write_spec(WorkerSpec(run="direct", attempt=1, rank=rank, job=alone, plan=plan))
    processes = [ForkedProgram("isthmus.train.process.worker", one.path, one.log_path) for one in workers]
    ranks = RankMap(workers=tuple(wait_until("a worker checks in", one.read_checkin) for one in workers))
    for worker in workers:
        worker.write_rank_map(ranks)
    found: dict[int, float] = {}
    for process, worker in zip(processes, workers, strict=True):
        assert process.wait(120) == 0, worker.log_path.read_text()
        lines = worker.metrics_path.read_text().splitlines() if worker.metrics_path.exists() else []
        found |= losses([StepMetrics.model_validate_json(line) for line in lines])
    return found


def test_training_through_proxies_keeps_every_bit_of_the_loss(tmp_path: Path) -> None:
    """The agents start proxies from the pool file; all traffic of workers crosses them; losses equal a direct run's."""
    with running(tmp_path, crossing_pool(tmp_path)) as pool:
        job = make_job(tmp_path, "crossed", steps=STEPS, every_steps=0, policy="manual")
        view = submit(pool.client, job)
        plan = choose(pool.client, view.id, lambda one: len(one.clusters) == 2)
        state_is(pool.client, view.id, "succeeded")
        crossed = losses(all_metrics(pool.client, view.id))
        tunnels = [
            tunnel
            for site in ("nanjing", "hangzhou")
            for tunnel in wait_until(
                "the proxy has written its state",
                lambda site=site: json.loads((tmp_path / site / "crossings/proxy/proxy.json").read_text())["tunnels"],
            )
        ]
        assert sum(one["received_bytes"] for one in tunnels) > STEPS * 4 * 32 * 32 * 4
    assert len(crossed) == STEPS
    assert crossed == train_directly(job, plan, tmp_path / "direct")


@pytest.mark.parametrize("mode", ["proxy", "gateway"])
def test_the_demo_shows_equal_losses(mode: str, tmp_path: Path, whole: bool) -> None:
    """`isthmus demo --wan` trains through proxies, or gateways as root, and its losses equal those without."""
    if not whole:
        pytest.skip("two demos of minutes: with --whole")
    command = [sys.executable, "-m", "isthmus", "demo", "--wan", mode, "--steps", "12", "--json"]
    done = subprocess.run(
        [*command, "--state", str(tmp_path / "demo")], capture_output=True, text=True, check=False, timeout=1200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["losses_equal"]
    assert result["losses_compared"] == 12
    assert result["wan"] == ("gateway" if mode == "gateway" and os.geteuid() == 0 else "proxy")
    assert any(one["by"] == "proxy" and one["sent_bytes"] > 0 for one in result["crossed"])


@pytest.mark.root
@pytest.mark.skipif(WHY is not None, reason=f"{WHY}; run as root")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_an_ended_demo_leaves_no_network(number: int, tmp_path: Path, whole: bool) -> None:
    """SIGTERM and Ctrl-C remove namespaces and bridge; what a kill leaves, the next start removes."""
    if not whole:
        pytest.skip("three demos that are ended: with --whole")
    command = [sys.executable, "-m", "isthmus", "demo", "--wan", "proxy", "--state", str(tmp_path / "demo")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True) as demo:
        bridge = Path(f"/sys/class/net/isthbr{demo.pid}")
        wait_until("the demo's sites are joined", bridge.exists)
        wait_until("the demo's server runs", (tmp_path / "demo" / "pool.yaml").exists)
        demo.send_signal(number)
        demo.wait(60)
    if number == signal.SIGKILL:
        pool = Pool.model_validate(crossing_pool(tmp_path))
        wait_until("the relay has ended", lambda: not stale_namespaces())
        with emulated_namespaces(pool) as namespaces, management_network(namespaces):
            assert not bridge.exists()
    assert not bridge.exists()
    assert not [one for one in NAMESPACE_FOLDER.iterdir() if one.name.startswith(f"isthmus-{demo.pid}-")]
