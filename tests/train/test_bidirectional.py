"""Rules of schedules through two copies of the model: one set of weights, and the curve of one process."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from isthmus.core.errors import PeerError
from isthmus.core.job import TrainingConfig
from isthmus.core.plan import Plan
from isthmus.train.process.verify import verify
from tests.train.replica_threads import Cut, Replicas, curve
from tests.train.replica_threads import make_plan as plan_of_cuts
from tests.train.small_models import write_config
from tests.train.test_worker import moved
from tests.train.worker_jobs import make_job, make_plan, run_job, started, whole

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTH = 8


def make_training(**changes: object) -> TrainingConfig:
    """Return hyper-parameters for a model of a few thousand parameters, and eight micro-batches of one."""
    fields = {
        "steps": 3, "sequence_length": LENGTH, "micro_batch_size": 1, "global_batch_size": 8,
        "learning_rate": 3e-3, "warmup_steps": 3, "precision": "fp32", "clip_norm": 0.5,
    }  # fmt: skip
    return TrainingConfig.model_validate(fields | changes)


def cuts(ends: Sequence[int], clusters: str, replicas: int = 1) -> list[Cut]:
    """Return equal replicas that share the batch."""
    return [Cut(ends=ends, clusters=clusters, micro_batches=8 // replicas, size=1)] * replicas


def bidirectional(ends: Sequence[int], clusters: str, replicas: int = 1, **changes: object) -> Plan:
    """Return a plan in which micro-batches enter at both ends of each replica."""
    return plan_of_cuts(cuts(ends, clusters, replicas), LENGTH, schedule="dualpipe", **changes)


@pytest.mark.parametrize(
    ("variant", "ends", "clusters"),
    [
        ("llama-tied", [1, 4], "ab"),
        pytest.param("mixtral", [1, 2, 3, 4], "aabb", marks=pytest.mark.slow),
    ],
)
def test_both_directions_train_what_one_process_trains(
    variant: str, ends: list[int], clusters: str, tmp_path: Path
) -> None:
    """Uneven stages whose mirror images hold other layers: the curve to 1e-6, one norm, one set of bits."""
    model, training = write_config(tmp_path, variant), make_training()
    alone = curve(model, plan_of_cuts(cuts([4], "a"), LENGTH), training)
    replicas = Replicas(model, bidirectional(ends, clusters), training)
    try:
        found = replicas.train(training.steps)
        held = [replicas.weights(rank) for rank in range(len(ends))]
    finally:
        replicas.close()
    assert [one.loss for one in found] == pytest.approx([one.loss for one in alone], rel=1e-6)
    assert [one.gradient_norm for one in found] == pytest.approx([one.gradient_norm for one in alone], rel=1e-5)
    for one, other in zip(held, reversed(held), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(weight, other[name]) for name, weight in one.items())


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"zero": 1}, {"optimizer_on_host": True}], ids=["zero 1", "host"])
def test_replicas_of_two_copies_share_as_others_do(changes: dict, tmp_path: Path) -> None:
    """Two replicas of two stages hold each layer four times: still the curve of one process, also in bf16."""
    model = write_config(tmp_path, "llama-tied")
    for precision, rel in (("fp32", 1e-6), ("bf16", 1e-2)):
        training = make_training(precision=precision)
        alone = curve(model, plan_of_cuts(cuts([4], "a"), LENGTH), training)
        found = curve(model, bidirectional([3, 4], "aa", replicas=2, **changes), training)
        assert [one.loss for one in found] == pytest.approx([one.loss for one in alone], rel=rel)


@pytest.mark.slow
def test_workers_run_resume_and_export_it(tmp_path: Path) -> None:
    """Real processes in two clusters, one killed: another cut goes on from its checkpoint; the result opens.

    1. One process trains. 2. Two stages, each with both copies, selective recomputation and the optimizer on
    the host, train until the first is killed. 3. Two others, without either, go on from the newest
    checkpoint, which holds each layer once, and export the model.
    """
    steps = 8
    training = {"evaluate_every": 4, "evaluate_samples": 5}
    job = make_job(tmp_path, "llama-tied", steps=steps, training=training, checkpoints={"every_steps": 3})
    alone = run_job(tmp_path / "alone", moved(job, tmp_path / "alone"), whole(job))
    cut = moved(job, tmp_path / "cut")
    plan = make_plan(job, [1, 4], "ab", schedule="dualpipe", stage={"recompute": "selective"})
    plan = plan.model_copy(update={"optimizer_on_host": True})
    with started(tmp_path / "cut", cut, plan) as first:
        first.wait_for_step(4)
        os.kill(first.processes[0].pid, signal.SIGKILL)
        assert first.wait() == [-signal.SIGKILL, PeerError.exit_code]
    assert first.log(0).startswith("rank 0: layers 0 to 0 and 1 to 3 in cluster a")
    assert first.losses() == pytest.approx(alone.losses()[: len(first.losses())], rel=1e-4)
    other = make_plan(job, [3, 4], "ab", schedule="dualpipe")
    last = run_job(tmp_path / "cut", cut, other, attempt=2)
    assert last.losses() == pytest.approx(alone.losses()[-len(last.losses()) :], rel=1e-4)
    assert last.losses("validation_loss")[-1] == pytest.approx(alone.losses("validation_loss")[-1], rel=1e-4)
    assert "loss" not in last.metrics(0)[-1].values
    AutoModelForCausalLM.from_pretrained(cut.output)
    assert verify(cut)["loss"] == pytest.approx(last.losses("validation_loss")[-1], rel=1e-4)
