"""Fields of a job that are valid each but not together: refused with field, value and nearest valid value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from isthmus.core.errors import FileError, InputError
from isthmus.core.files.user_files import load_job
from isthmus.core.job import Job
from isthmus.core.model import Model
from isthmus.core.runs.check_job import check_job, max_positions
from isthmus.core.runs.check_paths import is_inside, reads_folder

FIELDS: dict[str, Any] = {
    "name": "n",
    "model": "/m/config.json",
    "data": {"paths": ["/text"]},
    "training": {"steps": 10, "sequence_length": 8},
    "output": "/out",
}
CONFIG = {"max_position_embeddings": 64, "num_local_experts": 8}
MODEL = Model(path="/m", architecture="MixtralForCausalLM", num_layers=2, hidden_size=8, vocab_size=9, config=CONFIG)


def make_job(changes: dict[str, Any]) -> Job:
    """A job with the given sections changed."""
    merged = {key: one | changes.get(key, {}) if isinstance(one, dict) else one for key, one in FIELDS.items()}
    return Job.model_validate(merged | {key: one for key, one in changes.items() if key not in ("data", "training")})


def refusal(changes: dict[str, Any]) -> str:
    """The message and hint with which a job is refused."""
    with pytest.raises(InputError) as caught:
        check_job(make_job(changes), MODEL)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "field", "value", "nearest"),
    [
        ({"training": {"sequence_length": 65}}, "training.sequence_length", "65", "nearest valid value: 64"),
        ({"training": {"warmup_steps": 11}}, "training.warmup_steps", "11", "nearest valid value: 10"),
        (
            {"training": {"learning_rate": 1e-4, "min_learning_rate": 1e-3}},
            "training.min_learning_rate",
            "0.001",
            "nearest valid value: 0.0001",
        ),
        ({"training": {"local_steps": 12}}, "training.local_steps", "12", "nearest valid value: 10"),
        ({"training": {"evaluate_every": 20}}, "training.evaluate_every", "20", "nearest valid value: 10"),
        ({"training": {"beta2": 1.0}}, "training.beta2", "1", "nearest valid value: 0.9999"),
        ({"parallel": {"ep": 9}}, "parallel.ep", "9", "nearest valid value: 8"),
        ({"data": {"format": "chat"}}, "data.format", "chat", "nearest valid value: jsonl"),
        ({"task": "finetune", "data": {"format": "text"}}, "data.format", "text", "nearest valid value: chat"),
        ({"data": {"paths": ["/text", "/text/"]}}, "data.paths", "/text/", "list it once"),
        ({"output": "/text/out"}, "output", "/text/out", "such as /text-out"),
        ({"checkpoints": {"folder": "/text/ck"}}, "checkpoints.folder", "/text/ck", "such as /text-ck"),
        ({"output": "/"}, "output", "contains the training data /text", "a folder of its own"),
        ({"checkpoints": {"folder": "/out"}}, "output", "/out", "beside it"),
        ({"checkpoints": {"folder": "/o"}, "output": "/o/out"}, "output", "/o/out", "beside it"),
        ({"output": "/m"}, "output", "folder of the model", "beside it"),
        ({"resume": "/old", "output": "/old/"}, "output", "/old/ is the folder", "beside it"),
        ({"resume": "/old", "checkpoints": {"folder": "/old"}}, "checkpoints.folder", "/old", "beside it"),
        ({"resume": "old-1", "compute": "virtual"}, "resume", "virtual", "compute: real"),
    ],
)
def test_a_contradiction_is_refused_with_field_value_and_nearest_valid_value(changes, field, value, nearest):
    """Each field alone is valid; together they would train something else than the user means."""
    text = refusal(changes)
    assert text.startswith(f"{field}: ")
    assert value in text
    assert nearest in text


def test_evaluation_without_held_out_data_is_refused():
    """It would fail at every site after the start."""
    text = refusal({"training": {"evaluate_every": 2}, "data": {"validation_fraction": 0.0}})
    assert "training.evaluate_every: no data is held out" in text


def test_the_limits_themselves_are_valid():
    """Equal to the limit is accepted, and so is a checkpoint folder inside the output."""
    training = {"sequence_length": 64, "warmup_steps": 10, "evaluate_every": 10, "min_learning_rate": 3e-4}
    parallel, folder = {"ep": 8}, {"folder": "/out/checkpoints"}
    check_job(make_job({"training": training, "parallel": parallel, "checkpoints": folder}), MODEL)


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({}, None),
        ({"max_position_embeddings": "many"}, None),
        ({"max_position_embeddings": 64}, 64),
        ({"max_position_embeddings": 64, "rope_scaling": {"factor": 4.0}}, 256),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"factor": 8, "original_max_position_embeddings": 8192},
            },
            131072,
        ),
        ({"max_position_embeddings": 64, "rope_scaling": {"factor": "x"}}, 64),
    ],
)
def test_positions_include_their_scaling(config, positions):
    """A scaled model takes the sequence that its scaling gives; an odd value never raises."""
    assert max_positions(MODEL.model_copy(update={"config": config})) == positions


@pytest.mark.parametrize(
    ("path", "folder", "reads"),
    [
        ("/d", "/d/out", True),
        ("/d", "/d", True),
        ("/d/", "/d/../d/out", True),
        ("/d", "/data", False),
        ("/d/*.py", "/d/out", False),
        ("/d/*.json", "/d", True),
        ("/d/*.py", "/d", False),
        ("/d/**/*.py", "/d/out", True),
        ("/d/*/*", "/d/out", True),
        ("s3://b/d", "s3://b/d/out", True),
        ("s3://b/d", "/b/d/out", False),
    ],
)
def test_a_data_path_reads_the_folders_below_it(path, folder, reads):
    """Folders are read recursively, `**` too; a plain glob reads the folder that it names."""
    assert reads_folder(path, folder) is reads


def test_inside_is_decided_by_whole_names():
    """`/ab` does not lie in `/a`; everything lies in `/`."""
    assert not is_inside("/ab", "/a")
    assert is_inside("/a/../b", "/b")
    assert is_inside("/a", "/")


def test_a_job_file_is_refused_with_its_line(tmp_path: Path):
    """`load_job` names file, line, field and nearest valid value."""
    file = tmp_path / "job.yaml"
    training = {"steps": 10, "warmup_steps": 12}
    file.write_text(yaml.safe_dump(FIELDS | {"training": training}, sort_keys=False))
    with pytest.raises(FileError) as caught:
        load_job(file)
    line = file.read_text().splitlines().index("  warmup_steps: 12") + 1
    assert str(caught.value).startswith(f"{file}:{line}: training.warmup_steps: 12 exceeds training.steps, 10")
    assert caught.value.hint == "nearest valid value: 10"


def test_a_micro_batch_above_the_batch_names_the_nearest_divisor():
    """A micro-batch divides the batch."""
    with pytest.raises(ValueError, match="nearest valid micro_batch_size: 4"):
        make_job({"training": {"global_batch_size": 8, "micro_batch_size": 6}})


def test_without_a_folder_checkpoints_go_to_one_of_the_job_beside_its_file(tmp_path: Path):
    """`checkpoints` may be left out; the job's id completes the default."""
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(FIELDS))
    assert load_job(file).checkpoints.folder == str(tmp_path / "checkpoints/{job}")


def test_the_site_of_the_model_takes_part() -> None:
    """A site that the placement excludes cannot get the model, and a virtual job has none."""
    asked = {"output_site": "nort", "placement": {"clusters": ["north", "south"]}}
    assert "nearest valid value: north" in refusal(asked)
    assert "compute: virtual writes no model" in refusal({"output_site": "north", "compute": "virtual"})
    check_job(make_job({"output_site": "north", "placement": {"clusters": ["north"]}}), MODEL)
