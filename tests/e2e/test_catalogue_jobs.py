"""Two sites without a shared disk bring a model and a data set by URL, once each, and train on them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from isthmus.cli.demo.demo_pool import DemoPool
from isthmus.client.api_client import ApiClient
from isthmus.client.client import Client
from isthmus.client.file_manifest import folder_manifest
from isthmus.core.errors import ConflictError
from isthmus.core.job import Job
from isthmus.core.model import load_model
from isthmus.core.pool import Pool
from isthmus.core.views.catalogue_views import VersionAddition
from isthmus.core.views.queue_status import DryRun
from tests.agent.file_server import LOOPBACK, FileServer, serving
from tests.e2e.site import (
    CONFIG,
    all_metrics,
    as_one_process,
    choose,
    clusters_of,
    losses,
    make_job,
    state_is,
    wait_until,
)

pytestmark = pytest.mark.slow
SITES = {"north": 1, "south": 1}


@contextmanager
def apart(folder: Path, policy: dict[str, object]) -> Iterator[tuple[DemoPool, FileServer]]:
    """A pool of sites with a disk each, and a server that holds a model and a text at `folder / "web"`."""
    web = folder / "web"
    (web / "tiny").mkdir(parents=True)
    (web / "tiny" / "config.json").write_text(json.dumps(CONFIG))
    (web / "text").mkdir()
    words = ["the", "isthmus", "joins", "two", "lands", "by", "a", "narrow", "strip"]
    for number in range(len(words)):
        text = " ".join(words[(i * i + number) % len(words)] for i in range(400))
        (web / "text" / f"{number:02}.txt").write_text(text)
    clusters = clusters_of(SITES, 1.0)
    (folder / "pool.yaml").write_text(yaml.safe_dump(clusters))
    (folder / "policy.yaml").write_text(yaml.safe_dump(policy))
    for site in SITES:
        (folder / "disks" / site).mkdir(parents=True)
    files = {file.relative_to(web).as_posix(): file.read_bytes() for file in web.rglob("*") if file.is_file()}
    with (
        serving(files) as source,
        DemoPool(folder, Pool.model_validate(clusters), storage=folder / "disks") as pool,
    ):
        yield pool, source


def add(client: ApiClient, web: Path, source: FileServer) -> None:
    """Add both entries: their digests are those of the folders that the server serves."""
    for kind, name in (("model", "tiny"), ("data", "text")):
        client.add_version(
            VersionAddition.model_validate({
                "kind": kind, "name": name, "source": f"{source.url}/{name}", "manifest": folder_manifest(web / name),
                "model": load_model(web / name) if kind == "model" else None,
            })
        )  # fmt: skip


def catalogue_job(folder: Path, name: str, owner: str = "", **changes: object) -> Job:
    """A job that names both entries, and folders of its own below the disk of each site."""
    job = make_job(folder, name, steps=6, every_steps=0, policy="manual", **changes)
    data = job.data.model_copy(update={"paths": (f"catalogue:{owner}text",), "tokenizer": "bytes"})
    own = {
        "checkpoints": job.checkpoints.model_copy(update={"folder": f"/runs/{name}/ck"}),
        "output": f"/runs/{name}/out",
    }
    return job.model_copy(update=own | {"model": f"catalogue:{owner}tiny", "data": data})


def dry_run(client: Client, job: Job) -> DryRun:
    """The plans of a job that is not submitted; a planner that others keep busy is asked again."""

    def ask() -> DryRun | None:
        try:
            return client.dry_run(job)
        except ConflictError:
            return None

    found: DryRun = wait_until("the planner answers", ask)
    return found


def token_file(pool: DemoPool) -> Path:
    """The file with the user's token."""
    return pool.folder / "user.token"


def test_sites_bring_each_version_once_and_the_next_job_brings_nothing(tmp_path: Path) -> None:
    """Both train over both sites, with the losses of one process; the history of each names the versions.

    A dry run says beforehand what each site brings, and afterwards that none does.
    """
    with apart(tmp_path, {"fetch": {"networks": [LOOPBACK]}}) as (pool, source):
        add(pool.client, tmp_path / "web", source)
        with Client(pool.server, token_file=token_file(pool)) as client:
            before = dry_run(client, catalogue_job(tmp_path, "dry"))
            assert before.plans.plans[0].predicted is not None
            assert set(before.plans.plans[0].predicted.bring_bytes) == set(before.plans.plans[0].clusters)
            assert any("brings" in note for note in before.standing.notes)
            assert source.requests == []
            found = {}
            for name in ("first", "second"):
                job = catalogue_job(tmp_path, name)
                view = client.submit(job)
                choose(pool.client, view.id, lambda plan: set(plan.clusters) == set(SITES))
                state_is(pool.client, view.id, "succeeded")
                found[name] = losses(all_metrics(pool.client, view.id))
                texts = [one.text for one in pool.client.history(view.id).events]
                assert any("data demo/text@" in text and "model demo/tiny@" in text for text in texts)
                counts = Counter(path for path, _ in source.requests)
                assert set(counts) == set(source.files)
                assert set(counts.values()) == {len(SITES)}, "once for each site, and nothing for the second job"
            assert found["first"] == found["second"]
            first = client.jobs(name="first")[0].id
            kinds = [one.kind for one in pool.client.history(first).events]
            assert kinds.count("brought") == 1
            after = dry_run(client, catalogue_job(tmp_path, "dry-again"))
            assert after.plans.plans[0].predicted is not None
            assert after.plans.plans[0].predicted.bring_bytes == {}
        for kind in ("model", "data"):
            copies = pool.client.entries(kind)[0].versions[0].copies  # type: ignore[arg-type]
            assert {one.cluster: one.complete for one in copies} == dict.fromkeys(SITES, True)
        job = client_metrics_job(tmp_path)
        as_one_process(job, all_metrics(pool.client, first), tmp_path / "alone")


def client_metrics_job(folder: Path) -> Job:
    """The same job on the files themselves."""
    job = make_job(folder, "alone", steps=6, every_steps=0)
    data = job.data.model_copy(update={"paths": (str(folder / "web" / "text"),)})
    return job.model_copy(update={"model": str(folder / "web" / "tiny"), "data": data})
