"""The whole way with real processes: server, three agents, emulated links, workers."""

import itertools
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from isthmus.cli.demo.demo_pool import DemoPool
from isthmus.core.errors import AuthError, ConflictError, NotFoundError
from isthmus.core.model import load_model
from isthmus.core.views.api_views import Submission
from tests.e2e.site import (
    all_metrics,
    as_one_process,
    at_step,
    choose,
    losses,
    make_job,
    make_model,
    processes_in,
    state_is,
    submit,
    wait_until,
)

pytestmark = pytest.mark.slow
tries = itertools.count()

TWO_RANKS = {"parallel": {"pp": 2, "tp": 1, "dp": 1}}
"""Of a job in the pool of pairs: each rank's start costs seconds of CPU."""


@pytest.fixture
def site(three: DemoPool) -> DemoPool:
    """The pool of three clusters."""
    return three


def workers_of(site, job_id):
    """The supervisors of a job's ranks: what their wrappers have started."""
    return [
        process
        for process in processes_in(site.folder)
        if "isthmus.train.process.supervisor" in " ".join(process.cmdline())
        and job_id in " ".join(process.cmdline())
        and process.name() != "sh"
        and process.parent().name() == "sh"
    ]


def nothing_is_held(site):
    """Every card is free, and no worker runs."""
    pool = site.client.pool()
    free = all(c.free_chips == {g.name: g.num_chips for g in c.cluster.node_groups} for c in pool.clusters)
    return free and not [p for p in processes_in(site.folder) if "isthmus.train." in " ".join(p.cmdline())]


def ended(site, job_id):
    return state_is(site.client, job_id, "succeeded", "failed", "cancelled")


def choose_three_clusters(site, view):
    return choose(site.client, view.id, lambda plan: len(plan.clusters) == 3)


def choose_two_clusters(site, view):
    return choose(site.client, view.id, lambda plan: len(plan.clusters) == 2)


def test_a_killed_worker_stops_all_sites_and_the_resumed_run_equals_one_process(site, tmp_path):
    """Three clusters, uneven layers, tied embeddings, two kills: the loss curve is that of one process.

    A rank's process is replaced in place, and the attempt goes on; without its supervisor the attempt ends.
    """
    job = make_job(site.folder, f"killed-{next(tries)}", steps=120, policy="manual")
    view = submit(site.client, job)
    plan = choose_three_clusters(site, view)
    assert len({stage.num_layers for stage in plan.stages}) > 1, "an uneven split was wanted"
    at_step(site.client, view.id, 10)
    assert not list(site.folder.rglob("keys.json")), "workers remove the keys of their links"
    first = workers_of(site, view.id)
    process = first[-1].children()[0]
    os.kill(process.pid, signal.SIGKILL)
    wait_until("another process has taken its place", lambda: first[-1].children() not in ([], [process]))
    at_step(site.client, view.id, 30)
    assert site.client.job(view.id).attempt == 1
    os.kill(first[0].pid, signal.SIGKILL)
    wait_until("the first attempt is gone at all sites", lambda: not any(p.is_running() for p in first))
    last = ended(site, view.id)
    assert (last.state, last.attempt, last.restarts) == ("succeeded", 2, 1)
    alone = as_one_process(job, all_metrics(site.client, view.id), tmp_path)
    wait_until("everything is free again", lambda: nothing_is_held(site))
    assert_opens_in_transformers(Path(job.output), Path(alone.output))


def assert_opens_in_transformers(one, other):
    import torch
    from transformers import AutoModelForCausalLM

    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (one, other)]
    for (name, a), (_, b) in zip(*(m.named_parameters() for m in models), strict=True):
        assert torch.allclose(a, b, atol=1e-4), name


def test_a_rehearsal_takes_the_predicted_time_and_leaves_figures_alone(pairs):
    """`compute: virtual`: data that do not exist are not read; no loss, no checkpoint, no result."""
    site = pairs
    nowhere = {"paths": [str(site.folder / "nowhere")]}
    job = make_job(site.folder, "rehearsed", steps=6, policy="manual", compute="virtual", data=nowhere, **TWO_RANKS)
    view = submit(site.client, job)
    plan = choose_two_clusters(site, view)
    assert ended(site, view.id).state == "succeeded"
    metrics = all_metrics(site.client, view.id)
    assert {(m.rank, m.step) for m in metrics} == {(rank, step) for rank in range(2) for step in range(6)}
    assert losses(metrics) == {}
    for one in metrics:
        time = plan.predicted.stage_times[one.rank]
        assert one.values["compute_s"] >= 4 * (time.forward_s + time.backward_s)
    assert not (site.folder / "rehearsed").exists()
    wait_until("everything is free again", lambda: nothing_is_held(site))


def test_missing_data_ends_the_job_before_any_site_holds_chips(site):
    """The reason names site, path and advice within seconds, and no worker was started for it.

    A dry run of the same job shows the finding of each site without a job, and leaves no folder behind.
    """
    missing = str(site.folder / "nowhere")
    job = make_job(site.folder, "no-data", data={"paths": [missing], "tokenizer": "bytes"})
    found = site.client.dry_run(Submission(job=job, model=load_model(job.model)))
    results = {one.cluster: {r.name: r.detail for r in one.results if r.status == "failed"} for one in found.preflight}
    reading = [stage.cluster for stage in found.plans.plans[0].pipeline()]
    assert results == {
        name: {"data": f"{missing}: no such file or folder"} if name in (reading[0], reading[-1]) else {}
        for name in reading
    }
    wait_until("the dry run has left nothing", lambda: not (site.folder / "no-data").exists())
    view = ended(site, submit(site.client, job).id)
    assert view.changed_s - view.submitted_s < 10
    assert (view.state, view.restarts, {part.observed for part in view.parts} & {"prepared", "running"}) == (
        "failed",
        0,
        set(),
    )
    assert f"data: {missing}: no such file or folder (copy it to this site" in view.reason
    assert not list(site.folder.glob(f"*/runs/{view.id}/*/rank-*")), "a worker was started"
    wait_until("everything is free again", lambda: nothing_is_held(site))


def test_a_worker_that_always_dies_is_restarted_a_stated_number_of_times(pairs):
    """`max_restarts` 1: two attempts, then failed; the reason is the signal, not who lost a peer by it."""
    site = pairs
    job = submit(site.client, make_job(site.folder, "hopeless", steps=100_000, max_restarts=1, **TWO_RANKS))
    for attempt in (1, 2):
        at_step(site.client, job.id, 0, attempt)
        os.kill(max(process.pid for process in workers_of(site, job.id)), signal.SIGKILL)
    view = ended(site, job.id)
    assert (view.state, view.attempt) == ("failed", 2)
    assert "was ended by signal 9" in view.reason
    wait_until("everything is free again", lambda: nothing_is_held(site))


def test_cancelling_releases_everything_and_only_an_ended_job_can_be_deleted(pairs):
    """Cancel stops workers at every site; delete forgets."""
    site = pairs
    view = submit(site.client, make_job(site.folder, "cancelled", steps=100_000, policy="manual", **TWO_RANKS))
    choose_two_clusters(site, view)
    at_step(site.client, view.id, 1)
    with pytest.raises(ConflictError):
        site.client.delete(view.id)
    site.client.cancel(view.id)
    assert ended(site, view.id).state == "cancelled"
    wait_until("everything is free again", lambda: nothing_is_held(site))
    site.client.delete(view.id)
    with pytest.raises(NotFoundError):
        site.client.job(view.id)


def test_more_stages_than_layers_are_never_planned(site):
    """Two layers make at most two stages, and three clusters are refused with the reason."""
    model = make_model(site.folder, "two-layers", num_hidden_layers=2)
    view = submit(site.client, make_job(site.folder, "small", model=model, policy="manual"))
    state_is(site.client, view.id, "choosing")
    plans = site.client.plans(view.id)
    assert all(len(plan.stages) <= 2 for plan in plans.plans)
    assert any("fewer than 3 clusters" in one.reason for one in plans.refused)
    site.client.cancel(view.id)


def isthmus(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "isthmus", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_an_agent_with_another_owners_token_is_refused(site):
    """It ends with the code of `AuthError` and says why; the cluster's own agent goes on."""
    token = site.folder / "south-owner.token"
    done = isthmus(
        *("agent", "--server", site.server, "--pool", str(site.folder / "pool.yaml"), "--cluster", "north"),
        *("--state", str(site.folder / "intruder"), "--token-file", str(token)),
    )
    assert done.returncode == AuthError.exit_code, done.stderr
    assert "owner" in done.stderr
    assert token.read_text().strip() not in done.stderr + done.stdout
    assert all(cluster.connected for cluster in site.client.pool().clusters)


def test_a_port_in_use_is_named_and_nothing_is_left(site, tmp_path):
    """A second server on the same port says so, exits, and leaves no lock behind."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = isthmus(
            *("serve", "--state", str(tmp_path / "second"), "--pool", str(site.folder / "pool.yaml")),
            *("--port", str(port)),
        )
    assert done.returncode == 8
    assert f"{port}" in done.stderr
    assert not processes_in(tmp_path)
