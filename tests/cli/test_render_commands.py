"""`isthmus render` writes the job file and every setting; --diff names what differs from an earlier folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isthmus.core.job import Job
from tests.cli.fake_server import FakeServer, run
from tests.cli.samples import make_view

CLUSTER = "hangzhou"


def with_runtime(**runtime: object) -> Job:
    return Job.model_validate(make_view().job.model_dump() | {"runtime": runtime})


def test_render_writes_the_job_file_and_the_settings(tmp_path: Path) -> None:
    server = FakeServer()
    view = server.add()
    done = run(server, "render", view.id, "--cluster", CLUSTER, "--output", tmp_path / "out", "--json")
    assert done.status == 0, done.err
    settings = json.loads((tmp_path / "out" / "render.json").read_text())
    assert json.loads(done.out) == settings
    assert {tuple(one) for one in settings} == {("name", "class", "value", "passed_as", "from")}
    script = (tmp_path / "out" / "job.sh").read_text()
    assert "isthmus.train.process.supervisor '{worker_folder}'" in script
    assert "confined_start.py '{worker_folder}/limits.json'" in script


def test_diff_names_what_differs(tmp_path: Path) -> None:
    server = FakeServer()
    first = server.add()
    run(server, "render", first.id, "--cluster", CLUSTER, "--output", tmp_path / "a")
    second = server.add(id="j-000001", job=with_runtime(communication={"NCCL_DEBUG": "INFO"}))
    arguments = ("render", second.id, "--cluster", CLUSTER, "--output", tmp_path / "b", "--diff", tmp_path / "a")
    assert json.loads(run(server, *arguments, "--json").out) == [
        {"name": "NCCL_DEBUG", "passed_as": "environment", "value": "INFO", "other": "-"},
        {"name": "spec.json#congestion_control", "passed_as": "file", "value": "-", "other": "bbr"},
    ]
    same = run(server, "render", first.id, "--cluster", CLUSTER, "--output", tmp_path / "c", "--diff", tmp_path / "a")
    assert "no setting differs" in same.out


@pytest.mark.parametrize(
    ("runtime", "reason"),
    [
        ({"image": "train:3"}, "starts workers without images; the job asks for image train:3"),
        ({"labels": {"torch": "2.13"}}, "the job asks for label torch: 2.13"),
        ({"library": "hccl"}, "no library hccl"),
        ({"library": "nccl"}, "'nccl' connects ranks of one cluster, and the part has ranks at others"),
    ],
)
def test_part_that_cannot_be_rendered(tmp_path: Path, runtime: dict, reason: str) -> None:
    server = FakeServer()
    view = server.add(job=with_runtime(**runtime))
    done = run(server, "render", view.id, "--cluster", CLUSTER, "--output", tmp_path / "out")
    assert done.status == 2
    assert reason in done.err
    assert not (tmp_path / "out").exists()


def test_job_without_a_plan_and_unknown_cluster(tmp_path: Path) -> None:
    server = FakeServer()
    waiting = server.add(id="j-000001", plan=None)
    done = run(server, "render", waiting.id, "--cluster", CLUSTER, "--output", tmp_path / "out")
    assert "has no plan yet" in done.err
    view = server.add()
    done = run(server, "render", view.id, "--cluster", "paris", "--output", tmp_path / "out")
    assert (done.status, "no part at cluster 'paris'" in done.err) == (2, True)


@pytest.mark.attack
@pytest.mark.parametrize("text", ["{", "[7]", "[" * 100_000, '[{"name": "a"}]', '[{"name": "\\u001b[2J"}]'])
def test_malformed_earlier_folder(tmp_path: Path, text: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "render.json").write_text(text)
    server = FakeServer()
    view = server.add()
    arguments = ("render", view.id, "--cluster", CLUSTER, "--output", tmp_path / "b", "--diff", tmp_path / "a")
    done = run(server, *arguments)
    assert done.status == 2
    assert "render it again" in done.err
    assert "\x1b" not in done.err


def test_template_at_the_site_with_an_unknown_word(tmp_path: Path) -> None:
    """A malformed template is refused with its file and line."""
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "a.yaml").write_text(
        "name: a\nclass: training\nsettings:\n  - {name: X, value: '${chipp}', passed_as: environment}\n"
    )
    (tmp_path / "policy.yaml").write_text(f"workers: {{templates: {tmp_path / 'templates'}}}\n")
    server = FakeServer()
    view = server.add()
    arguments = ("render", view.id, "--cluster", CLUSTER, "--output", tmp_path / "b")
    done = run(server, *arguments, "--policy", tmp_path / "policy.yaml")
    assert done.status == 2
    assert "a.yaml:4" in done.err
    assert "did you mean 'chip'?" in done.err
