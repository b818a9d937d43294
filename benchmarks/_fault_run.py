"""One small run whose ranks are supervised, to be disturbed: three stages in two clusters, joined by a proxy.

Supervisors are forked from this process, which has loaded all modules already, so that a run costs no import;
for that this process must have no threads when a run begins.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from isthmus.core.base_model import TransportKind
from isthmus.core.job import Job
from isthmus.core.messages.agent_messages import RankMap, StepMetrics
from isthmus.core.messages.worker_folder import WorkerEvent, WorkerFolder, WorkerSpec
from isthmus.train.liveness.worker_events import read_events
from isthmus.train.process.next_tokens import NextTokens
from isthmus.train.process.supervisor import supervise
from tests.comm.relay import Relay
from tests.train.worker_jobs import make_job, make_plan

RANKS = 3
CLUSTERS = "aab"
LIMIT_S = 150.0
"""Longest wait: two restarts in turn import torch again, beside whatever else the machine does."""
_POLL_S = 0.005


def small_job(folder: Path, steps: int, transport: TransportKind = "thread") -> Job:
    """Return a job of `steps` steps that writes a checkpoint every four, all below `folder`."""
    return make_job(folder, "llama-tied", steps=steps, checkpoints={"every_steps": 4}, transport=transport)


def below(job: Job, folder: Path) -> Job:
    """Return `job` with checkpoints and output of its own, below `folder`."""
    checkpoints = job.checkpoints.model_copy(update={"folder": str(folder / "checkpoints")})
    return job.model_copy(update={"checkpoints": checkpoints, "output": str(folder / "output")})


class FaultRun:
    """The supervised ranks of one attempt; a context manager that leaves no process behind."""

    def __init__(self, folder: Path, job: Job, attempt: int = 1) -> None:
        self.folders = [WorkerFolder(folder / f"{attempt}/rank-{rank}") for rank in range(RANKS)]
        self.relay = Relay()
        self.pids: list[int] = []
        self.statuses: list[int | None] = [None] * RANKS
        plan = make_plan(job, [1, 3, 4], CLUSTERS)
        for rank, place in enumerate(self.folders):
            place.write_spec(
                WorkerSpec(
                    run="faults",
                    attempt=attempt,
                    rank=rank,
                    job=job,
                    plan=plan,
                    routes=dict.fromkeys(set(CLUSTERS), self.relay.address),
                )
            )

    def __enter__(self) -> FaultRun:
        self.pids = [_forked(folder) for folder in self.folders]
        self.relay.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        for rank, pid in enumerate(self.pids):
            if self.status(rank) is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        self.relay.__exit__(*error)

    def introduce(self) -> None:
        """Hand out the rank map once all have checked in."""
        self.wait_until(lambda: all(folder.read_checkin() for folder in self.folders))
        addresses = [folder.read_checkin() for folder in self.folders]
        if None not in addresses:
            for folder in self.folders:
                folder.write_rank_map(RankMap(workers=tuple(filter(None, addresses))))

    def status(self, rank: int) -> int | None:
        """Return how the supervisor of `rank` has ended, None while it runs."""
        if self.statuses[rank] is None:
            ended, status = os.waitpid(self.pids[rank], os.WNOHANG)
            if ended:
                self.statuses[rank] = os.waitstatus_to_exitcode(status)
        return self.statuses[rank]

    def worker(self, rank: int) -> int | None:
        """Return the process that trains `rank` at present, None where there is none."""
        try:
            children = psutil.Process(self.pids[rank]).children()
        except psutil.NoSuchProcess:
            return None
        return children[0].pid if children else None

    def carrier(self, rank: int) -> int | None:
        """Return the process of the transport of `rank`, None where there is none."""
        worker = self.worker(rank)
        try:
            children = [] if worker is None else psutil.Process(worker).children()
        except psutil.NoSuchProcess:
            return None
        return children[0].pid if children else None

    def wait_until(self, condition: Callable[[], bool], limit_s: float = LIMIT_S) -> bool:
        """Return True once `condition` holds, False where all have ended first; `TimeoutError` beyond."""
        deadline_s = time.monotonic() + limit_s
        while not condition():
            if all(self.status(rank) is not None for rank in range(RANKS)):
                return condition()
            if time.monotonic() > deadline_s:
                raise TimeoutError(self.story())
            time.sleep(_POLL_S)
        return True

    def wait_for_step(self, step: int) -> bool:
        """Return once rank 0 has reported `step`."""
        return self.wait_until(lambda: self.steps_done() > step)

    def steps_done(self) -> int:
        """Return how many steps rank 0 has reported, repeated ones counted once."""
        lines = self._metrics(0)
        return lines[-1].step + 1 if lines else 0

    def end(self, limit_s: float = LIMIT_S) -> list[int]:
        """Return the exit statuses once all have ended."""
        self.wait_until(lambda: all(self.status(rank) is not None for rank in range(RANKS)), limit_s)
        return [status for status in self.statuses if status is not None]

    def losses(self) -> dict[int, float]:
        """Return the loss of each step; raise `ValueError` where a repeated step had another."""
        found: dict[int, float] = {}
        for one in self._metrics(RANKS - 1):
            loss = one.values["loss"]
            if loss is None or found.setdefault(one.step, loss) != loss:
                raise ValueError(f"step {one.step} cost {loss}, and {found.get(one.step)} before")
        return found

    def values(self, key: str) -> list[float]:
        """Return a figure of all ranks' steps, where it is there."""
        lines = [line for rank in range(RANKS) for line in self._metrics(rank)]
        return [value for line in lines if (value := line.values.get(key)) is not None]

    def events(self) -> list[WorkerEvent]:
        """Return the events of all ranks, in order of time."""
        return sorted((e for f in self.folders for e in read_events(f)), key=lambda e: e.time_s)

    def log(self, rank: int) -> str:
        """Return the log of a rank."""
        return self.folders[rank].log_path.read_text(encoding="utf-8", errors="replace")

    def story(self) -> str:
        """Return statuses and the ends of all logs."""
        return f"{self.statuses}\n" + "\n".join(self.log(rank)[-1500:] for rank in range(RANKS))

    def _metrics(self, rank: int) -> list[StepMetrics]:
        file = self.folders[rank].metrics_path
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        return [StepMetrics.model_validate_json(line) for line in text.splitlines() if line.endswith("}")]


def _forked(folder: WorkerFolder) -> int:
    """Fork a supervisor for `folder`, in a session of its own, and return it."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.setsid()
        log = os.open(folder.log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        status = supervise(folder, NextTokens())
        sys.stdout.flush()
    finally:
        os._exit(status)


@contextmanager
def run_of(folder: Path, job: Job, attempt: int = 1) -> Iterator[FaultRun]:
    """Start a run and let its ranks meet."""
    with FaultRun(folder, job, attempt) as run:
        run.introduce()
        yield run
