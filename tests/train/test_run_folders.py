"""What a worker does with the folders of its run, without training: claims, the source of `resume`, the export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isthmus.core.errors import InputError
from isthmus.core.job import CheckpointConfig
from isthmus.core.messages.worker_folder import WorkerFolder, WorkerSpec
from isthmus.core.runs.run_folder import read_claim
from isthmus.train.process.run_folders import check_resume, claim_output, claim_run_folders
from tests.train.worker_jobs import make_job, make_plan, whole


def spec_of(folder: Path, run: str = "job-1", *, has_trained: bool = False, **changes: Any) -> WorkerSpec:
    """The specification of the only rank of a job."""
    job = make_job(folder, **changes)
    return WorkerSpec(run=run, attempt=1, rank=0, job=job, plan=whole(job), has_trained=has_trained)


def test_all_ranks_and_attempts_of_a_job_share_its_folders(tmp_path: Path) -> None:
    """The claim has the job's fields and the digests of its files."""
    spec = spec_of(tmp_path)
    claim_run_folders(spec)
    claim_run_folders(spec.model_copy(update={"attempt": 2}))
    owner = read_claim(Path(spec.job.checkpoints.folder))
    assert owner is not None
    assert (owner.job, owner.fields["training.learning_rate"]) == ("job-1", 3e-3)
    assert read_claim(Path(spec.job.output)) == owner


def test_another_job_is_refused_in_a_way_that_no_restart_repeats(tmp_path: Path) -> None:
    """`InputError` is the exit status of a permanent fault; another architecture is told as such."""
    claim_run_folders(spec_of(tmp_path))
    with pytest.raises(InputError, match=r"output .* belongs to job job-1, which differs: seed: 7 there, 8"):
        claim_run_folders(spec_of(tmp_path, "job-2", training={"seed": 8}))
    elsewhere = spec_of(tmp_path, "job-2", variant="mixtral", output=str(tmp_path / "other"))
    with pytest.raises(InputError, match=r"checkpoints.folder .* model\.architecture"):
        claim_run_folders(elsewhere)


def test_a_job_of_an_earlier_release_continues_in_its_folders(tmp_path: Path) -> None:
    """It has trained before, so checkpoints and a half-written export without a claim are its own."""
    (tmp_path / "checkpoints/step-00000003").mkdir(parents=True)
    (tmp_path / "output/.export").mkdir(parents=True)
    with pytest.raises(InputError, match="output"):
        claim_run_folders(spec_of(tmp_path))
    claim_run_folders(spec_of(tmp_path, has_trained=True))
    claim_run_folders(spec_of(tmp_path))


def test_an_output_that_changed_hands_is_not_overwritten(tmp_path: Path) -> None:
    """Before the export the claim is checked again: the folder may have been replaced since the start."""
    claim_run_folders(spec_of(tmp_path))
    (tmp_path / "output").rename(tmp_path / "moved")
    claim_output(spec_of(tmp_path, "job-2"))
    with pytest.raises(InputError, match="belongs to job job-2"):
        claim_output(spec_of(tmp_path))


def test_a_source_is_needed_only_before_the_first_own_checkpoint(tmp_path: Path) -> None:
    """Later the job continues from its own, even if the source is gone."""
    spec = spec_of(tmp_path, resume=str(tmp_path / "old"))
    with pytest.raises(InputError, match="old holds no complete checkpoint"):
        check_resume(spec)
    (tmp_path / "checkpoints/step-00000002").mkdir(parents=True)
    check_resume(spec)


def test_a_source_may_be_at_another_site(tmp_path: Path) -> None:
    """Of several sites only some need to have the source: the ranks look for it together."""
    spec = spec_of(tmp_path, resume=str(tmp_path / "old"))
    check_resume(spec.model_copy(update={"plan": make_plan(spec.job, [2, 4], "ab")}))


def test_a_job_that_only_the_server_can_find_is_refused(tmp_path: Path) -> None:
    """A worker that is started by hand cannot look a job up."""
    with pytest.raises(InputError, match="names a job"):
        check_resume(spec_of(tmp_path, resume="job-0"))


def test_a_worker_started_by_hand_gets_folders_of_its_run(tmp_path: Path) -> None:
    """`{job}` in a specification stands for its run, also in the default folder."""
    folder, spec = WorkerFolder(tmp_path), spec_of(tmp_path)
    folder.write_spec(spec.model_copy(update={"job": spec.job.model_copy(update={"checkpoints": CheckpointConfig()})}))
    assert folder.read_spec().job.checkpoints.folder == "checkpoints/job-1"
