"""At each kind of site a job's and the owner's settings reach the worker, or the part is refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from isthmus.core.job import Job
from isthmus.render import IMAGE_LABEL
from tests.agent.test_images import LABELS, write_layout
from tests.cli.fake_server import FakeServer, Outcome
from tests.cli.samples import make_view
from tests.cli.test_render_at_schedulers import KUBERNETES, SLURM, render, settings_of

RAY = """
kind: ray
node_groups:
  h20: {resource: GPU, labels: {zone: a}}
options: {address: "http://ray:8265", python: /opt/ray/bin/python}
"""
SITES = {"local": "kind: local\n", "slurm": SLURM, "kubernetes": KUBERNETES, "ray": RAY}
JOB_FILES = {"local": "job.sh", "slurm": "job.sh", "kubernetes": "job.yaml", "ray": "job.json"}
FACTS = {
    "chips": ["H20"],
    "libraries": {"isthmus": {}},
    "command": ["python3", "-m", "isthmus.train.process.supervisor"],
}
TEMPLATE = """
name: {name}
class: communication
settings:
  - {{name: ONLY_{name}, value: "${{chip}}", passed_as: environment}}
  - {setting}
"""


def policy_of(folder: Path, *settings: str, images: bool = False) -> Path:
    """Return a policy with a template for each of `settings`, and with an image if asked."""
    (folder / "templates").mkdir()
    for number, setting in enumerate(settings):
        text = TEMPLATE.format(name=f"t{number}", setting=setting)
        (folder / "templates" / f"{number}.yaml").write_text(text)
    workers: dict[str, Any] = {"templates": str(folder / "templates")}
    if images:
        write_layout(folder / "images", LABELS | {IMAGE_LABEL: json.dumps(FACTS)})
        workers["containers"] = {"images": str(folder / "images")}
    (folder / "policy.yaml").write_text(yaml.safe_dump({"workers": workers}))
    return folder / "policy.yaml"


def rendered(folder: Path, kind: str, policy: Path, **runtime: object) -> Outcome:
    """Render the sample job with a choice of its runtime."""
    job = Job.model_validate(make_view().job.model_dump() | {"runtime": runtime})
    text = (
        SITES[kind].replace("options: {", "options: {registry: hub.example/pool, ")
        if kind == "kubernetes"
        else SITES[kind]
    )
    return render(folder, text, "--policy", policy, server=FakeServer(), job=job)


@pytest.mark.parametrize("kind", SITES)
def test_settings_of_job_and_owner_reach_the_worker(kind: str, tmp_path: Path) -> None:
    """The job's parameters by its environment, the owner's by environment and file; each with its origin."""
    policy = policy_of(tmp_path, "{name: lanes, value: '7', passed_as: file}")
    done = rendered(tmp_path, kind, policy, communication={"NCCL_DEBUG": "INFO"})
    assert done.status == 0, done.err
    settings = settings_of(tmp_path / "out")
    assert (settings["NCCL_DEBUG"]["value"], settings["NCCL_DEBUG"]["from"]) == ("INFO", "job")
    assert (settings["ONLY_t0"]["value"], settings["ONLY_t0"]["from"]) == ("H20", "template t0")
    assert (settings["spec.json#lanes"]["value"], settings["spec.json#lanes"]["passed_as"]) == ("7", "file")
    text = (tmp_path / "out" / JOB_FILES[kind]).read_text()
    if kind == "ray":
        (rank,) = json.loads(text)["ranks"]
        variables = rank["start.json"]["environment"]
        assert (variables["NCCL_DEBUG"], variables["ONLY_t0"]) == ("INFO", "H20")
    elif kind != "kubernetes":  # whose courier carries the variables, in start.json
        assert "NCCL_DEBUG=INFO" in text
        assert "ONLY_t0=H20" in text


@pytest.mark.parametrize("kind", SITES)
def test_two_templates_that_set_one_value_are_named_with_the_line(kind: str, tmp_path: Path) -> None:
    """The second one, at the setting that the first has already; nothing is written."""
    same = "{name: X, value: '1', passed_as: environment}"
    done = rendered(tmp_path, kind, policy_of(tmp_path, same, same))
    assert done.status == 2
    assert "1.yaml:6" in done.err
    assert "templates 't0' and 't1' both set environment 'X'" in done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", SITES)
def test_an_image_without_a_wanted_label(kind: str, tmp_path: Path) -> None:
    """Named with what the image has instead; a site of a kind without images says so."""
    done = rendered(tmp_path, kind, policy_of(tmp_path, images=kind != "ray"), labels={"torch": "2.14"})
    assert done.status == 2
    reason = "starts workers without images" if kind == "ray" else "label torch: wanted '2.14', has '2.13'"
    assert reason in done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kind", "setting", "reason"),
    [
        ("local", "{name: memory.bytes, value: '1024', passed_as: container}", "runs workers as processes"),
        ("slurm", "{name: /data, value: '/d:ro', passed_as: container}", "runs workers as processes"),
        ("ray", "{name: cpu.cores, value: '1', passed_as: container}", "runs workers as processes"),
        ("kubernetes", "{name: /data, value: '/d:ro', passed_as: container}", "a pod cannot mount '/data'"),
        ("kubernetes", "{name: cpu.core, value: '1', passed_as: container}", "did you mean 'cpu.cores'?"),
        ("kubernetes", "{name: cpu.cores, value: 'all', passed_as: container}", "cpu.cores is 'all'"),
        ("slurm", "{name: '--lanes', value: '1', passed_as: argument}", "takes no arguments"),
        ("ray", "{name: lane, value: '1', passed_as: file}", "did you mean 'lanes'?"),
    ],
)
def test_what_a_site_cannot_pass_is_refused(kind: str, setting: str, reason: str, tmp_path: Path) -> None:
    """With the template's name; it is never left out in silence."""
    done = rendered(tmp_path, kind, policy_of(tmp_path, setting))
    assert done.status == 2
    assert reason in done.err
    assert "template t0" in done.err


def test_images_at_slurm_are_bundles_of_its_steps(tmp_path: Path) -> None:
    """Each step runs the launcher of the rank's container; its configuration is beside the script."""
    done = rendered(tmp_path, "slurm", policy_of(tmp_path, images=True), image="isthmus:1.2")
    assert done.status == 0, done.err
    script = (tmp_path / "out" / "job.sh").read_text()
    assert "container_start.py runc '{state}/containers' '{worker_folder}/bundle' isthmus-" in script
    assert "confined_start" not in script
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["process"]["args"][:2] == ["python3", "-m"]


def test_images_at_kubernetes_are_those_of_its_registry(tmp_path: Path) -> None:
    """By digest, so that what was matched is what runs; its limits are the template's."""
    limits = "{name: memory.bytes, value: '1048576', passed_as: container}"
    done = rendered(tmp_path, "kubernetes", policy_of(tmp_path, limits, images=True), image="isthmus")
    assert done.status == 0, done.err
    settings = settings_of(tmp_path / "out")
    assert settings["image"]["value"].startswith("hub.example/pool/isthmus@sha256:")
    _, job = yaml.safe_load_all((tmp_path / "out" / "job.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["image"] == settings["image"]["value"]
    assert container["resources"]["limits"]["memory"] == "1048576"
    assert settings["start.json#program"]["value"].startswith("python3 -m isthmus.train.process.supervisor")


def test_containers_at_ray_are_refused(tmp_path: Path) -> None:
    """As its agent refuses to start."""
    done = rendered(tmp_path, "ray", policy_of(tmp_path, images=True))
    assert (done.status, "of kind 'ray' starts no workers from images" in done.err) == (2, True)


def test_ray_gets_the_orders_of_its_holder(tmp_path: Path) -> None:
    """A bundle with the node group's labels, and for the rank its program with the Python of the node."""
    done = rendered(tmp_path, "ray", policy_of(tmp_path))
    assert done.status == 0, done.err
    job = json.loads((tmp_path / "out" / "job.json").read_text())
    assert job["entrypoint"].startswith("/opt/ray/bin/python courier.pyz --ticket")
    (hold,) = [value for name, value in job.items() if name.startswith("hold-")]
    assert (hold["bundles"], hold["labels"]) == ([{"GPU": 1}], [{"zone": "a"}])
    (rank,) = job["ranks"]
    assert rank["start.json"]["program"][0] == "{python}"
    settings = settings_of(tmp_path / "out")
    assert settings["bundle.labels.zone"]["from"] == "site.yaml node_groups.h20.labels"


@pytest.mark.attack
@pytest.mark.parametrize("kind", SITES)
def test_variables_of_a_users_program_are_not_the_workers(kind: str, tmp_path: Path) -> None:
    """A worker starts with the rights of the agent's account: a job that preloads a library into it would have them."""
    environment = {"LD_PRELOAD": "/tmp/mine.so"}
    command = {"arguments": ["true"], "ranks": {"hangzhou": 1}, "environment": environment}
    job = Job.model_validate({"name": "any", "engine": "command", "command": command, "output": "/runs/any"})
    assert render(tmp_path, SITES[kind], job=job).status == 0
    assert "LD_PRELOAD" not in (tmp_path / "out" / JOB_FILES[kind]).read_text()
    assert settings_of(tmp_path / "out")["LD_PRELOAD"]["class"] == "training"
