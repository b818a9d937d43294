"""Rules of forward passes beside training: a reference model, recomputed old log-probabilities, and sharded weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.core.job import Job
from isthmus.core.plan import Plan
from tests.rl.rl_jobs import PROGRAM, make_rl_job
from tests.train.worker_jobs import at_site, make_plan, run_job, whole

pytestmark = pytest.mark.slow

PASSES = {"kl": 0.2, "old": "recomputed", "correction": {"level": "token", "truncate": 2.0}}


def replicas(job: Job, zero: int) -> Plan:
    """Return a plan of two replicas in one cluster that share their weights by ZeRO."""
    stage = {"cluster": "a", "node_group": "cpu", "layers": (0, 4)}
    return Plan.model_validate(
        {
            "id": "z", "stages": [stage], "dp": 2, "equal_replicas": True, "zero": zero, "micro_batch_size": 4,
            "micro_batches": 2, "sequence_length": job.training.sequence_length,
        }
    )  # fmt: skip


def values(folder: Path, job: Job, plan: Plan, name: str) -> list[float]:
    """Run a job at a site of its own; return a metric of its steps, by the rank that reports it."""
    found = run_job(folder, at_site(job, folder), plan, program=PROGRAM)
    return [one.values[name] for rank in range(len(plan.ranks)) for one in found.metrics(rank) if name in one.values]


def test_a_penalty_keeps_the_first_weights_on_any_plan(tmp_path: Path) -> None:
    """The first step is at the reference, later ones are not; a pipeline and ZeRO 3 see what one process sees.

    Without the penalty the first loss is the same, and what is learned is another.
    """
    job = make_rl_job(tmp_path, rl=PASSES)
    alone = run_job(tmp_path / "alone", at_site(job, tmp_path / "alone"), whole(job), program=PROGRAM)
    apart = [one.values["kl_reference"] for one in alone.metrics(0)]
    assert apart[0] == pytest.approx(0, abs=1e-9)
    assert apart[2] > 1e-4
    free = make_rl_job(tmp_path, rl=PASSES | {"kl": 0.0})
    losses = values(tmp_path / "free", free, whole(free), "loss")
    assert losses[0] == pytest.approx(alone.losses()[0], abs=1e-7)
    assert losses[2] != pytest.approx(alone.losses()[2], abs=1e-4)
    for name, plan in {"two": make_plan(job, [1, 4], "ba"), "zero 3": replicas(job, 3)}.items():
        assert values(tmp_path / name, job, plan, "kl_reference") == pytest.approx(apart, abs=1e-5), name


def test_sharded_weights_are_gathered_for_rollouts(tmp_path: Path) -> None:
    """ZeRO 3 without further passes gives the rewards and losses of ZeRO 0: engines decode by whole weights."""
    job = make_rl_job(tmp_path)
    found = {
        zero: [values(tmp_path / f"{zero}{name}", job, replicas(job, zero), name) for name in ("loss", "reward")]
        for zero in (0, 3)
    }
    for one, other in zip(found[0], found[3], strict=True):
        assert one == pytest.approx(other, abs=1e-5)
