"""Kills and cut links under every way to divide training: a run ends with the bits of one without them.

A sample of two in every run of the tests, the rest with `--whole`.

The fault of a seed: which process is killed, or how the links between the clusters fail, and when. The checkpoints of a
run that is killed for good are resumed by another plan.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from isthmus.core.job import Job
from isthmus.core.plan import Plan
from tests.comm.relay import Relay
from tests.train.device_supervisor import COPIES, MESSAGES
from tests.train.test_worker import moved
from tests.train.worker_jobs import Workers, make_job, run_job, started
from tests.train.worker_jobs import whole as one_process

pytestmark = pytest.mark.slow

STEPS, LAST_FAULT = 16, 11


@dataclass(frozen=True)
class Kind:
    """A model and a plan: replicas by their cluster names, one letter a stage, with the degrees of each stage."""

    variant: str
    replicas: Sequence[str]
    stages: Sequence[dict[str, Any]]
    plan: dict[str, Any]
    training: dict[str, Any]

    def job(self, folder: Path) -> Job:
        return make_job(
            folder, self.variant, steps=STEPS, training={"micro_batch_size": 1, **self.training},
            checkpoints={"every_steps": 4},
        )  # fmt: skip

    def plan_of(self, job: Job) -> Plan:
        size = len(self.stages)
        ends = [0, 4] if size == 1 else [0, 2, 4]
        stages = [
            {"replica": replica, "cluster": cluster, "node_group": "cpu", "layers": layers, **degrees}
            for replica, clusters in enumerate(self.replicas)
            for cluster, layers, degrees in zip(clusters, pairwise(ends), self.stages, strict=True)
        ]
        dp, training = len(self.replicas), job.training
        return Plan.model_validate(
            {
                "id": "p", "stages": stages, "dp": dp, "sequence_length": training.sequence_length,
                "micro_batches": training.global_batch_size // dp, "micro_batch_size": 1, **self.plan,
            }
        )  # fmt: skip


KINDS = {
    "zero 3, ep": Kind("mixtral", ["a", "a", "b", "b"], [{"ep": 2}], {"zero": 3, "sharding": {"replicas": 2}}, {}),
    "zero 2, ep, pipeline": Kind("mixtral", ["ab", "ab"], [{"ep": 2}, {}], {"zero": 2, "schedule": "1f1b"}, {}),
    "cp ring": Kind("llama-tied", ["ab"], [{"cp": 2, "cp_kind": "ring"}] * 2, {"zero": 1}, {}),
    "cp, heads": Kind(
        "qwen3", ["a", "b"], [{"cp": 2, "cp_kind": "all_to_all"}], {"zero": 1, "overlap_gradients": True}, {}
    ),
    "cp, zero 3": Kind("llama", ["ab"], [{"cp": 2, "cp_kind": "gather"}, {"cp": 2}], {"zero": 3}, {}),
    "local steps": Kind("llama-tied", ["a", "b"], [{}], {"local_steps": 3}, {"local_steps": 3}),
    "local steps, zero 2, ep": Kind(
        "mixtral", ["a", "a", "b", "b"], [{"ep": 2}],
        {"local_steps": 3, "zero": 2, "sharding": {"replicas": 2}}, {"local_steps": 3},
    ),
    "local steps, cp": Kind("llama", ["a", "b"], [{"cp": 2}], {"local_steps": 3, "zero": 1}, {"local_steps": 3}),
}  # fmt: skip
SAMPLE = [("zero 3, ep", 1)]


def losses(workers: Workers) -> dict[int, float]:
    """Return the loss of each step; one that was repeated has had one loss."""
    found: dict[int, float] = {}
    for rank in range(len(workers.folders)):
        for one in workers.metrics(rank):
            if "loss" in one.values:
                assert found.setdefault(one.step, one.values["loss"]) == one.values["loss"], one.step
    return found


def worker_of(workers: Workers, rank: int) -> int:
    """Return the process that trains as `rank`."""
    parent = str(workers.processes[rank].pid)
    while True:
        listed = subprocess.run(["ps", "--ppid", parent, "-o", "pid="], capture_output=True, check=False)
        if listed.stdout.split():
            return int(listed.stdout.split()[0])
        time.sleep(0.01)  # between two processes of the rank


def kill(workers: Workers, ranks: Sequence[int]) -> None:
    with suppress(ProcessLookupError):
        for rank in ranks:
            os.kill(worker_of(workers, rank), signal.SIGKILL)


def hold(relay: Relay, seconds: float) -> None:
    """Let nothing pass for a while, which is longer than three heartbeats may be."""
    relay.flowing.clear()
    time.sleep(seconds)
    relay.flowing.set()


def cut_and_kill(relay: Relay, workers: Workers, ranks: Sequence[int]) -> None:
    relay.cut()
    kill(workers, ranks)


def strike(seed: int, workers: Workers, relay: Relay) -> str:
    """Wait for the step of the fault of `seed`, and do it; return its name."""
    chance = random.Random(seed)
    ranks = chance.sample(range(len(workers.folders)), 2)
    faults: dict[str, Callable[[], None]] = {
        "kill": lambda: kill(workers, ranks[:1]),
        "kill two": lambda: kill(workers, ranks),
        "cut": relay.cut,
        "hold": lambda: hold(relay, 1.2),
        "cut and kill": lambda: cut_and_kill(relay, workers, ranks[:1]),
    }
    name = list(faults)[seed % len(faults)]
    workers.wait_for_step(chance.randrange(1, LAST_FAULT))
    time.sleep(chance.uniform(0, 0.03))
    faults[name]()
    return name


def train_with_fault(
    folder: Path, job: Job, plan: Plan, seed: int, program: str = "supervisor"
) -> tuple[str, dict[int, float], Workers]:
    """Train under supervisors, with the links between clusters through a relay."""
    with Relay() as relay:
        routes = dict.fromkeys(plan.clusters, relay.address)
        with started(folder, moved(job, folder), plan, program=program, routes=routes) as workers:
            fault = strike(seed, workers, relay)
            statuses = workers.wait()
            logs = [workers.log(rank) for rank in range(len(statuses))]
            assert statuses == [0] * len(statuses), f"{fault}: {logs}"
            return fault, losses(workers), workers


@pytest.mark.parametrize("kind", KINDS)
def test_kills_and_cuts_change_no_bit(kind: str, whole: bool, tmp_path: Path) -> None:
    """Each kind of plan under one fault of each sort with `--whole`; a sample of them otherwise."""
    seeds = range(5) if whole else [seed for name, seed in SAMPLE if name == kind]
    if not seeds:
        pytest.skip("with --whole")
    job = KINDS[kind].job(tmp_path)
    plan = KINDS[kind].plan_of(job)
    calm = losses(run_job(tmp_path / "calm", moved(job, tmp_path / "calm"), plan))
    assert len(calm) == STEPS
    assert calm[STEPS - 1] < calm[0]
    for seed in seeds:
        fault, found, workers = train_with_fault(tmp_path / f"seed-{seed}", job, plan, seed)
        assert found == calm, f"{kind}, seed {seed}: {fault}"
        if "kill" in fault:
            assert any("restart 1" in workers.log(rank) for rank in range(len(workers.folders)))


DEVICES = {
    "two replicas of two stages": Kind("llama-tied", ["aa", "aa"], [{}] * 2, {"zero": 1}, {}),
    "over two clusters": Kind("llama", ["ab", "ab"], [{"cp": 2}, {}], {"zero": 1, "overlap_gradients": True}, {}),
}


@pytest.mark.parametrize("kind", DEVICES)
def test_kills_and_cuts_of_devices_change_no_bit(kind: str, whole: bool, tmp_path: Path) -> None:
    """Boundaries and sums pass from device to device; the bits are those of a run on the host without a fault."""
    if not (whole or kind == "two replicas of two stages"):
        pytest.skip("with --whole")
    job = DEVICES[kind].job(tmp_path)
    plan = DEVICES[kind].plan_of(job)
    calm = losses(run_job(tmp_path / "calm", moved(job, tmp_path / "calm"), plan))
    assert len(calm) == STEPS
    for seed in range(5) if whole else (0,):
        device = {"program": "tests.train.device_supervisor"}
        fault, found, workers = train_with_fault(tmp_path / f"seed-{seed}", job, plan, seed, **device)
        assert found == calm, f"{kind}, seed {seed}: {fault}"
        for rank, place in enumerate(workers.folders):
            assert (place.path / MESSAGES).exists(), rank
            assert (place.path / COPIES).exists() is (len(plan.clusters) > 1), rank


OTHER_CUTS = {
    "zero 3, ep": "zero 2, ep, pipeline", "zero 2, ep, pipeline": "zero 3, ep", "cp ring": "cp, zero 3",
    "cp, zero 3": "cp ring", "local steps, zero 2, ep": "zero 3, ep",
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHER_CUTS)
def test_a_checkpoint_goes_on_under_another_cut(kind: str, whole: bool, tmp_path: Path) -> None:
    """The run is killed for good; another plan resumes, with the losses of an undisturbed run to 1e-4."""
    if not whole:
        pytest.skip("with --whole")
    first, second = KINDS[kind], KINDS[OTHER_CUTS[kind]]
    job = first.job(tmp_path)
    apart = "local_steps" in first.plan
    calm = losses(run_job(tmp_path / "calm", moved(job, tmp_path / "calm"), one_process(job)))
    cut = moved(job, tmp_path / "cut")
    with started(tmp_path / "cut", cut, first.plan_of(job)) as workers:
        workers.wait_for_checkpoint()
        workers.wait_for_step(5)
        for process in workers.processes:
            os.kill(process.pid, signal.SIGKILL)
        workers.wait()
    other = cut.model_copy(update={"training": job.training.model_copy(update={"local_steps": 1})}) if apart else cut
    found = losses(run_job(tmp_path / "cut", other, second.plan_of(other), attempt=2))
    resumed = STEPS - len(found)
    assert resumed in (4, 8, 12)
    tolerance = 0.1 if apart else 1e-4
    assert found == pytest.approx({step: calm[step] for step in range(resumed, STEPS)}, rel=tolerance)
