"""Rehearsals for `benchmarks.whitepaper`: the stages of a plan as real workers, joined by emulated links.

Workers are those of a job of `compute: virtual`, each in a process of its own; to start quickly they are
forked from one process that has loaded torch already.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from isthmus.core.job import Job
from isthmus.core.messages.agent_messages import RankMap, StepMetrics
from isthmus.core.messages.worker_folder import WorkerFolder, WorkerSpec
from isthmus.core.plan import Plan, StageTime
from isthmus.wan.dial import dial

OVERRUN_SHARE = 0.01
"""A step counts where no stage's waiting, in place of computing, took this share of the step too long."""

LIMIT_S = 120.0
"""Longest a worker may take to meet the others, or for a step."""

_BURST_S = 0.005


@dataclass(frozen=True)
class Rehearsed:
    """Seconds of the steps that count, how many were run, and the largest overrun of a stage in those."""

    steps_s: tuple[float, ...]
    num_steps: int
    num_calm: int
    overrun_share: float

    @property
    def step_s(self) -> float:
        """Median of the steps that count."""
        return statistics.median(self.steps_s)


def rehearse(
    plan: Plan,
    times: Sequence[StageTime],
    model: Path,
    folder: Path,
    routes: dict[str, dict[str, str]],
    steps: int,
) -> Rehearsed:
    """Run `steps` steps of `plan` after one that does not count; `times` is by stage, `model` a config.json.

    Raises `RuntimeError` with a worker's last words where one fails.
    """
    metrics = run_workers(plan, times, model, folder, routes, steps + 1)
    return _outcome([one[1:] for one in metrics], [_planned_s(plan, times, r) for r in range(len(metrics))])


def run_workers(
    plan: Plan,
    times: Sequence[StageTime],
    model: Path,
    folder: Path,
    routes: dict[str, dict[str, str]],
    steps: int,
    trace_steps: Sequence[int] = (),
    *,
    is_prompt: bool = False,
) -> list[list[StepMetrics]]:
    """Run `steps` steps of `plan`; return the metrics of each rank, with the timeline of `trace_steps`.

    With `is_prompt` the workers take precedence over other work where the system permits it (real-time priority).
    Raises `RuntimeError` with a worker's last words where one fails.
    """
    workers = [WorkerFolder(folder / f"rank-{rank}") for rank in range(len(plan.ranks))]
    job = _job(plan, model, folder, steps)
    for rank, worker in enumerate(workers):
        worker.write_spec(
            WorkerSpec(
                run="whitepaper", attempt=1, rank=rank, job=job, plan=plan, stage_time=times[rank],
                routes=routes.get(plan.stage_of(rank).cluster, {}), trace_steps=tuple(trace_steps),
            )
        )  # fmt: skip
    with _started(workers, is_prompt) as processes:
        _introduce(workers, processes)
        _wait(workers, processes, steps)
    return [_metrics(worker) for worker in workers]


def _job(plan: Plan, model: Path, folder: Path, steps: int) -> Job:
    return Job.model_validate(
        {
            "name": "whitepaper",
            "model": str(model),
            "data": {"paths": ["none"]},
            "training": {
                "steps": steps,
                "sequence_length": plan.sequence_length,
                "micro_batch_size": plan.micro_batch_size,
                "global_batch_size": plan.num_samples,
                "local_steps": plan.local_steps,
            },
            "checkpoints": {"folder": str(folder / "none")},
            "output": str(folder / "none"),
            "compute": "virtual",
        }
    )


def _planned_s(plan: Plan, times: Sequence[StageTime], rank: int) -> float:
    """Return the seconds that a rank should wait in a step in place of computing."""
    time, count = times[rank], plan.micro_batches_of(plan.stage_of(rank).replica)
    return count * (time.forward_s + time.backward_s) + time.update_s


def _outcome(ranks: Sequence[Sequence[StepMetrics]], planned_s: Sequence[float]) -> Rehearsed:
    steps = []
    for each in zip(*ranks, strict=True):
        step_s = max(one.values["step_s"] or 0.0 for one in each)
        over_s = max((one.values["compute_s"] or 0.0) - s for one, s in zip(each, planned_s, strict=True))
        steps.append((step_s, over_s / step_s))
    calm = [one for one in steps if one[1] <= OVERRUN_SHARE]
    kept = calm or steps
    return Rehearsed(tuple(one[0] for one in kept), len(steps), len(calm), max(one[1] for one in kept))


@contextmanager
def _started(workers: Sequence[WorkerFolder], is_prompt: bool) -> Iterator[list[BaseProcess]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "isthmus.train.process.worker"])
    processes: list[BaseProcess] = [context.Process(target=_work, args=(str(one.path), is_prompt)) for one in workers]
    try:
        for process in processes:
            process.start()
        yield processes
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()


def _work(folder: str, is_prompt: bool) -> None:
    """Be the worker of `folder`, with the log where an adapter puts it."""
    from isthmus.train.process.worker import main

    if is_prompt:
        with suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    log = os.open(WorkerFolder(Path(folder)).log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os._exit(main([folder]))


def _introduce(workers: Sequence[WorkerFolder], processes: Sequence[BaseProcess]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while None in (addresses := [worker.read_checkin() for worker in workers]):
        _require_alive(workers, processes, end_s)
        time.sleep(0.02)
    for worker in workers:
        worker.write_rank_map(RankMap(workers=tuple(one for one in addresses if one is not None)))


def _wait(workers: Sequence[WorkerFolder], processes: Sequence[BaseProcess], steps: int) -> None:
    """Wait until every worker has ended well; each further step gets `RULE_TIMEOUT_S`."""
    seen, end_s = -1, time.monotonic() + LIMIT_S
    while any(process.exitcode is None for process in processes):
        done = len(_metrics(workers[0]))
        if done > seen:
            seen, end_s = done, time.monotonic() + LIMIT_S
        _require_alive(workers, processes, end_s)
        time.sleep(0.05)
    _require_alive(workers, processes, end_s)
    if seen < steps and len(_metrics(workers[0])) < steps:
        raise RuntimeError(f"{steps} steps were to be run")


def _require_alive(workers: Sequence[WorkerFolder], processes: Sequence[BaseProcess], end_s: float) -> None:
    failed = [i for i, process in enumerate(processes) if process.exitcode not in (None, 0)]
    if failed or time.monotonic() > end_s:
        logs = [workers[i].log_path for i in failed or range(len(workers))]
        words = [log.read_text(encoding="utf-8", errors="replace")[-600:] for log in logs if log.exists()]
        raise RuntimeError("a worker failed or stands still:\n" + "\n".join(words))


def _metrics(worker: WorkerFolder) -> list[StepMetrics]:
    if not worker.metrics_path.exists():
        return []
    lines = worker.metrics_path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [StepMetrics(**json.loads(line)) for line in lines if line.endswith("\n")]


@contextmanager
def interference(proxies: Sequence[str], bytes_per_s: float) -> Iterator[None]:
    """Send `bytes_per_s` of others' traffic by each of `proxies` meanwhile, evenly, and swallow it."""
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as sink:
        threads = [threading.Thread(target=_swallow, args=(sink, len(proxies)), daemon=True)]
        port = int(sink.getsockname()[1])
        threads += [
            threading.Thread(target=_send, args=(port, proxy, bytes_per_s, stop), daemon=True) for proxy in proxies
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads[1:]:
                thread.join(5)


def _send(port: int, proxy: str, bytes_per_s: float, stop: threading.Event) -> None:
    """Send a burst every few milliseconds; what the link does not take in time is sent later."""
    burst, begun_s, sent = bytes(round(bytes_per_s * _BURST_S)), time.monotonic(), 0
    with dial(("127.0.0.1", port), proxy) as connection:
        while not stop.is_set():
            connection.sendall(burst)
            sent += len(burst)
            time.sleep(max(0.0, begun_s + sent / bytes_per_s - time.monotonic()))


def _swallow(sink: socket.socket, count: int) -> None:
    for _ in range(count):
        connection, _ = sink.accept()
        threading.Thread(target=_drain, args=(connection,), daemon=True).start()


def _drain(connection: socket.socket) -> None:
    room = bytearray(1 << 18)
    with connection:
        try:
            while connection.recv_into(room):
                pass
        except OSError:
            return
