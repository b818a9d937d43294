"""The 50 pairs of jobs that share a checkpoint folder, an output or a name: none is reused or overwritten silently."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks._first_hour_pairs import NUM_PAIRS, Pair, make_pairs, write_inputs
from isthmus.control.service.folders_in_use import FoldersInUse
from isthmus.control.state.coordinator_config import CoordinatorConfig
from isthmus.control.state.job_records import JobRecord, PoolState
from isthmus.core.errors import InputError
from isthmus.core.job import Job
from isthmus.core.model import load_model
from isthmus.core.runs.run_folder import claim_folder
from isthmus.core.runs.run_identity import run_identity
from isthmus.core.runs.visible_folders import check_visible_folders
from isthmus.core.views.api_views import Submission

PAIRS = make_pairs()


@dataclass(frozen=True)
class Inputs:
    """A folder with the models of all pairs."""

    folder: Path

    def submission(self, fields: dict[str, Any]) -> Submission:
        """The submission of one job of a pair, with absolute paths."""
        paths = {"model": str(self.folder / fields["model"]), "output": str(self.folder / fields["output"])}
        checkpoints = {"folder": str(self.folder / fields["checkpoints"]["folder"])}
        job = Job.model_validate(fields | paths | {"checkpoints": checkpoints})
        return Submission(job=job, model=load_model(job.model))


@pytest.fixture
def inputs(tmp_path: Path) -> Inputs:
    """The inputs of the pairs in an empty folder."""
    write_inputs(tmp_path)
    return Inputs(tmp_path)


def test_there_are_50_pairs_each_with_its_own_names():
    """Every combination of shared names occurs, and pairs share nothing with each other."""
    assert len({pair.name for pair in PAIRS}) == NUM_PAIRS == 50
    assert {pair.shared for pair in PAIRS[:7]} == {pair.shared for pair in PAIRS}
    outputs = [pair.first["output"] for pair in PAIRS]
    assert len(set(outputs)) == len(outputs)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_a_claimed_folder_is_refused_to_the_second_job(pair: Pair, inputs: Inputs):
    """The first job has claimed its folders: the second is refused by the command line and, past it, by its own
    claim at the start, exactly if the two share a folder; and the claims stay those of the first job."""
    one, two = inputs.submission(pair.first), inputs.submission(pair.second)
    claim(one, "one-1")
    outcomes = [attempt(lambda: check_visible_folders(two.job, two.model, lambda _: False))]
    outcomes.append(attempt(lambda: claim(two, "two-2")))
    assert [bool(text) for text in outcomes] == [pair.must_refuse] * 2
    assert all("belongs to job one-1" in text for text in outcomes if text)
    claim(one, "one-1")


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_a_folder_of_a_live_job_is_refused_to_the_second_job(pair: Pair, inputs: Inputs):
    """Before any worker has started, the server refuses the second job, exactly if the two share a folder."""
    one, two = inputs.submission(pair.first), inputs.submission(pair.second)
    record = JobRecord.create("one-1", 1, "ann", one, 0.0)
    state = PoolState(config=CoordinatorConfig(), jobs={"one-1": record}, live_jobs={"one-1": record}, num_submitted=1)
    refusal = attempt(lambda: FoldersInUse().check(state, "ann", two, "two-2"))
    assert bool(refusal) == pair.must_refuse


def claim(wanted: Submission, job_id: str) -> None:
    """Claim the folders of a job as its first worker does."""
    job = wanted.job
    for use, folder in (("output", job.output), ("checkpoints.folder", job.checkpoints.folder)):
        claim_folder(Path(folder), use, job_id, lambda: run_identity(job_id, job, wanted.model))


def attempt(action: Any) -> str:
    """Return the refusal of an action, empty if it succeeds."""
    try:
        action()
    except InputError as error:
        return str(error)
    return ""
