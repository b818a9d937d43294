"""Active rescheduling with real processes: a running job is moved to another node so that a wider one can start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from isthmus.cli.demo.demo_pool import DemoPool
from isthmus.core.views.api_views import HistoryEvent
from tests.e2e.site import (
    all_metrics,
    at_step,
    clusters_of,
    losses,
    make_job,
    make_model,
    running,
    state_is,
    submit,
    wait_until,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

STEPS, EVERY = 3_000, 50
SCALE = 0.02
"""Speed of the emulated cores: workers wait for most of a step, so six of them fit two cores."""


@pytest.mark.parametrize("kills", [False, True], ids=["undisturbed", "killed"])
def test_a_running_job_is_moved_and_goes_on_where_it_was_saved(tmp_path: Path, whole: bool, kills: bool) -> None:
    """Two nodes of two cores have one job each; a third job wants both cores of a node.

    1. A local job of the owner lets `one` and `two` start on different nodes, and ends. 2. `wide` waits: two cores are
    free, on two nodes. 3. One of the others is saved, stopped and started on the other's node; `wide` starts. In the
    second case the agent and the server are killed meanwhile. 4. The two jobs are the same, so the losses of the moved
    one must be those of the other, step by step; no step was lost that was saved.
    """
    if not whole:
        pytest.skip("six workers start: python -m pytest --whole")
    clusters = clusters_of({"north": 2, "south": 1}, 1.0)
    clusters["clusters"][0]["node_groups"][0] |= {
        "nodes": 2, "topology": {}, "virtual": {"memory_scale": 1.0, "compute_scale": SCALE},
    }  # fmt: skip
    rules = {"at_once": 1, "rest_s": 0, "after_s": 0, "pause_s": 1}
    (tmp_path / "policy.yaml").write_text(yaml.safe_dump({"moves": rules}))
    with running(tmp_path, clusters) as pool:
        client, own = pool.client, tmp_path / "north" / "local" / "own"
        make_model(tmp_path, "flat", num_hidden_layers=1, num_key_value_heads=2)
        own.mkdir(parents=True)
        filler = {"command": ["sleep", "600"], "node_group": "cpu", "chips": 1}
        (own / "job.json").write_text(json.dumps(filler))
        wait_until("the owner's job runs", lambda: _free_at(pool, "north") == {"cpu": 3})
        ids, north = list[str](), {"placement": {"clusters": ["north"]}}
        for name in ("one", "two"):
            job = make_job(
                tmp_path, name, steps=STEPS, every_steps=EVERY, model=str(tmp_path / "flat"),
                parallel={"tp": 1, "pp": 1, "dp": 1}, **north,
            )  # fmt: skip
            ids.append(submit(client, job).id)
            at_step(client, ids[-1], 2)
        (own / "cancel").touch()
        wide_job = make_job(
            tmp_path, "wide", steps=5, every_steps=0, model=str(tmp_path / "flat"),
            parallel={"tp": 2, "pp": 1, "dp": 1}, **north,
        )  # fmt: skip
        wide = submit(client, wide_job).id
        if kills:
            _kill_in_the_middle(pool, wide)
        state_is(client, wide, "succeeded", timeout_s=600)
        moved = [job for job in ids if client.job(job).attempt == 2]
        assert len(moved) == 1
        (other,) = set(ids) - set(moved)
        at_step(client, moved[0], 0, attempt=2)
        metrics = all_metrics(client, moved[0])
        last, first = (
            max(one.step for one in metrics if one.attempt == 1),
            min(one.step for one in metrics if one.attempt == 2),
        )
        assert 0 <= last + 1 - first < EVERY, "less than a checkpoint interval is done again"
        at_step(client, other, first + 2)
        at_step(client, moved[0], first + 2, attempt=2)
        mine, theirs = losses(all_metrics(client, moved[0])), losses(all_metrics(client, other))
        shared = mine.keys() & theirs.keys()
        assert first + 1 in shared
        assert [mine[step] for step in sorted(shared)] == [theirs[step] for step in sorted(shared)]
        view = client.job(moved[0])
        assert (view.restarts, view.state) == (0, "running")
        (told,) = [one for one in _history(pool, moved[0]) if one.kind == "moved"]
        assert told.text.startswith(f"to other devices, so that job {wide} has a place, checkpoint at step ")
        for job in ids:
            client.cancel(job)
            state_is(client, job, "cancelled")


def _free_at(pool: DemoPool, cluster: str) -> dict[str, int]:
    return next(dict(one.free_chips) for one in pool.client.pool().clusters if one.cluster.name == cluster)


def _history(pool: DemoPool, job: str) -> list[HistoryEvent]:
    return list(pool.client.history(job).events)


def _kill_in_the_middle(pool: DemoPool, wide: str) -> None:
    """Kill the agent and the server while a job is moved, and start both again."""
    state_is(pool.client, wide, "preempting", "preparing", "starting", "running", "succeeded")
    pool.kill_and_restart("agent-north")
    pool.kill_and_restart("server")
