"""Rules of audits after a run: what its checkpoints have weights for is recomputed, forgeries are found."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from isthmus.core.errors import InputError, IsthmusError, NotFoundError
from isthmus.core.job import Job
from isthmus.core.views.api_views import PartView
from isthmus.data import open_prompts
from isthmus.rl import LedgerConfig
from isthmus.rl.kept.kept_samples import KeptRange, KeptSample, KeptSamples
from isthmus.rl.process.recompute_samples import recompute_samples
from isthmus.rl.rewards.reward_pool import RewardPool
from isthmus.rl.rollout.rollout_coordinator import RolloutCoordinator
from isthmus.rl.rollout.rollout_limits import RolloutLimits
from isthmus.rl.rollout.rollout_store import RolloutStore
from tests.cli.fake_server import FakeServer, run
from tests.rl.rl_jobs import PROGRAM, make_rl_job
from tests.train.worker_jobs import run_job, whole

CHANGES: dict[str, dict[str, Any]] = {
    "fp32": {"checkpoints": {"every_steps": 2}},
    "bf16": {
        "checkpoints": {"every_steps": 1, "keep": 9}, "training": {"precision": "bf16"}, "rl": {"max_staleness": 1},
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=list(CHANGES))
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Return a job of five steps that has run; of checkpoints after 2, 4 and 5 the last two are kept, or of all steps.

    Where all are kept samples are decoded ahead, and some have tokens of two versions.
    """
    folder = tmp_path_factory.mktemp("audited")
    made = make_rl_job(folder, steps=5, **CHANGES[request.param])
    run_job(folder, made, whole(made), program=PROGRAM)
    return made


@pytest.fixture
def copied(job: Job, tmp_path: Path) -> Job:
    """Return the job with a copy of its checkpoints and its model, to be altered."""
    shutil.copytree(job.checkpoints.folder, tmp_path / "checkpoints")
    shutil.copytree(job.model, tmp_path / "model")
    folder = job.checkpoints.model_copy(update={"folder": str(tmp_path / "checkpoints")})
    return job.model_copy(update={"checkpoints": folder, "model": str(tmp_path / "model")})


def kept_file(job: Job, step: int) -> Path:
    """Return the file with the tokens of a step."""
    return Path(job.checkpoints.folder) / "rollouts" / "trained" / f"step-{step:08d}.json"


def alter(job: Job, step: int, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what is kept of a step."""
    content = json.loads(kept_file(job, step).read_text())
    change(content)
    kept_file(job, step).write_text(json.dumps(content))


@pytest.mark.slow
def test_an_honest_run_has_no_differing_sample_and_says_what_is_not_on_disk(job: Job) -> None:
    """The first weights are the model's; a version between checkpoints, and one that was removed, are named."""
    honest = {step: recompute_samples(job, step)["after_run"] for step in range(5)}
    assert all(one["differing"] == [] and one["samples"] == 16 for one in honest.values())
    count = {step: one["recomputed"] for step, one in honest.items()}
    is_sparse = job.training.precision == "fp32"
    assert count == ({0: 16, 1: 0, 2: 0, 3: 0, 4: 16} if is_sparse else dict.fromkeys(range(5), 16))
    for step, one in honest.items():
        assert one["recomputed"] + sum(told["samples"] for told in one["not_recomputed"]) == 16, step
        if one["recomputed"]:
            assert one["owners"] == {"a": {"recomputed": one["recomputed"], "differing": 0}}
    reasons = " ".join(told["reason"] for one in honest.values() for told in one["not_recomputed"])
    assert ("version 2 is not on disk" in reasons) is is_sparse
    assert recompute_samples(job, 0, 5)["after_run"]["not_recomputed"] == [{"reason": "not asked for", "samples": 11}]
    with pytest.raises(NotFoundError, match="no step 5"):
        recompute_samples(job, 5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "forged", "problem"),
    [
        ("tokens", lambda token: (token + 100) % 270, "token 2 is not the one drawn"),
        ("tokens", lambda _: 1 << 40, "in a vocabulary of 272"),
        ("log_probabilities", lambda value: value - 0.6, "log-probability of token 2 differs by 0.6"),
    ],
)
def test_a_forgery_in_what_is_kept_is_found(
    copied: Job, field: str, forged: Callable[[Any], Any], problem: str
) -> None:
    """A token, one that the model does not have, a log-probability: sample and owner are named, no other is."""
    content = json.loads(kept_file(copied, 0).read_text())
    place = next(n for n, one in enumerate(content["samples"]) if len(one["tokens"]) > 3)

    def change(content: dict[str, Any]) -> None:
        values = content["samples"][place][field]
        values[2] = forged(values[2])

    alter(copied, 0, change)
    found = recompute_samples(copied, 0)
    (told,) = found["differing"]
    assert (told["sample"], told["owner"]) == (content["samples"][place]["key"], "a")
    assert problem in told["problem"]
    assert found["after_run"]["owners"] == {"a": {"recomputed": 16, "differing": 1}}


@pytest.mark.slow
def test_other_weights_accuse_no_one(copied: Job) -> None:
    """Weights that were replaced, and a version that a run has made twice, are no ground for a verdict."""
    file = Path(copied.model) / "model.safetensors"
    save_file({name: one * 1.5 for name, one in load_file(file).items()}, file, {"format": "pt"})
    after = recompute_samples(copied, 0)["after_run"]
    assert (after["recomputed"], after["differing"]) == (0, [])
    assert "has other weights than the one that sampled" in after["not_recomputed"][0]["reason"]
    alter(copied, 0, lambda content: content.update(names={"0": ""}))
    (told,) = recompute_samples(copied, 0)["after_run"]["not_recomputed"]
    assert "was made twice" in told["reason"]
    shutil.rmtree(copied.model)
    with pytest.raises(IsthmusError, match="model"):
        recompute_samples(copied, 0)


@pytest.mark.slow
def test_a_run_that_was_restarted_names_the_same_weights(copied: Job, tmp_path: Path) -> None:
    """The last step is trained again from the checkpoint before it: its weights have the name that they had."""
    shutil.rmtree(Path(copied.checkpoints.folder) / "step-00000005")
    kept_file(copied, 4).unlink()
    run_job(tmp_path / "again", copied, whole(copied), attempt=2, program=PROGRAM)
    after = recompute_samples(copied, 4)["after_run"]
    assert (after["recomputed"], after["differing"]) == (16, [])


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(step=1),
        lambda content: content.update(names={"0": "f"}),
        lambda content: content["samples"][0].update(tokens=[1]),
        lambda content: content["samples"][0]["log_probabilities"].append(-1.0),
        lambda content: content["samples"][0]["log_probabilities"].__setitem__(0, float("nan")),
        lambda content: content["samples"][0]["ranges"][0].update(start=1),
        lambda content: content["samples"][0]["prompt_tokens"].append(-1),
        lambda content: content["samples"][0]["prompt_tokens"].append(1 << 40),
        lambda content: content.pop("samples"),
    ],
)
def test_damaged_files_are_refused_by_name(copied: Job, change: Callable[[dict[str, Any]], object]) -> None:
    """Whatever was altered that no run writes."""
    alter(copied, 0, change)
    with pytest.raises(InputError):
        recompute_samples(copied, 0)


def test_weights_that_were_made_twice_are_noted_and_survive_a_restart(tmp_path: Path) -> None:
    """A trainer that comes back to a step with other weights leaves no name by which they could be told."""
    config, limits = LedgerConfig(group=2, batch_prompts=1, max_staleness=0), RolloutLimits(
        max_response_tokens=4, vocab_size=9, penalty_of=lambda _: 0.0
    )  # fmt: skip
    first, other = "a" * 64, "b" * 64

    def open_again() -> RolloutCoordinator:
        return RolloutCoordinator(config, limits, open_prompts(job), RewardPool((), 1), RolloutStore(tmp_path / "l"))

    job = make_rl_job(tmp_path)
    for name, noted in ((first, first), (first, first), (other, ""), (first, "")):
        made = open_again()
        made.begin(0, name)
        made.save(0, "")
        made.close()
        assert json.loads((tmp_path / "l" / "snapshot.json").read_text())["names"] == [[0, noted]]


def in_process(arguments: list[str], content: bytes) -> tuple[int, str]:
    """Return what `python -m ARGUMENTS` of a process that reads the ledger does, without its seconds of imports."""
    kept, printed = sys.stdin, io.StringIO()
    sys.stdin = io.TextIOWrapper(io.BytesIO(content))
    try:
        with contextlib.redirect_stdout(printed):
            code = importlib.import_module(arguments[0]).main(arguments[1:])
    finally:
        sys.stdin = kept
    return code, printed.getvalue()


@pytest.mark.slow
def test_the_process_answers_for_a_job_on_its_input(job: Job) -> None:
    """What the command calls: JSON, also of what is wrong."""
    module, text = "isthmus.rl.process.recompute_samples", job.model_dump_json().encode()
    code, printed = in_process([module, "0", "4"], text)
    assert (code, json.loads(printed)["after_run"]["recomputed"]) == (0, 4)
    for arguments, content in ((["0"], b"{}"), ([], b""), (["x"], b""), (["9"], text)):
        code, printed = in_process([module, *arguments], content)
        assert code != 0
        assert json.loads(printed)["hint"]


@pytest.mark.slow
def test_the_command_recomputes_the_samples_of_a_job_that_has_ended(copied: Job) -> None:
    """It counts by owner, and names sample, cluster and problem; while the job runs it reads what is known."""
    if copied.training.precision != "fp32":
        pytest.skip("a process of some seconds, once")
    server = FakeServer()
    part = PartView(cluster="a", owner="anna", ranks=(0,), desired="running", observed="succeeded")
    view = server.add(job=copied, state="succeeded", parts=(part,))
    alter(copied, 0, lambda content: content["samples"][3]["tokens"].__setitem__(0, 271))
    asked = ("rl", "audit", view.id, "--step", "0", "--json")
    found = run(server, *asked, "--samples", "6").json
    assert found["after_run"]["owners"] == {"anna": {"recomputed": 6, "differing": 1}}
    assert found["after_run"]["not_recomputed"] == [{"reason": "not asked for", "samples": 10}]
    (told,) = found["differing"]
    assert (told["owner"], told["problem"][:30]) == ("a", "token 0 is not the one drawn: ")
    server.add(job=copied, state="running", parts=(part,))
    assert "after_run" not in run(server, *asked).json


def made_samples(count: int, length: int) -> list[KeptSample]:
    """Return samples of version 0."""
    piece = KeptRange(start=0, end=length, version=0, engine="e", owner="o")
    return [
        KeptSample(
            key=(n, 0, 0), ranges=(piece,), prompt_tokens=(1,), tokens=(2,) * length,
            log_probabilities=(-0.125,) * length,
        )
        for n in range(count)
    ]  # fmt: skip


def test_what_is_kept_is_bounded(tmp_path: Path) -> None:
    """Of a step as many samples as fit, the others are counted; of all steps the newest."""
    kept = KeptSamples(tmp_path, max_step_bytes=20_000, max_kept_bytes=20_000)
    for step in range(6):
        kept.write(step, {0: "0" * 64, 8: "1" * 64}, made_samples(20, 100))
    assert 0 < len(kept.steps()) < 6
    assert kept.steps()[-1] == 5
    found = kept.read(5)
    assert (len(found.samples), found.num_left_out) == (5, 15)
    assert found.names == {0: "0" * 64}
    assert sum(one.stat().st_size for one in (tmp_path / "trained").iterdir()) <= 20_000
    with pytest.raises(NotFoundError):
        kept.read(0)


@given(st.binary(max_size=64) | st.text(alphabet='{}[]":,0123456789eE-', max_size=64).map(str.encode))
def test_any_bytes_are_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    """A file of any content is a named error."""
    folder = tmp_path_factory.mktemp("any")
    (folder / "trained").mkdir()
    (folder / "trained" / "step-00000000.json").write_bytes(content)
    with pytest.raises(InputError):
        KeptSamples(folder).read(0)
