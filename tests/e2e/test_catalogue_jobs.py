"""Two sites without a shared disk bring a model and a data set by URL, once each, and train on them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from isthmus.cli.demo.demo_pool import DEMO_USER, DemoPool
from isthmus.client.api_client import ApiClient
from isthmus.client.client import Client
from isthmus.client.client_settings import read_token
from isthmus.client.file_manifest import folder_manifest
from isthmus.core.errors import ConflictError, NotFoundError
from isthmus.core.job import Job
from isthmus.core.messages.api_views import TokenRequest
from isthmus.core.messages.catalogue_views import GrantChange, VersionAddition
from isthmus.core.messages.queue_status import DryRun
from isthmus.core.model import load_model
from isthmus.core.pool import Pool
from tests.agent.file_server import LOOPBACK, FileServer, serving
from tests.attack.test_users_on_storage import digest
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
    for number in range(12):
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
            kinds = [one.kind for one in pool.client.history(client.jobs(name="first")[0].id).events]
            assert kinds.count("brought") == 1
            after = dry_run(client, catalogue_job(tmp_path, "dry-again"))
            assert after.plans.plans[0].predicted is not None
            assert after.plans.plans[0].predicted.bring_bytes == {}
        for kind in ("model", "data"):
            copies = pool.client.entries(kind)[0].versions[0].copies  # type: ignore[arg-type]
            assert {one.cluster: one.complete for one in copies} == dict.fromkeys(SITES, True)
        job = client_metrics_job(tmp_path)
        as_one_process(job, all_metrics(pool.client, client.jobs(name="first")[0].id), tmp_path / "alone")


def client_metrics_job(folder: Path) -> Job:
    """The same job on the files themselves."""
    job = make_job(folder, "alone", steps=6, every_steps=0)
    data = job.data.model_copy(update={"paths": (str(folder / "web" / "text"),)})
    return job.model_copy(update={"model": str(folder / "web" / "tiny"), "data": data})


@pytest.mark.attack
def test_another_user_needs_a_grant_and_a_site_needs_its_owners_word(tmp_path: Path) -> None:
    """With roots for each user, whose workers may read the versions of their job and nothing else of the cache.

    1. Eve, who knows the version, is refused. 2. With a grant her job trains on the copies that are there. 3. Sites
    whose policy does not name the network fail a job with that reason.
    """
    roots = [{"path": "/runs"}]
    policy = {"fetch": {"networks": [LOOPBACK]}, "storage": {"roots": roots}}
    with apart(tmp_path, policy) as (pool, source):
        add(pool.client, tmp_path / "web", source)
        with ApiClient(pool.server, read_token(tmp_path / "server" / "admin.token")) as admin:
            eve = admin.create_token(TokenRequest(role="user", name="eve")).token
        (tmp_path / "eve.token").write_text(eve)
        (tmp_path / "eve.token").chmod(0o600)
        with Client(pool.server, token_file=token_file(pool)) as client:
            view = client.submit(catalogue_job(tmp_path, "first"))
            choose(pool.client, view.id, lambda plan: set(plan.clusters) == set(SITES))
            state_is(pool.client, view.id, "succeeded")
        asked, cached = len(source.requests), [digest(tmp_path / site / "cache" / "versions") for site in SITES]
        with Client(pool.server, token_file=tmp_path / "eve.token") as other, ApiClient(pool.server, eve) as api:
            wish = catalogue_job(tmp_path, "eves", owner=f"{DEMO_USER}/")
            with pytest.raises(NotFoundError, match="no entry"):
                other.submit(wish)
            for kind in ("model", "data"):
                name = "tiny" if kind == "model" else "text"
                pool.client.change_grant(kind, DEMO_USER, name, GrantChange(user="eve"))  # type: ignore[arg-type]
            granted = other.submit(wish)
            choose(api, granted.id, lambda plan: set(plan.clusters) == set(SITES))
            state_is(api, granted.id, "succeeded")
        assert len(source.requests) == asked, "the copies are there"
        assert [digest(tmp_path / site / "cache" / "versions") for site in SITES] == cached
    with apart(tmp_path / "shy", {}) as (pool, source):
        add(pool.client, tmp_path / "shy" / "web", source)
        with Client(pool.server, token_file=token_file(pool)) as client:
            refused = client.submit(catalogue_job(tmp_path / "shy", "refused").model_copy(update={"policy": "auto"}))
            ended = state_is(pool.client, refused.id, "failed")
            assert "has no public address: 127.0.0.1" in ended.reason
            assert source.requests == []
