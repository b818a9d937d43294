"""Runs that learn sums by reinforcement, with real workers: one process, or one that trains while others decode."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks._sums_model import make_job, supervise, write_problem
from isthmus.core.job import Job
from isthmus.core.messages.agent_messages import StepMetrics
from isthmus.core.plan import Plan
from isthmus.rl.rollout.read_ledger import read_ledger
from tests.rl.rl_jobs import PROGRAM
from tests.train.worker_jobs import Workers, started

LIMIT_S = 7200.0
STEADY_STEP = 10
"""Step from which CPU seconds count: before it, libraries load and caches fill."""
_LOOK_S = 0.2


@dataclass(frozen=True, kw_only=True)
class LearningRun:
    """What one run showed, by step where it is a tuple."""

    losses: tuple[float, ...]
    rewards: tuple[float, ...]
    # Reward of the most probable responses to held-out prompts, by the number of steps before it.
    held_out: dict[int, float]
    # CPU seconds of all processes for a step.
    cpu_s: float
    # Mean number of versions between sampling and training of a trained token.
    staleness: float


def learn_sums(folder: Path, seed: int, steps: int, staleness: int = 0, decoders: str = "") -> LearningRun:
    """Train `steps` steps after the supervised ones; ranks at `decoders` decode, without any the trainer in turns."""
    write_problem(folder)
    run = folder / f"seed-{seed}-staleness-{staleness}-{decoders or 'alone'}"
    job = make_job(run, folder / f"model-{seed}", seed, steps, staleness)
    if not Path(job.model).exists():
        supervise(job, Path(job.model), seed)
    with started(run, job, plan_of(job, decoders), program=PROGRAM) as workers:
        cpu_s = _wait(workers, steps)
        statuses = workers.wait(LIMIT_S)
    if any(statuses):
        raise RuntimeError("\n".join(workers.log(rank) for rank in range(len(statuses))))
    return _read(workers.metrics(0), cpu_s, job)


def plan_of(job: Job, decoders: str) -> Plan:
    """Return the plan of one process that trains at cluster a, and of one at each of `decoders`."""
    stage = {"cluster": "a", "node_group": "cpu", "layers": (0, 2)}
    places = [{"cluster": name, "node_group": "cpu"} for name in decoders]
    sizes = {
        "micro_batches": job.training.num_micro_batches, "micro_batch_size": job.training.micro_batch_size,
        "sequence_length": job.training.sequence_length,
    }  # fmt: skip
    return Plan.model_validate({"id": "sums", "stages": [stage], "rollouts": places, **sizes})


def _wait(workers: Workers, steps: int) -> float:
    """Return CPU seconds of a step, between `STEADY_STEP` and the last step that was seen while all ran."""
    deadline_s, marks = time.monotonic() + LIMIT_S, list[tuple[int, float]]()
    while all(one.poll() is None for one in workers.processes):
        if time.monotonic() > deadline_s:
            raise TimeoutError(workers.log(0))
        found = workers.metrics(0)
        step = found[-1].step if found else -1
        if step >= STEADY_STEP and (not marks or step > marks[-1][0]) and step < steps - 1:
            marks = [*marks[:1], (step, sum(map(_cpu_of, (one.pid for one in workers.processes))))]
        time.sleep(_LOOK_S)
    if len(marks) < 2:
        return float("nan")
    return (marks[-1][1] - marks[0][1]) / (marks[-1][0] - marks[0][0])


def _cpu_of(pid: int) -> float:
    """Return user and system seconds of a process and its children that live."""
    try:
        mother = psutil.Process(pid)
        times = [one.cpu_times() for one in (mother, *mother.children(recursive=True))]
    except psutil.NoSuchProcess:
        return 0.0
    return sum(one.user + one.system for one in times)


def _read(metrics: list[StepMetrics], cpu_s: float, job: Job) -> LearningRun:
    held_out = {one.step + 1: one.values["validation_reward"] for one in metrics if "validation_reward" in one.values}
    tokens = read_ledger(Path(job.checkpoints.folder) / "rollouts").staleness
    return LearningRun(
        losses=tuple(one.values["loss"] for one in metrics if "loss" in one.values),
        rewards=tuple(one.values["reward"] for one in metrics if "reward" in one.values),
        held_out=held_out, cpu_s=cpu_s,
        staleness=sum(age * num for age, num in tokens.items()) / max(sum(tokens.values()), 1),
    )  # fmt: skip
