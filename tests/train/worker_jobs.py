"""Small jobs run by real workers, for tests: specs, processes, rank maps, and what they reported."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from isthmus.core.job import Job
from isthmus.core.messages.agent_messages import RankMap, StepMetrics
from isthmus.core.messages.worker_folder import WorkerFolder, WorkerKeys, WorkerSpec
from isthmus.core.plan import Plan
from tests.forks import ForkedProgram, preload
from tests.train.small_models import NUM_LAYERS, write_config

preload("isthmus.train.process.supervisor")

LIMIT_S = 90.0
SWITCH_KEY = hashlib.sha256(b"switch").hexdigest()
TEXT = "".join(f"The {n}th line says that {n} times {n} is {n * n}. " for n in range(900))


def make_job(folder: Path, variant: str = "llama", *, steps: int = 6, **changes: Any) -> Job:
    """Return a job on a model of a few thousand parameters and 50 kB of text, all below `folder`."""
    model = write_config(folder / "model", variant, vocab_size=272, pad_token_id=None)
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    training = {
        "steps": steps,
        "sequence_length": 16,
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "learning_rate": 3e-3,
        "warmup_steps": 2,
        "precision": "fp32",
        "seed": 7,
        **changes.pop("training", {}),
    }
    return Job.model_validate(
        {
            "name": "small",
            "model": str(model),
            "data": {"paths": [str(folder / "text.txt")], "validation_fraction": 0.05, "tokenizer": "bytes"},
            "training": training,
            "checkpoints": {"folder": str(folder / "checkpoints"), "every_steps": 0} | changes.pop("checkpoints", {}),
            "output": str(folder / "output"),
            **changes,
        }
    )


def fork_worker(folder: Path, log: Path) -> ForkedProgram:
    """Start the worker of `folder` as a fork: the processes of a `check_parallel` need no imports of their own."""
    return ForkedProgram("isthmus.train.process.worker", folder, log)


def at_site(job: Job, root: Path) -> Job:
    """Return the job with the folders of a site that shares none."""
    checkpoints = job.checkpoints.model_copy(update={"folder": str(root / "checkpoints")})
    return job.model_copy(update={"checkpoints": checkpoints, "output": str(root / "output")})


def make_plan(job: Job, ends: Sequence[int], clusters: str = "", **changes: Any) -> Plan:
    """Return a plan whose stages end at the layers `ends`; `clusters[s]` names the cluster of stage `s`."""
    starts = [0, *ends[:-1]]
    stages = [
        {"cluster": cluster, "node_group": "cpu", "layers": (first, last)} | changes.get("stage", {})
        for first, last, cluster in zip(starts, ends, clusters or "abcdef", strict=False)
    ]
    return Plan.model_validate(
        {
            "id": "p",
            "stages": stages,
            "micro_batches": job.training.num_micro_batches,
            "micro_batch_size": job.training.micro_batch_size,
            "sequence_length": job.training.sequence_length,
            "schedule": changes.get("schedule", "1f1b"),
            "chunks": changes.get("chunks"),
            "orders": changes.get("orders", ()),
            "rollouts": changes.get("rollouts", ()),
        }
    )


def whole(job: Job) -> Plan:
    """Return the plan of one process."""
    return make_plan(job, [NUM_LAYERS])


@dataclass
class Workers:
    """The processes of one attempt, one per rank."""

    folders: list[WorkerFolder]
    processes: list[ForkedProgram] = field(default_factory=list)

    def wait(self, limit_s: float = LIMIT_S) -> list[int]:
        """Return the exit statuses."""
        deadline_s = time.monotonic() + limit_s
        return [one.wait(max(deadline_s - time.monotonic(), 0.1)) for one in self.processes]

    def kill_under_supervisor(self, rank: int) -> None:
        """Kill the worker that the supervisor of a rank has started."""
        supervisor = str(self.processes[rank].pid)
        listed = subprocess.run(["ps", "--ppid", supervisor, "-o", "pid="], capture_output=True, check=True)
        os.kill(int(listed.stdout), signal.SIGKILL)

    def log(self, rank: int) -> str:
        return self.folders[rank].log_path.read_text(encoding="utf-8", errors="replace")

    def metrics(self, rank: int) -> list[StepMetrics]:
        """Return what rank `rank` reported so far."""
        file = self.folders[rank].metrics_path
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        return [StepMetrics.model_validate_json(line) for line in lines]

    def losses(self, key: str = "loss") -> list[float]:
        """Return the loss of each step, as the last stage reported it."""
        return [one.values[key] for one in self.metrics(len(self.folders) - 1) if key in one.values]

    def wait_for_step(self, step: int, limit_s: float = LIMIT_S) -> None:
        """Return once rank 0 has reported `step`."""
        deadline_s = time.monotonic() + limit_s
        while not any(one.step >= step for one in self.metrics(0)):
            assert time.monotonic() < deadline_s, [self.log(rank) for rank in range(len(self.folders))]
            assert all(one.poll() is None for one in self.processes), self.log(0)
            time.sleep(0.02)

    def wait_for_checkpoint(self, limit_s: float = LIMIT_S) -> None:
        """Return once every rank has reported a complete checkpoint."""
        deadline_s = time.monotonic() + limit_s
        while not all(one.saved_path.exists() for one in self.folders):
            assert time.monotonic() < deadline_s, [self.log(rank) for rank in range(len(self.folders))]
            time.sleep(0.02)


@contextmanager
def started(
    folder: Path,
    job: Job | Sequence[Job],
    plan: Plan,
    attempt: int = 1,
    program: str = "worker",
    hosts: Sequence[str] = (),
    keyed: bool = True,
    routes_of: Mapping[str, dict[str, str]] = MappingProxyType({}),
    **spec: Any,
) -> Iterator[Workers]:
    """Start one process per rank and give them the rank map; whatever still runs at the end is killed.

    Rank r listens at `hosts[r]`, where given: different addresses stand for different machines. With a job per rank,
    each has the paths of its own site. `routes_of` has the routes of each cluster. Links have keys unless `keyed` is
    false.
    """
    folders = [WorkerFolder(folder / f"{attempt}/rank-{rank}") for rank in range(plan.num_ranks)]
    workers = Workers(folders)
    for rank, place in enumerate(folders):
        here: dict[str, Any] = {"host": hosts[rank]} if hosts else {}
        mine = job if isinstance(job, Job) else job[rank]
        if routes_of:
            here["routes"] = routes_of[plan.stage_of(rank).cluster]
        own = WorkerSpec(run="job-1", attempt=attempt, rank=rank, job=mine, plan=plan, **here, **spec)
        place.write_spec(own)
        if keyed:
            place.write_keys(keys_of(own.cluster, plan))
        module = program if "." in program else f"isthmus.train.process.{program}"
        workers.processes.append(ForkedProgram(module, place.path, place.log_path))
    try:
        _hand_out_ranks(workers)
        yield workers
    finally:
        for process in workers.processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):  # it ends meanwhile
                    os.kill(process.pid, signal.SIGKILL)
            process.wait()


def keys_of(site: str, plan: Plan) -> WorkerKeys:
    """Return the keys of the links of `site`, as a server of the tests makes them."""
    pairs = {other: "/".join(sorted((site, other))) for other in plan.clusters}
    keys = {other: hashlib.sha256(pair.encode()).hexdigest() for other, pair in pairs.items()}
    return WorkerKeys(keys=keys, copies=hashlib.sha256(b"copies").hexdigest(), switch=SWITCH_KEY)


def run_job(folder: Path, job: Job | Sequence[Job], plan: Plan, attempt: int = 1, **spec: Any) -> Workers:
    """Run all ranks to a good end."""
    with started(folder, job, plan, attempt, **spec) as workers:
        statuses = workers.wait()
    assert statuses == [0] * len(statuses), "\n".join(workers.log(rank) for rank in range(len(statuses)))
    return workers


def _hand_out_ranks(workers: Workers) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while None in (addresses := [folder.read_checkin() for folder in workers.folders]):
        if any(one.poll() is not None for one in workers.processes):
            return
        assert time.monotonic() < deadline_s, "no check-in"
        time.sleep(0.02)
    for folder in workers.folders:
        folder.write_rank_map(RankMap(workers=tuple(addresses)))
