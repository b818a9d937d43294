"""Rules of the commands that leave for other frameworks and come back: export, measured."""

import ast
from pathlib import Path

import pytest
import yaml

from tests.cli.test_plan_commands import answer, folder, run
from tests.plan.test_export_logs import megatron

__all__ = ["folder"]


@pytest.fixture
def log(folder: Path) -> Path:
    """A log of ten iterations, the first one slow."""
    file = folder / "train.log"
    file.write_text("\n".join(megatron(i, 60.0 if i == 1 else 2.0, 10 - i, samples=4) for i in range(1, 11)))
    return file


def test_export_writes_a_script_that_names_every_node(folder):
    """The file starts each part where its stage was planned; the answer has arguments, launches and notes."""
    out = folder / "run.sh"
    made = answer("export", folder / "far.yaml", "--to", "megatron", "--pool", folder / "pool.yaml", "--output", out)
    assert out.read_text() == made["text"]
    assert [(one["cluster"], one["devices"], one["stages"]) for one in made["launches"]] == [
        ("a", [0, 1], [0]), ("b", [0, 1], [1]),
    ]  # fmt: skip
    assert made["arguments"][made["arguments"].index("--pipeline-model-parallel-layout") + 1] == "Et*4|t*4L"
    assert "mock data" in made["notes"][0]


def test_export_prints_what_it_would_write(folder):
    """Without --output the file goes to standard output, as it is."""
    status, text = run("export", folder / "near.yaml", "--to", "torchtitan", "--pool", folder / "pool.yaml")
    assert status == 0
    assert "plan" in {
        node.name for node in ast.parse(text[text.index('"""') :]).body if isinstance(node, ast.FunctionDef)
    }


def test_export_says_what_it_lacks_and_what_cannot_be_said(folder):
    """A pool to launch on, a module's name, and words for the plan."""
    assert run("export", folder / "far.yaml", "--to", "megatron") == (
        2, "error: megatron needs a launch command per node\nhint:  give the pool with --pool\n",
    )  # fmt: skip
    arguments = ("export", folder / "far.yaml", "--pool", folder / "pool.yaml", "--to")
    status, text = run(*arguments, "torchtitan", "--output", folder / "no-module.py")
    assert (status, "is not a Python module" in text) == (2, True)
    status, text = run(*arguments, "isthmus")
    assert (status, "tp: 2" in text) == (0, True)
    (folder / "long.yaml").write_text((folder / "far.yaml").read_text().replace("tp: 2", "cp: 2"))
    status, text = run("export", folder / "long.yaml", "--to", "isthmus")
    assert (status, "cp: 2" in text) == (0, True)


def test_measured_stands_beside_the_prediction(folder, log):
    """The warm-up is left out; the spread, the loss and the table for `calibrate` are there."""
    arguments = (
        "measured",
        folder / "far.yaml",
        "--log",
        log,
        "--pool",
        folder / "pool.yaml",
        "--warm-up",
        "1",
    )
    found = answer(*arguments, "--add", folder / "runs.yaml")
    assert (found["run"], found["measured"]["iteration_s"], found["measured"]["iterations"]) == (
        "train",
        2.0,
        9,
    )
    assert found["predicted_over_measured"] == found["predicted"]["iteration_s"] / 2.0
    assert (found["measured"]["first_loss"], found["measured"]["last_loss"]) == (9.0, 0.0)
    _, text = run(*arguments)
    assert "9 iterations of megatron, the first 1 skipped" in text
    compared = answer("compare", folder / "far.yaml", folder / "runs.yaml", "--pool", folder / "pool.yaml")
    assert compared["b"][0]["iteration_s"] == 2.0


def test_a_fitted_run_is_not_compared_with_its_own_prediction(folder, log):
    """A calibration that has seen the run refuses to be measured by it."""
    arguments = ("measured", folder / "far.yaml", "--log", log, "--pool", folder / "pool.yaml")
    answer(*arguments, "--add", folder / "runs.yaml")
    ours = folder / "ours.yaml"
    answer("calibrate", folder / "runs.yaml", "--fit", "H20/matmul_share", "--output", ours)
    assert yaml.safe_load(ours.read_text())["fitted_on"] == ["train"]
    status, text = run(*arguments, "--calibration", ours)
    assert (status, "was fitted on 'train'" in text) == (2, True)
