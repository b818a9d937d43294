"""`check_parallel`: runs a plan in processes beside one process, and compares what both compute.

A check for those who change the runtime or write a plan by hand: a plan splits work, and must not change the result.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from isthmus.core.errors import UnavailableError
from isthmus.core.job import Job
from isthmus.core.messages.agent_messages import RankMap, StepMetrics
from isthmus.core.messages.worker_folder import WorkerFolder, WorkerSpec
from isthmus.core.plan import Plan
from isthmus.train.checkpoint.checkpoint_folder import checkpoint_name, load_shards, newest_valid, read_layout
from isthmus.train.checkpoint.layout.tensor_shard import TensorShard
from isthmus.train.process.check_plan_supported import check_plan_supported

_POLL_S = 0.05


class StartedWorker(Protocol):
    """The process of a rank, as `subprocess.Popen` has it."""

    def poll(self) -> int | None:
        """Return the exit status, None while it runs."""

    def kill(self) -> None:
        """Kill it; nothing happens to one that has ended."""

    def wait(self) -> int:
        """Wait for its end; return the exit status."""


def start_worker(folder: Path, log: Path) -> StartedWorker:
    """Start the worker of `folder` as a new Python process, whose output goes to `log`."""
    with log.open("wb") as output:
        command = [sys.executable, "-m", "isthmus.train.process.worker", str(folder)]
        return subprocess.Popen(command, stdout=output, stderr=output)  # noqa: S603 - this Python with our module


@dataclass(frozen=True, kw_only=True)
class ParallelCheck:
    """What a plan and one process computed; differences are relative to the values of one process."""

    # Nats per token by step: of the plan, and of one process.
    losses: tuple[float, ...]
    expected_losses: tuple[float, ...]
    loss_error: float
    # Of the norm of the gradient.
    gradient_error: float
    # Of the saved weights and moments, relative to the largest value of each tensor.
    state_error: float


@dataclass(frozen=True)
class _Run:
    """What a run left: by step the loss and the norm of the gradient; tensors of its checkpoint by name."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    state: dict[str, torch.Tensor]


def check_parallel(
    plan: Plan,
    model: Path,
    folder: Path,
    *,
    steps: int = 3,
    backend: str = "isthmus",
    limit_s: float = 600.0,
    start: Callable[[Path, Path], StartedWorker] = start_worker,
) -> ParallelCheck:
    """Run `steps` steps of `plan` and of one process on `model`; return the differences of their results.

    `model` is a folder or a `config.json` with a vocabulary of at least 257 tokens (bytes are the data); `folder` takes
    the files of both runs. All processes are on this machine; `start` takes a worker's folder and the file of its log.
    Raises `PlanError` if the runtime does not support the plan, and `UnavailableError` if a process fails or `limit_s`
    is exceeded.
    """
    folder.mkdir(parents=True, exist_ok=True)
    alone = _one_process(plan)
    runs = [
        _run(one, _job(plan, one, model, folder / name, steps), folder / name, backend, limit_s, start)
        for name, one in (("plan", plan), ("alone", alone))
    ]
    found, expected = runs
    return ParallelCheck(
        losses=found.losses,
        expected_losses=expected.losses,
        loss_error=_difference(found.losses, expected.losses),
        gradient_error=_difference(found.norms, expected.norms),
        state_error=max(_relative(found.state[name], one) for name, one in expected.state.items()),
    )


def _one_process(plan: Plan) -> Plan:
    """Return the plan of one process that trains the samples of `plan`."""
    stage = plan.stages[0]
    size = next(n for n in range(plan.micro_batch_size, 0, -1) if plan.num_samples % n == 0)
    return Plan.model_validate(
        {
            "id": "alone",
            "stages": [{"cluster": stage.cluster, "node_group": stage.node_group, "layers": (0, plan.num_layers)}],
            "micro_batches": plan.num_samples // size,
            "micro_batch_size": size,
            "sequence_length": plan.sequence_length,
        }
    )


def _job(plan: Plan, run: Plan, model: Path, folder: Path, steps: int) -> Job:
    """Return the job of `run`, with text for the samples of all steps below `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    needed = 2 * plan.num_samples * steps * (plan.sequence_length + 1)
    lines: list[str] = []
    size = 0
    while size < needed:
        lines.append(f"Line {len(lines)} says that {len(lines)} times {len(lines)} is {len(lines) ** 2}.\n")
        size += len(lines[-1])
    (folder / "text.txt").write_text("".join(lines), encoding="utf-8")
    return Job.model_validate(
        {
            "name": "check-parallel",
            "model": str(model),
            "data": {"paths": [str(folder / "text.txt")], "tokenizer": "bytes"},
            "training": {
                "steps": steps,
                "sequence_length": plan.sequence_length,
                "micro_batch_size": run.micro_batch_size,
                "global_batch_size": plan.num_samples,
                "learning_rate": 1e-3,
                "precision": plan.precision or "fp32",
                "seed": 1,
                "optimizer_on_host": plan.optimizer_on_host,
            },
            "checkpoints": {"folder": str(folder / "checkpoints"), "every_steps": 0},
            "output": str(folder / "output"),
        }
    )


def _run(
    plan: Plan, job: Job, folder: Path, backend: str, limit_s: float, start: Callable[[Path, Path], StartedWorker]
) -> _Run:
    specs = [
        WorkerSpec(run="check", attempt=1, rank=rank, job=job, plan=plan, backend=backend)
        for rank in range(len(plan.ranks))
    ]
    check_plan_supported(specs[0])
    folders = [WorkerFolder(folder / f"rank-{spec.rank}") for spec in specs]
    processes: list[StartedWorker] = []
    deadline_s = time.monotonic() + limit_s
    try:
        for spec, place in zip(specs, folders, strict=True):
            place.write_spec(spec)
            processes.append(start(place.path, place.log_path))
        _wait(processes, folders, deadline_s, lambda: None not in [one.read_checkin() for one in folders])
        ranks = RankMap(workers=tuple(one for place in folders if (one := place.read_checkin()) is not None))
        for place in folders:
            place.write_rank_map(ranks)
        _wait(processes, folders, deadline_s, lambda: all(one.poll() == 0 for one in processes))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    metrics = [StepMetrics.model_validate_json(line) for place in folders for line in _lines(place)]
    losses = {one.step: one.values["loss"] for one in metrics if one.values.get("loss") is not None}
    norms = {one.step: one.values["gradient_norm"] for one in metrics}
    return _Run(
        tuple(float(losses[step] or 0.0) for step in sorted(losses)),
        tuple(float(norms[step] or 0.0) for step in sorted(norms)),
        _saved_state(Path(job.checkpoints.folder)),
    )


def _wait(
    processes: list[StartedWorker],
    folders: list[WorkerFolder],
    deadline_s: float,
    is_done: Callable[[], bool],
) -> None:
    """Wait until `is_done`; raises `UnavailableError` if a process fails first, or at the deadline."""
    while not is_done():
        for rank, (process, place) in enumerate(zip(processes, folders, strict=True)):
            if status := process.poll():
                last = place.log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
                raise UnavailableError(f"rank {rank} ended with status {status}: {' '.join(last)}")
        if time.monotonic() > deadline_s:
            raise UnavailableError("the processes of the check did not end in time", hint="raise limit_s")
        time.sleep(_POLL_S)


def _lines(place: WorkerFolder) -> list[str]:
    return place.metrics_path.read_text(encoding="utf-8").splitlines()


def _saved_state(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights and moments of the newest checkpoint in `folder`, whole, by name."""
    manifest = newest_valid(folder)
    if manifest is None:
        raise UnavailableError(f"{folder}: the run has left no valid checkpoint")
    layout = read_layout(folder / checkpoint_name(manifest.step), manifest)
    shapes = {one.name: one.shape for one in layout.shards if one.dtype == "float32" and one.shape}
    state = {name: torch.empty(shape) for name, shape in shapes.items()}
    load_shards(folder, manifest.step, [TensorShard.full(name, one) for name, one in state.items()])
    return state


def _difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference of two equally long lists; infinity if their lengths differ."""
    if len(found) != len(expected):
        return float("inf")
    return max(abs(one - other) / max(abs(other), 1e-30) for one, other in zip(found, expected, strict=True))


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference of two tensors of one shape, relative to the largest expected value."""
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    return float((found - expected).abs().max()) / max(largest, 1e-30) if expected.numel() else 0.0
