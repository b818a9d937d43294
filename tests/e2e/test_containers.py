"""A job over two sites that run their workers in containers, the whole way with real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from isthmus.agent import build_image
from isthmus.render import ImageFacts
from tests.agent.test_containers import why_not
from tests.e2e.site import (
    all_metrics,
    as_one_process,
    choose,
    clusters_of,
    make_job,
    running,
    state_is,
    submit,
    wait_until,
)

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.skipif(bool(why_not()), reason=why_not())]


def test_job_in_containers_trains_what_one_process_trains(tmp_path: Path) -> None:
    """Each site runs its rendered part by `runc`, with a share of its node's memory and cores."""
    build_image(
        tmp_path / "images", "host", "1", ImageFacts.model_validate({"host_files": True, "libraries": {"isthmus": {}}})
    )
    rules = {"workers": {"containers": {"images": str(tmp_path / "images")}}}
    site = tmp_path / "site"
    site.mkdir()
    (site / "policy.yaml").write_text(yaml.safe_dump(rules))
    clusters = clusters_of({"north": 1, "south": 1}, 1.0)
    for cluster in clusters["clusters"]:
        cluster["node_groups"][0] |= {"cpus_per_node": 2, "memory_bytes_per_node": "4 GiB"}
    with running(site, clusters) as pool:
        job = make_job(site, "containers", steps=12, policy="manual", parallel={"pp": 2})
        view = submit(pool.client, job)
        choose(pool.client, view.id, lambda plan: len(plan.clusters) == 2)
        files = wait_until("both parts are rendered", lambda: len(one := [*site.rglob("render.json")]) == 2 and one)
        found = [json.loads(file.read_text()) for file in files]
        state_is(pool.client, view.id, "succeeded")
        metrics = all_metrics(pool.client, view.id)
    assert {one.rank for one in metrics} == {0, 1}
    memory = {one["value"] for settings in found for one in settings if one["name"] == "memory.bytes"}
    assert memory == {str(4 << 30)}
    as_one_process(job, metrics, tmp_path)
    assert (Path(job.output) / "model.safetensors.index.json").exists()
