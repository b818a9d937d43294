"""`isthmus submit` and the folders of other runs: refused with the difference, resumed knowingly, shown afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from isthmus.core.files.user_files import load_job
from isthmus.core.job import ResumeSource
from isthmus.core.model import load_model
from isthmus.core.runs.run_folder import claim_folder
from isthmus.core.runs.run_identity import run_identity
from tests.cli.fake_server import FakeServer, run
from tests.cli.samples import make_job

CONFIG = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4, "hidden_size": 64, "vocab_size": 260}


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    """A job file with its model beside it, and a folder of checkpoints that another job has written."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    file = tmp_path / "job.yaml"
    write_job(file)
    job = load_job(file)
    there = job.model_copy(update={"training": job.training.model_copy(update={"learning_rate": 0.5})})
    identity = run_identity("old-1", there, load_model(job.model))
    claim_folder(tmp_path / "ck", "checkpoints.folder", "old-1", lambda: identity)
    (tmp_path / "ck" / "step-00000002").mkdir()
    return file


def write_job(file: Path, **changes: object) -> None:
    """Write the job file."""
    training = {"steps": 3, "sequence_length": 8, "global_batch_size": 2}
    fields = {
        "name": "mine",
        "model": "config.json",
        "output": "out",
        "data": {"paths": ["text"], "tokenizer": "bytes"},
    }
    file.write_text(yaml.safe_dump(fields | {"training": training, "checkpoints": {"folder": "ck"}} | changes))


def test_a_folder_of_another_job_is_refused_with_the_difference_and_what_to_do(job_file: Path) -> None:
    """Nothing reaches the server; a dry run says the same."""
    server = FakeServer()
    for more in ([], ["--dry-run"]):
        done = run(server, "submit", job_file, *more)
        assert done.status == 2
        assert "belongs to job old-1, which differs: learning_rate: 0.5 there, 0.0003 in this job" in done.err
        assert "leave out checkpoints.folder; `resume: old-1` continues that run" in done.err
    assert not server.jobs


def test_without_a_checkpoint_folder_the_job_gets_its_own(job_file: Path) -> None:
    """The hint of the refusal works: the default folder has the job's id."""
    write_job(job_file, checkpoints={})
    server = FakeServer()
    assert run(server, "submit", job_file).status == 0
    (view,) = server.jobs.values()
    assert view.job.checkpoints.folder == str(job_file.parent / "checkpoints/{job}")


def test_an_output_with_files_of_another_origin_is_refused(job_file: Path) -> None:
    """A result or notes in the output folder stay."""
    write_job(job_file, checkpoints={})
    (job_file.parent / "out").mkdir()
    (job_file.parent / "out" / "model.safetensors").write_text("")
    done = run(FakeServer(), "submit", job_file)
    assert done.status == 2
    assert "holds files that this job has not written, such as 'model.safetensors'" in done.err
    assert "out-{job}" in done.err


@pytest.mark.parametrize("as_option", [True, False])
def test_resuming_a_folder_tells_the_differences(job_file: Path, as_option: bool) -> None:
    """`--resume` and `resume:` do the same; the answer and the stored job name folder, job and fields."""
    source = job_file.parent / "ck"
    write_job(job_file, checkpoints={}, **({} if as_option else {"resume": "./ck"}))
    server = FakeServer()
    done = run(server, "submit", job_file, *(["--resume", source] if as_option else []))
    assert done.status == 0, done.err
    (view,) = server.jobs.values()
    shown = ("learning_rate: 0.5 there, 0.0003 in this job",)
    assert view.job.resume == ResumeSource(folder=str(source), job="old-1", differences=shown)
    assert f"resumes    job old-1, {source}; differs: {shown[0]}" in done.out
    assert f"resumes    job old-1, {source}; differs: {shown[0]}" in run(server, "show", view.id).out


def test_resuming_a_job_sends_its_full_id(job_file: Path) -> None:
    """A name or the begin of an id is completed here; the server knows ids only."""
    write_job(job_file, checkpoints={})
    server = FakeServer()
    server.add(id="old-1", name="old")
    assert run(server, "submit", job_file, "--resume", "old", "--json").json["job"]["resume"] == "old-1"
    assert run(server, "submit", job_file, "--resume", "older").status == 5


def test_a_retry_with_its_key_finds_its_own_claim(job_file: Path) -> None:
    """The job that claimed the folder may be this one, submitted before; only an equal one passes."""
    server = FakeServer()
    job = load_job(job_file)
    server.add(id="old-1", name="mine", job=job)
    server.keys["k"] = "old-1"
    assert run(server, "submit", job_file, "--key", "k", "--json").json["id"] == "old-1"
    assert run(server, "submit", job_file).status == 2
    server.add(id="old-1", name="mine", job=make_job())
    assert run(server, "submit", job_file, "--key", "k").status == 2


@pytest.mark.parametrize("command", ["check", "submit"])
def test_a_sequence_beyond_the_models_positions_is_refused(job_file: Path, command: str) -> None:
    """Before a server is asked, with the nearest valid value."""
    (job_file.parent / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": 4}))
    done = run(FakeServer(), command, job_file)
    assert done.status == 2
    assert "training.sequence_length: 8 exceeds the positions" in done.err
    assert "nearest valid value: 4" in done.err


@pytest.mark.parametrize(
    ("degrees", "words"),
    [("ep=9", "ep=9 for 1 experts in a layer"), ("tp=3", "tp=3 does not divide the 4 attention heads")],
)
def test_memory_refuses_degrees_that_the_model_cannot_have(tmp_path: Path, degrees: str, words: str) -> None:
    """A table for more experts than there are would be a figure about nothing."""
    sizes = {"num_attention_heads": 4, "intermediate_size": 128, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | sizes | {"model_type": "llama"}))
    done = run(None, "memory", tmp_path / "config.json", "--parallel", degrees)
    assert done.status == 2
    assert words in done.err
    assert "nearest valid: " in done.err
