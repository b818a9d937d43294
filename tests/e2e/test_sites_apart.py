"""A job over sites with storage of their own, with real agents: preempted, and restored from a copy."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from isthmus.cli.demo.demo_pool import DemoPool
from isthmus.client.api_client import ApiClient
from isthmus.client.client_settings import read_token
from isthmus.core.job import Job
from isthmus.core.model import load_model
from isthmus.core.views.api_views import JobView, Submission
from isthmus.train.checkpoint.checkpoint_folder import read_manifests
from tests.e2e.site import (
    all_metrics,
    as_one_process,
    at_step,
    clusters_of,
    make_job,
    running,
    state_is,
    wait_until,
)

pytestmark = pytest.mark.slow

STEPS, COMPARED_STEPS = 700, 100
"""The job is preempted at about step 30; it must not have ended before that."""

POOL = Path("/pool")
"""Where each site sees its own storage."""


@contextmanager
def apart(folder: Path, *sites: str) -> Iterator[DemoPool]:
    """A pool of sites with one core each, whose storage folders see nothing of each other."""
    storage = folder / "storage"
    for site in sites:
        (storage / site).mkdir(parents=True)
    with running(folder, clusters_of(dict.fromkeys(sites, 1), 1.0), storage) as pool:
        for site in sites:
            for name in ("model", "text"):
                shutil.copytree(folder / name, storage / site / "pool" / name)
        yield pool


def submit_apart(pool: DemoPool, job: Job) -> JobView:
    """Submit a job whose model lies at every site."""
    model = load_model(str(pool.folder / "model")).model_copy(update={"path": job.model})
    return pool.client.submit(Submission(job=job, model=model))


def place(pool: DemoPool, site: str, job: Job) -> Path:
    """The checkpoint folder of a job at a site."""
    return pool.folder / "storage" / site / job.checkpoints.folder.lstrip("/")


def preempt(pool: DemoPool, victim: str, sites: tuple[str, ...], **changes: object) -> str:
    """Let an urgent job take the sites of another; return its id once that has left them."""
    wanted = {"priority": "high", "policy": "manual", "placement": {"clusters": sites}, "parallel": {"pp": len(sites)}}
    urgent = submit_apart(pool, make_job(POOL, "urgent", **(wanted | changes))).id  # type: ignore[arg-type]
    plans = wait_until("plans that fit the idle pool", lambda: pool.client.plans(urgent).plans)
    pool.client.choose(urgent, plans[0].id)
    state_is(pool.client, urgent, "blocked")
    offered = wait_until("its sites have checked its files", lambda: pool.client.job(urgent).offer)
    assert {one.job for one in offered} == {victim}
    pool.client.preempt(urgent, offered)
    state_is(pool.client, urgent, "starting", "running", "stopping", "succeeded")
    return urgent


def logs_of(pool: DemoPool, job: str) -> str:
    """What the workers of a job have printed."""
    text, cursor = "", 0
    while (page := pool.client.logs(job, after=cursor)).chunks:
        text += "".join(one.text for one in page.chunks)
        cursor = page.next
    return text


def test_a_preempted_job_goes_on_at_its_sites_though_one_has_lost_its_disk(whole: bool, tmp_path: Path) -> None:
    """Storage roots, two sites, one copy of each part at the other; the model is wanted at the second site.

    1. The job trains at both and is preempted at both: its parts are verified there. 2. One site loses its disk.
    3. The job goes on at both from that very step, with the parts of the copy; its losses are those of one process.
    4. The model lies at the site that the job names, and nowhere else.
    """
    if not whole:
        pytest.skip("two minutes: --whole tries it; tests/train/test_site_checkpoints.py is the short form")
    roots = [{"path": "/pool/runs/{user}"}, *({"path": f"/pool/{one}", "access": "read"} for one in ("model", "text"))]
    (tmp_path / "policy.yaml").write_text(yaml.safe_dump({"storage": {"roots": roots}}))
    with apart(tmp_path, "north", "south") as pool:
        own = {
            "checkpoints": {"folder": "/pool/runs/demo/ck", "every_steps": 0},
            "output": "/pool/runs/demo/model",
            "output_site": "south",
        }
        job = make_job(POOL, "patient", steps=STEPS, priority="low", parallel={"pp": 2}, **own)
        patient = submit_apart(pool, job).id
        at_step(pool.client, patient, 5)
        theirs = {"checkpoints": {"folder": "/pool/runs/demo/urgent-ck"}, "output": "/pool/runs/demo/urgent"}
        urgent = preempt(pool, patient, ("north", "south"), steps=10, **theirs)
        saved = next(read_manifests(place(pool, "south", job)))
        assert next(read_manifests(place(pool, "north", job))) == saved
        shutil.rmtree(place(pool, "north", job))
        state_is(pool.client, urgent, "succeeded")
        view = state_is(pool.client, patient, "succeeded")
        metrics = all_metrics(pool.client, patient)
        assert (view.attempt > 1, view.restarts) == (True, 0)
        assert min(one.step for one in metrics if one.attempt > 1) == saved.step
        assert "from other sites" in logs_of(pool, patient)
        outputs = {site: tmp_path / "storage" / site / "pool/runs/demo/model" for site in ("north", "south")}
        assert (outputs["south"] / "model.safetensors.index.json").is_file()
        assert (outputs["south"] / "tokenizer.json").is_file()
        assert not list(outputs["north"].glob("*.safetensors"))
        as_one_process(
            make_job(pool.folder, "patient", steps=STEPS, every_steps=0),
            metrics,
            tmp_path / "alone",
            until=COMPARED_STEPS,
        )


def test_a_preempted_job_goes_on_at_two_other_sites(whole: bool, tmp_path: Path) -> None:
    """Four sites with storage of their own, and an object store that gets a sealed copy of each part.

    1. The job, which chooses its plan itself, trains at north and south: east and west take no parts yet. 2. Another
    one preempts it at both and stays there. 3. It is planned again, for east and west, and goes on from the very step
    that was verified, though what north and south hold is deleted; its losses are those of one process. 4. Its model
    lies at one of the two new sites.
    """
    if not whole:
        pytest.skip("minutes: --whole tries it; tests/train/test_object_copies.py is the short form")
    old, new = ("north", "south"), ("east", "west")
    with apart(tmp_path, *old, *new) as pool:
        with ApiClient(pool.server, read_token(tmp_path / "server" / "admin.token")) as admin:
            for site in new:
                admin.cordon_site(site, cordoned=True)
            copies = {"copies": 0, "copy_store": f"file://{tmp_path}/store"}
            own = {"checkpoints": {"folder": "/pool/runs/ck", "every_steps": 0, **copies}, "output": "/pool/runs/model"}
            job = make_job(POOL, "patient", steps=STEPS, priority="low", parallel={"pp": 2}, **own)
            patient = submit_apart(pool, job).id
            at_step(pool.client, patient, 5)
            assert {part.cluster for part in pool.client.job(patient).parts} == set(old)
            for site in new:
                admin.cordon_site(site, cordoned=False)
        theirs = {"checkpoints": {"folder": "/pool/runs/urgent-ck", "every_steps": 0}, "output": "/pool/runs/urgent"}
        urgent = preempt(pool, patient, old, steps=100 * STEPS, **theirs)
        saved = next(read_manifests(place(pool, "north", job)))
        for site in old:
            shutil.rmtree(place(pool, site, job))
        at_step(pool.client, patient, saved.step, attempt=2)
        assert {part.cluster for part in pool.client.job(patient).parts} == set(new)
        assert {one.step for one in all_metrics(pool.client, patient) if one.attempt == 1} >= set(range(saved.step))
        view = state_is(pool.client, patient, "succeeded")
        assert pool.client.job(urgent).state == "running", "it holds the chips of the former sites to the end"
        pool.client.cancel(urgent)
        metrics = all_metrics(pool.client, patient)
        assert view.restarts == 0
        assert min(one.step for one in metrics if one.attempt > 1) == saved.step
        assert "from the object store" in logs_of(pool, patient)
        holders = [site for site in (*old, *new) if list(place_of_model(pool, site).glob("*.safetensors"))]
        assert len(holders) == 1
        assert holders[0] in new
        as_one_process(
            make_job(pool.folder, "patient", steps=STEPS, every_steps=0),
            metrics,
            tmp_path / "alone",
            until=COMPARED_STEPS,
        )


def place_of_model(pool: DemoPool, site: str) -> Path:
    """The folder of the trained model at a site."""
    return pool.folder / "storage" / site / "pool/runs/model"
