"""Reinforcement learning the whole way: three owners, one trains, two decode; as parts of one job."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from isthmus.cli.demo.demo_pool import DemoPool
from isthmus.core.messages.agent_messages import StepMetrics
from isthmus.core.process.confined_start import MIN_LANDLOCK_ABI, landlock_abi
from isthmus.rl.rollout.read_ledger import read_ledger
from tests.e2e.site import all_metrics, clusters_of, processes_in, running, state_is, submit, wait_until
from tests.forks import preload
from tests.rl.rl_jobs import make_rl_job

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(landlock_abi() < MIN_LANDLOCK_ABI, reason="this kernel has no Landlock"),
]
STEPS = 40
preload("isthmus.rl.process.rl_supervisor")


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoPool]:
    """Three owners with a core each, who admit programs below one folder."""
    folder = tmp_path_factory.mktemp("rl")
    (folder / "users").mkdir()
    policy = {"storage": {"roots": [{"path": str(folder / "users")}]}, "workers": {"commands": True}}
    (folder / "policy.yaml").write_text(yaml.safe_dump(policy))
    with running(folder, clusters_of({"a": 1, "b": 1, "c": 1}, 1.0)) as made:
        yield made


def kinds(pool: DemoPool, job_id: str) -> list[str]:
    """Return what has happened to a job so far."""
    return [one.kind for one in pool.client.history(job_id).events]


def test_one_job_trains_at_one_owner_and_decodes_at_two_of_which_one_dies(pool: DemoPool) -> None:
    """Its parts start together at three sites; weights go down, trajectories come up; the ledger has all of them.

    The processes of c are killed in the middle: the job goes on with b in the same attempt, and no count changes.
    """
    place = pool.folder / "users" / "sums"
    job = make_rl_job(
        place, steps=STEPS, placement={"train": ["a"], "rollouts": ["b", "c"]}, policy="auto", rl={"max_staleness": 1}
    )
    view = submit(pool.client, job)
    state_is(pool.client, view.id, "running")
    wait_until("a step is done", lambda: all_metrics(pool.client, view.id))
    for process in processes_in(pool.folder / "c"):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended with one that was killed before it
            if "rl_supervisor" in " ".join(process.cmdline()):
                process.kill()
    done = state_is(pool.client, view.id, "succeeded")
    assert done.plan is not None
    assert [one.cluster for one in done.plan.rollouts] == ["b", "c"]
    assert done.attempt == 1
    (left,) = [one for one in pool.client.history(view.id).events if one.kind == "left"]
    assert left.cluster == "c"

    def of_trainer() -> list[StepMetrics]:
        return [one for one in all_metrics(pool.client, view.id) if one.rank == 0]

    metrics = wait_until("all steps are known", lambda: len(one := of_trainer()) == STEPS and one)
    assert all(one.cluster == "a" and one.values["reward"] is not None for one in metrics)
    shown = subprocess.run(
        [sys.executable, "-m", "isthmus.rl.process.show_ledger", job.checkpoints.folder],
        capture_output=True,
        check=True,
    )
    found = json.loads(shown.stdout)
    assert found["samples"]["trained"] == STEPS * job.training.global_batch_size
    assert (found["lost"], found["doubled"]) == (0, 0)
    assert set(found["tokens"]) <= {"b", "c"}
    assert Path(job.output, "config.json").exists()


def test_a_site_that_died_decodes_again_in_the_same_attempt(pool: DemoPool, whole: bool) -> None:
    """Its part is ordered again, it gets weights, and its tokens are trained on; nothing is lost or doubled."""
    if not whole:
        pytest.skip("starts four more ranks")
    place = pool.folder / "users" / "again"
    job = make_rl_job(
        place, steps=100_000, placement={"train": ["a"], "rollouts": ["b", "c"]}, policy="auto", rl={"max_staleness": 1}
    )
    view = submit(pool.client, job)
    state_is(pool.client, view.id, "running")
    wait_until("a step is done", lambda: all_metrics(pool.client, view.id))
    for process in processes_in(pool.folder / "c"):
        if "rl_supervisor" in " ".join(process.cmdline()):
            process.kill()
    wait_until("c has joined again", lambda: "joined" in kinds(pool, view.id))
    before = max(one.step for one in all_metrics(pool.client, view.id) if one.rank == 0)

    def decodes_again() -> bool:
        found = [one for one in all_metrics(pool.client, view.id) if one.rank == 2 and one.step > before]
        return any(one.values["decoded_tokens"] for one in found)

    wait_until("c decodes", decodes_again)
    now = pool.client.job(view.id)
    assert (now.state, now.attempt) == ("running", 1)
    pool.client.cancel(view.id)
    state_is(pool.client, view.id, "cancelled")
    found = read_ledger(Path(job.checkpoints.folder) / "rollouts")
    assert (found.lost, found.doubled) == (0, 0)
    assert set(found.tokens) == {"b", "c"}
