"""The identity of a run, the claim of its folders, and what may be resumed."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.errors import InputError, UnavailableError
from isthmus.core.job import Job, ResumeSource, with_own_folders
from isthmus.core.model import Model
from isthmus.core.runs.content_digests import content_digests
from isthmus.core.runs.resume_folder import inspect_resume
from isthmus.core.runs.run_folder import (
    CLAIM_FILE,
    CLAIM_FOLDER,
    MAX_CLAIM_BYTES,
    claim_folder,
    newest_checkpoint_step,
    read_claim,
)
from isthmus.core.runs.run_identity import RunIdentity, differences, list_differences, run_identity, shape_differences
from isthmus.core.runs.visible_folders import check_visible_folders

MODEL = Model(
    path="/m",
    architecture="LlamaForCausalLM",
    num_layers=2,
    hidden_size=8,
    vocab_size=9,
    config={"hidden_size": 8, "rope_theta": 1e4},
)


def make_job(folder: Path = Path("/runs"), **changes: Any) -> Job:
    """A job whose folders lie in `folder`."""
    fields: dict[str, Any] = {
        "name": "n",
        "model": "/m",
        "data": {"paths": ["/text"]},
        "training": {"steps": 10} | changes.pop("training", {}),
        "checkpoints": {"folder": str(folder / "ck")},
        "output": str(folder / "out"),
    }
    return Job.model_validate(fields | changes)


def identity(job_id: str, **changes: Any) -> RunIdentity:
    """The identity of `make_job`."""
    return run_identity(job_id, make_job(**changes), MODEL)


def claim(folder: Path, job_id: str, use: Any = "checkpoints.folder", *, adopt: bool = False, **changes: Any) -> None:
    """Claim a folder for a job."""
    claim_folder(folder, use, job_id, lambda: identity(job_id, **changes), adopt=adopt)


def save(folder: Path, step: int) -> None:
    """A folder with the name of a complete checkpoint."""
    (folder / f"step-{step:08d}").mkdir(parents=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"priority": "high"},
        {"parallel": {"tp": 2}},
        {"transport": "process"},
        {"name": "other"},
        {"max_restarts": 9},
        {"checkpoints": {"folder": "/x", "every_steps": 3, "keep": 9}},
        {"training": {"micro_batch_size": 2}},
        {"training": {"optimizer_on_host": True}},
        {"training": {"evaluate_every": 2, "evaluate_samples": 3}},
    ],
)
def test_fields_that_leave_the_result_unchanged_are_not_part_of_a_run(changes):
    """Plan, priority, transport, interval and evaluation may differ within one run."""
    assert differences(identity("a"), identity("b", **changes)) == ()


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"training": {"learning_rate": 1e-3}}, "learning_rate: 0.0003 there, 0.001 in this job"),
        ({"training": {"seed": 2}}, "seed: 0 there, 2 in this job"),
        ({"training": {"steps": 20}}, "steps: 10 there, 20 in this job"),
        ({"training": {"global_batch_size": 16}}, "global_batch_size: 8 there, 16 in this job"),
        ({"training": {"precision": "fp32"}}, 'precision: "bf16" there, "fp32" in this job'),
        ({"data": {"paths": ["/other"]}}, 'data.paths: "[\\"/text\\"]" there, "[\\"/other\\"]" in this job'),
        ({"data": {"paths": ["/text"], "tokenizer": "/t"}}, 'data.tokenizer: "model" there, "/t" in this job'),
    ],
)
def test_fields_that_change_the_result_are_told_with_both_values(changes, shown):
    """The text of a difference names the field, its value there and its value here."""
    assert [str(one) for one in differences(identity("a"), identity("b", **changes))] == [shown]


def test_a_model_of_other_shapes_is_told_from_one_that_only_computes_otherwise():
    """Widths change shapes, a rotation's base does not; both are differences, names of files are none."""
    other = MODEL.model_copy(update={"config": {"hidden_size": 16, "rope_theta": 1e6, "torch_dtype": "float32"}})
    found = differences(identity("a"), run_identity("b", make_job(), other))
    assert [one.field for one in found] == ["model.config.hidden_size", "model.config.rope_theta"]
    assert [one.field for one in shape_differences(found)] == ["model.config.hidden_size"]


def test_many_differences_are_counted():
    """An error lists four, training fields first, and counts the others."""
    training = {"learning_rate": 1.0, "seed": 5, "beta1": 0.5, "beta2": 0.5, "epsilon": 1.0}
    text = list_differences(differences(identity("a"), identity("b", training=training)))
    assert text.count(" there, ") == 4
    assert text.endswith("; and 1 more")


@given(
    st.dictionaries(
        st.text(max_size=30),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
            lambda one: st.lists(one, max_size=3) | st.dictionaries(st.text(max_size=5), one, max_size=3),
            max_leaves=5,
        ),
        max_size=20,
    )
)
def test_an_identity_survives_its_file(config):
    """Whatever a `config.json` holds, the identity is bounded, and reading what was written gives it back."""
    one = run_identity("a", make_job(), MODEL.model_copy(update={"config": config}))
    assert RunIdentity.model_validate_json(one.model_dump_json()) == one


def test_content_counts_where_it_decides_the_result(tmp_path: Path):
    """The tokenizer's file always; samples of the weights unless the task starts from random ones."""
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"x" * 200_000)
    job = make_job(model=str(tmp_path), data={"paths": ["/text"], "tokenizer": str(tmp_path)})
    assert content_digests(job).keys() == {"data.tokenizer_sha256"}
    before = content_digests(job.model_copy(update={"task": "continue"}))
    (tmp_path / "model.safetensors").write_bytes(b"x" * 199_999 + b"y")
    after = content_digests(job.model_copy(update={"task": "continue"}))
    assert before["model.weights_sha256"] != after["model.weights_sha256"]
    assert content_digests(make_job(model="/missing")) == {}


def test_the_jobs_id_completes_its_folders():
    """`{job}` stands for the id in both folders; other text stays."""
    job = make_job(checkpoints={"folder": "/c/{job}"}, output="/o/{job}/r")
    own = with_own_folders(job, "n-1")
    assert (own.checkpoints.folder, own.output) == ("/c/n-1", "/o/n-1/r")
    assert with_own_folders(make_job(), "n-1") == make_job()


def test_a_folder_is_claimed_once_and_stays_the_jobs(tmp_path: Path):
    """Every rank and every restart of the job finds the claim; another job is refused with the difference."""
    claim(tmp_path / "ck", "a-1")
    claim(tmp_path / "ck", "a-1", training={"seed": 9})
    with pytest.raises(InputError) as caught:
        claim(tmp_path / "ck", "b-2", training={"seed": 9})
    assert "belongs to job a-1, which differs: seed: 0 there, 9 in this job" in caught.value.message
    assert "`resume: a-1`" in (caught.value.hint or "")
    assert read_claim(tmp_path / "ck") == identity("a-1")


def test_an_equal_job_is_another_job(tmp_path: Path):
    """Two jobs with the same fields would write over each other all the same."""
    claim(tmp_path, "a-1")
    with pytest.raises(InputError, match="which has the same training fields"):
        claim(tmp_path, "b-2")


def test_of_many_that_race_for_a_folder_one_wins(tmp_path: Path):
    """16 threads claim at once, each for its own job: one succeeds, the others are refused, nothing is left."""
    start, won, refused = threading.Barrier(16), list[str](), list[str]()

    def race(job_id: str) -> None:
        start.wait()
        try:
            claim(tmp_path / "ck", job_id)
            won.append(job_id)
        except InputError as error:
            refused.append(error.message)

    threads = [threading.Thread(target=race, args=(f"j-{number}",)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert all(f"belongs to job {won[0]}" in one for one in refused)
    assert [one.name for one in (tmp_path / "ck").iterdir()] == [CLAIM_FOLDER]


def test_checkpoints_without_a_claim_are_foreign_unless_the_job_has_trained(tmp_path: Path):
    """Those of an earlier release: a new job is refused, a job that trained before the upgrade continues."""
    save(tmp_path / "ck", 5)
    with pytest.raises(InputError, match="holds checkpoints that no job has claimed") as caught:
        claim(tmp_path / "ck", "a-1")
    assert f"resume: {tmp_path / 'ck'}" in (caught.value.hint or "")
    claim(tmp_path / "ck", "a-1", adopt=True)
    claim(tmp_path / "ck", "a-1")


def test_an_output_that_holds_anything_is_refused(tmp_path: Path):
    """A folder that the job has not written is not the job's; an empty one and its own are."""
    claim(tmp_path / "new", "a-1", "output")
    (tmp_path / "new" / "config.json").write_text("{}")
    claim(tmp_path / "new", "a-1", "output")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"has not written, such as 'notes.txt'") as caught:
        claim(tmp_path / "full", "a-1", "output")
    assert "full-{job}" in (caught.value.hint or "")
    with pytest.raises(InputError, match=r"output .* belongs to job a-1"):
        claim(tmp_path / "new", "b-2", "output")


def test_a_place_that_cannot_be_a_folder_is_named(tmp_path: Path):
    """A file in the folder's place is an error with its name, not a traceback."""
    (tmp_path / "taken").write_text("")
    with pytest.raises(InputError, match="taken"):
        claim(tmp_path / "taken", "a-1", "output")
    with pytest.raises(UnavailableError, match="taken"):
        claim(tmp_path / "taken", "a-1")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"version": 1, "job": "../../etc", "fields": {}}',
        b'{"version": 9, "job": "a", "fields": {}}',
        b'{"version": 1, "job": "a", "fields": {"x": ["list"]}}',
        b'{"version": 1, "job": "a", "fields": {"x": "' + b"y" * 513 + b'"}}',
        b'{"version": 1, "job": "a", "fields": {' + b",".join(b'"%d": 1' % i for i in range(513)) + b"}}",
        b"x" * (MAX_CLAIM_BYTES + 1),
    ],
)
def test_a_hostile_claim_refuses_the_folder(tmp_path: Path, content: bytes):
    """A claim is read bounded and validated; whatever it holds, the folder stays untouched and the error names it."""
    file = tmp_path / CLAIM_FOLDER / CLAIM_FILE
    file.parent.mkdir()
    file.write_bytes(content)
    with pytest.raises(InputError, match=CLAIM_FILE):
        claim(tmp_path, "a-1")
    assert file.read_bytes() == content


def test_a_claim_that_is_no_file_does_not_block(tmp_path: Path):
    """A pipe in the claim's place would block a reader for good."""
    (tmp_path / CLAIM_FOLDER).mkdir()
    os.mkfifo(tmp_path / CLAIM_FOLDER / CLAIM_FILE)
    with pytest.raises(InputError, match="not a regular file"):
        read_claim(tmp_path)


def test_control_characters_of_a_claim_reach_no_terminal(tmp_path: Path):
    """Values of a foreign claim are escaped in the message."""
    evil = identity("a-1").model_copy(update={"fields": {"training.seed": "\x1b[2J"}})
    claim_folder(tmp_path, "checkpoints.folder", "a-1", lambda: evil)
    with pytest.raises(InputError) as caught:
        claim(tmp_path, "b-2")
    assert "\x1b" not in str(caught.value)


def test_resuming_names_step_and_differences_and_reads_only(tmp_path: Path):
    """The newest complete checkpoint counts; the source folder is left as it was."""
    claim(tmp_path, "a-1")
    save(tmp_path, 3)
    save(tmp_path, 7)
    (tmp_path / "step-00000009.tmp").mkdir()
    before = sorted(tmp_path.rglob("*"))
    job = make_job(training={"seed": 4}, resume=str(tmp_path))
    note = inspect_resume(tmp_path, job, run_identity("b-2", job, MODEL))
    assert note.text == f"resumes job a-1, {tmp_path}, after step 7; differs: seed: 0 there, 4 in this job"
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("steps", "config", "message"),
    [
        ((), {}, "holds no complete checkpoint"),
        ((10,), {}, "after step 10, this job ends at step 10.*nearest valid training.steps: 11"),
        ((3,), {"hidden_size": 16}, "other weights: model.config.hidden_size: 8 there, 16 in this job"),
    ],
)
def test_what_cannot_be_resumed_is_refused(tmp_path: Path, steps, config, message):
    """Without a checkpoint, without a step left, or with a model of other shapes."""
    claim(tmp_path, "a-1")
    for step in steps:
        save(tmp_path, step)
    here = run_identity("b-2", make_job(), MODEL.model_copy(update={"config": MODEL.config | config}))
    with pytest.raises(InputError, match=message):
        inspect_resume(tmp_path, make_job(), here)


def test_what_this_machine_sees_is_refused_before_submission(tmp_path: Path):
    """A claimed folder with its difference, unless the id is of the same job; an unseen folder passes."""
    job = make_job(tmp_path, training={"seed": 4})
    assert check_visible_folders(job, MODEL, lambda _: False) == job
    claim(tmp_path / "ck", "a-1")
    with pytest.raises(InputError, match="job a-1, which differs: seed: 0 there, 4 in this job"):
        check_visible_folders(job, MODEL, lambda _: False)
    assert check_visible_folders(job, MODEL, lambda one: one == "a-1") == job
    virtual = job.model_copy(update={"compute": "virtual"})
    assert check_visible_folders(virtual, MODEL, lambda _: False) == virtual


def test_a_visible_source_is_described_before_submission(tmp_path: Path):
    """`resume: FOLDER` becomes the folder with its job and the differing fields."""
    claim(tmp_path / "old", "a-1")
    save(tmp_path / "old", 3)
    job = make_job(tmp_path, training={"seed": 4}, resume=str(tmp_path / "old"))
    source = check_visible_folders(job, MODEL, lambda _: False).resume
    shown = ("seed: 0 there, 4 in this job",)
    assert source == ResumeSource(folder=str(tmp_path / "old"), job="a-1", differences=shown)


def test_the_newest_step_is_read_from_the_names(tmp_path: Path):
    """Unfinished folders and other names do not count."""
    assert newest_checkpoint_step(tmp_path / "missing") == 0
    for name in ("step-00000004", "step-00000012.ab.tmp", "step-x", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000020").write_text("a file")
    assert newest_checkpoint_step(tmp_path) == 4
