"""`isthmus render --site`: the job file of a Slurm or Kubernetes site, its settings, and what cannot be rendered."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from isthmus.core.job import Job
from isthmus.core.plan import Stage
from tests.cli.fake_server import FakeServer, Outcome, run
from tests.cli.samples import make_plan

CLUSTER = "hangzhou"
SLURM = """
kind: slurm
node_groups:
  h20: {partition: normal, resource: "gpu:h20"}
options: {max_minutes: 90, account: pool}
"""
KUBERNETES = """
kind: kubernetes
node_groups:
  h20: {labels: {example.com/chip: h20}, resource: nvidia.com/gpu}
options: {image: "registry.example/isthmus:1", namespace: isthmus, priority: isthmus}
"""


def render(folder: Path, text: str, *more: object, server: FakeServer | None = None, **changes: Any) -> Outcome:
    """Render the part of the sample job at a site."""
    known = server or FakeServer()
    view = known.add(**changes)
    (folder / "site.yaml").write_text(text)
    arguments = ("render", view.id, "--cluster", CLUSTER, "--output", folder / "out", "--site", folder / "site.yaml")
    return run(known, *arguments, *more)


def settings_of(folder: Path) -> dict[str, dict[str, str]]:
    """Return the settings of `render.json` by name."""
    found = json.loads((folder / "render.json").read_text())
    assert {tuple(one) for one in found} == {("name", "class", "value", "passed_as", "from")}
    return {one["name"]: one for one in found}


def test_slurm_gets_a_script_of_an_allocation_and_a_step_for_each_rank(tmp_path: Path) -> None:
    """It is a script for `sh`, and what it asks for is in `render.json` with its origin."""
    done = render(tmp_path, SLURM)
    assert done.status == 0, done.err
    script = tmp_path / "out" / "job.sh"
    subprocess.run(["sh", "-n", script], check=True)
    text = script.read_text()
    for words in ("--partition=normal", "--gpus-per-task=h20:1", "--ntasks=1", "--time=90", "--account=pool"):
        assert words in text
    assert "srun --jobid=" in text
    assert "isthmus.train.process.supervisor" in text
    settings = settings_of(tmp_path / "out")
    assert settings["--partition"]["from"] == "site.yaml node_groups.h20.partition"
    assert (settings["--gpus-per-task"]["value"], settings["--gpus-per-task"]["passed_as"]) == ("h20:1", "argument")
    assert settings["OMP_NUM_THREADS"]["passed_as"] == "environment"
    assert settings["spec.json#steps"]["value"] == "40"


@pytest.mark.parametrize("workload", ["job", "jobset", "volcano"])
def test_kubernetes_gets_its_secrets_and_its_workload(workload: str, tmp_path: Path) -> None:
    """What the strict schemas know passes them, and the tickets are not shown."""
    done = render(tmp_path, KUBERNETES.replace("options: {", f"options: {{workload: {workload}, "))
    assert done.status == 0, done.err
    secret, body = yaml.safe_load_all((tmp_path / "out" / "job.yaml").read_text())
    assert (secret["kind"], body["metadata"]["annotations"]["isthmus.io/job"].partition("/")[2]) == ("Secret", "1")
    kubernetes_validate.validate(secret, "1.30", strict=True)
    if workload == "job":
        kubernetes_validate.validate(body, "1.30", strict=True)
    settings = settings_of(tmp_path / "out")
    assert settings["image"]["value"] == "registry.example/isthmus:1"
    assert settings["limits.nvidia.com/gpu"] == {
        "name": "limits.nvidia.com/gpu", "class": "resources", "value": "1", "passed_as": "container", "from": "plan"
    }  # fmt: skip
    assert settings["nodeSelector.example.com/chip"]["from"] == "site.yaml node_groups.h20.labels"
    assert (
        settings["/run/isthmus/tickets"] | {"value": "secret:ro", "class": "mounts"}
        == (settings["/run/isthmus/tickets"])
    )


def test_a_part_on_two_node_groups_has_one_job_file_and_settings_of_each(tmp_path: Path) -> None:
    """Its cards are held together, so one file asks for them."""
    server = FakeServer()
    (old,) = [one for one in server.pool.clusters if one.cluster.name == CLUSTER]
    groups = (*old.cluster.node_groups, old.cluster.node_groups[0].model_copy(update={"name": "spare"}))
    wider = old.model_copy(update={"cluster": old.cluster.model_copy(update={"node_groups": groups})})
    clusters = tuple(wider if one is old else one for one in server.pool.clusters)
    server.pool = server.pool.model_copy(update={"clusters": clusters})
    stages = [*make_plan().stages[:2], Stage(cluster=CLUSTER, node_group="spare", layers=(6, 8))]
    plan = make_plan().model_copy(update={"stages": tuple(stages), "predicted": None})
    site = SLURM.replace("options:", "  spare: {partition: slow}\noptions:")
    assert render(tmp_path, site, server=server, plan=plan).status == 0
    assert (tmp_path / "out" / "job.sh").read_text().count("salloc --no-shell") == 2
    groups_of = {name: settings_of(tmp_path / "out" / name)["--partition"]["value"] for name in ("h20", "spare")}
    assert groups_of == {"h20": "normal", "spare": "slow"}
    same = render(tmp_path, site, "--diff", tmp_path / "out", "--json", server=server, id="j-000002", plan=plan)
    assert json.loads(same.out) == []
    other = site.replace("slow", "fast")
    found = render(tmp_path, other, "--diff", tmp_path / "out", "--json", server=server, id="j-000003", plan=plan)
    assert json.loads(found.out) == [
        {"name": "spare: --partition", "passed_as": "argument", "value": "fast", "other": "slow"}
    ]


def test_diff_names_what_another_site_has_instead(tmp_path: Path) -> None:
    """Settings of two sites are compared by name, however each is passed."""
    render(tmp_path, SLURM)
    (tmp_path / "out").rename(tmp_path / "before")
    done = render(tmp_path, SLURM.replace("normal", "nightly"), "--diff", tmp_path / "before", "--json")
    assert json.loads(done.out) == [
        {"name": "--partition", "passed_as": "argument", "value": "nightly", "other": "normal"}
    ]


def test_a_program_of_the_user_has_its_arguments_and_variables(tmp_path: Path) -> None:
    """Of a job with `engine: command` no training parameter is made up."""
    command = {"arguments": ["python3", "train.py", "--lr", "1"], "ranks": {CLUSTER: 1}, "environment": {"SEED": "7"}}
    job = Job.model_validate({"name": "any", "engine": "command", "command": command, "output": "/runs/any"})
    assert render(tmp_path, SLURM, job=job).status == 0
    settings = settings_of(tmp_path / "out")
    assert json.loads(settings["spec.json#command.arguments"]["value"]) == command["arguments"]
    assert settings["SEED"] == {
        "name": "SEED", "class": "training", "value": "7", "passed_as": "environment", "from": "job"
    }  # fmt: skip
    assert "spec.json#steps" not in settings
    assert shlex.quote("{worker_folder}") in (tmp_path / "out" / "job.sh").read_text()
    assert "isthmus.train.process.command_worker" in (tmp_path / "out" / "job.sh").read_text()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (SLURM.replace("kind: slurm", "kind: slrum"), ("site.yaml:2", "kind", "'slrum' has no job file")),
        (SLURM.replace("h20: {", "h2o: {"), ("site.yaml:4", "unknown node group 'h2o'", "did you mean 'h20'?")),
        (SLURM.replace("account:", "acount:"), ("site.yaml:5", "unknown option", "did you mean 'account'?")),
        (SLURM.replace("max_minutes: 90", "max_minutes: soon"), ("site.yaml:5", "'soon' is no whole number")),
        (SLURM.replace("partition: normal, ", ""), ("site.yaml:4", "names no partition", "'h20'")),
        (KUBERNETES.replace("namespace:", "namspace:"), ("site.yaml:5", "did you mean 'namespace'?")),
        (KUBERNETES.replace("image:", "workload: jobs, image:"), ("site.yaml:5", "unknown workload", "'job'?")),
        (KUBERNETES.replace("labels: {example", "partition: p, labels: {example"), ("site.yaml:4", "no partitions")),
        (KUBERNETES.replace('image: "registry.example/isthmus:1", ', ""), ("site.yaml:5", "names no image")),
    ],
)
def test_what_the_site_file_has_wrong_is_named_with_its_line(text: str, words: tuple[str, ...], tmp_path: Path) -> None:
    """Exit 2, and nothing is written."""
    done = render(tmp_path, text)
    assert done.status == 2
    assert all(word in done.err for word in words), done.err
    assert not (tmp_path / "out").exists()
