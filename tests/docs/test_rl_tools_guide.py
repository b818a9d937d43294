"""The guide on tools: its files run, with one process in place of the pool, and the model learns to ask and to copy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from isthmus.core.files.user_files import load_job
from isthmus.rl.rollout.read_ledger import read_ledger
from tests.docs.follow_guide import ROOT, blocks
from tests.rl.rl_jobs import PROGRAM
from tests.train.worker_jobs import make_plan, started

PAGES = [ROOT / "docs" / "guide" / name for name in ("rl-tools.md", "rl.md")]
SHORT = {"steps: 40\n": "steps: 2\n", "steps: 200": "steps: 2", "evaluate_every: 10": "evaluate_every: 2",
         "algorithm: dapo": "algorithm: grpo"}  # fmt: skip
"""What is trained without `--whole`: a model that knows nothing, whose groups are all alike."""

LONG_S = 280.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_files_of_the_page_train_a_model_that_asks(tmp_path: Path, whole: bool) -> None:
    """Responses have several turns; the calculator's tokens are in the ledger, and nothing is lost or doubled."""
    for block in blocks(PAGES[0]):
        if block.language in ("python", "yaml"):
            text = block.text
            for old, new in () if whole else SHORT.items():
                text = text.replace(old, new)
            (tmp_path / text.partition("\n")[0].removeprefix("# ")).write_text(text)
    (tmp_path / "model").mkdir()
    config = next(one.text for one in blocks(PAGES[1]) if one.language == "json")
    (tmp_path / "model" / "config.json").write_text(config)
    subprocess.run([sys.executable, "prompts.py"], cwd=tmp_path, check=True, env={**os.environ})
    for name, program in (("tool-first", "worker"), ("tool", PROGRAM)):
        job = load_job(tmp_path / f"{name}.yaml")
        with started(tmp_path / f"run-{name}", job, make_plan(job, [2], "a"), program=program) as workers:
            assert workers.wait(LONG_S) == [0], workers.log(0)
    found = read_ledger(Path(job.checkpoints.folder) / "rollouts")
    assert (found.lost, found.doubled) == (0, 0)
    steps = workers.metrics(0)
    assert found.samples["trained"] == len(steps) * 128
    assert 1 <= steps[0].values["turns"] <= 3
    assert "the environment of sample" not in workers.log(0)
    if whole:
        assert found.tokens["(environment)"]["trained"] > 0
        rewards = [one.values["reward"] or 0.0 for one in steps]
        assert sum(rewards[-10:]) > sum(rewards[:10]), rewards
