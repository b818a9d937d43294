"""Folders of runs with real processes: a foreign one is refused without a restart, a resumed one stays as it was."""

from pathlib import Path

import pytest

from benchmarks._first_hour_pairs import submit_file
from isthmus.cli.demo.demo_pool import DemoPool
from tests.e2e.site import all_metrics, make_job, state_is, submit

pytestmark = pytest.mark.slow


def files_in(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of every file below a folder."""
    return {str(one): (one.stat().st_size, one.stat().st_mtime_ns) for one in folder.rglob("*") if one.is_file()}


def test_a_job_cannot_adopt_the_checkpoints_of_another_but_may_resume_them(pairs: DemoPool) -> None:
    """Another learning rate in the same folders: refused by the command line with the difference; past it, by the
    worker, at once and without a restart. `resume` trains only the rest, into folders of its own."""
    client, folder = pairs.client, pairs.folder
    one = make_job(folder, "one", steps=4, every_steps=0, parallel={"pp": 1, "tp": 1, "dp": 1})
    first = submit(client, one)
    state_is(client, first.id, "succeeded")
    before = files_in(folder / "one")
    # The command line sees the folder.
    two = one.model_copy(update={"training": one.training.model_copy(update={"learning_rate": 0.1, "steps": 6})})
    refused = submit_file(pairs, two.model_dump(mode="json"))[1]
    assert f"belongs to job {first.id}, which differs: learning_rate: 0.003 there, 0.1 in this job" in refused
    # The worker sees it where the command line does not.
    failed = state_is(client, submit(client, two).id, "failed")
    assert failed.restarts == 0
    assert f"belongs to job {first.id}, which differs: learning_rate: 0.003 there, 0.1 in this job" in failed.reason
    # Knowingly, into the job's own folders.
    own = {"checkpoints": {"every_steps": 0}, "output": str(folder / "two" / "{job}"), "resume": first.id}
    three, refused = submit_file(pairs, two.model_dump(mode="json") | own)
    assert three is not None, refused
    state_is(client, three.id, "succeeded")
    assert {metric.step for metric in all_metrics(client, three.id)} == {4, 5}
    log = "".join(chunk.text for chunk in client.logs(three.id).chunks)
    assert f"resumes job {first.id}" in log
    assert "learning_rate: 0.003 there, 0.1 in this job; steps: 4 there, 6 in this job" in log
    assert (folder / "two" / three.id / "model.safetensors.index.json").exists()
    assert files_in(folder / "one") == before
