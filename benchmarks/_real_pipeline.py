"""Real pipelines of workers joined by emulated links; those of `benchmarks.demo` have a core for each worker.

No agent and no server: the workers are started as an agent starts them, so that nothing else computes.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.core.job import Job
from isthmus.core.messages.agent_messages import RankMap, StepMetrics
from isthmus.core.messages.worker_folder import WorkerFolder, WorkerKeys, WorkerSpec
from isthmus.core.plan import Plan, StageTime
from isthmus.core.pool import Pool
from isthmus.wan.emulator import ROUTES_FILE, run_links

HERE = "east"
WARM_UP_STEPS = 3
"""Steps at the beginning that are not counted."""
PATIENCE_S = 7200.0
"""How long a worker bears a peer that is stopped."""
SAMPLE_S = 0.05
LOOKS = 600
"""Samples that are kept: half a minute."""
BUSY_S, BUSY = 0.3, 0.5
"""Over so many seconds, so many cores that others keep busy: reason to stop."""
CALM_S = 0.5
"""Seconds that others must have been still: reason to go on."""
DISTURBED = 0.1
"""Cores that others keep busy, on average, in a step that does not count."""

Routes = dict[str, dict[str, str]]


@dataclass(frozen=True)
class Far:
    """A cluster that the first one is joined to, and its link."""

    name: str
    round_trip_ms: float
    bandwidth_gbps: float


FAR = Far("west", 20, 1.0), Far("south", 60, 0.4)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and a micro-batch: what is measured and trained; with a `pace`, on virtual chips."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    vocab_size: int
    micro_batch_size: int
    sequence_length: int
    micro_batches: int
    pace: StageTime | None = None

    def config(self) -> dict[str, Any]:
        """Return the model's `config.json`: of the demo's family."""
        heads = self.hidden_size // 64
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": max(1, heads // 4),
            "head_dim": 64,
            "hidden_act": "silu",
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-06,
            "rope_theta": 10000.0,
            "initializer_range": 0.02,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_cache": False,
        }

    def plan(self, far: Far) -> Plan:
        """Return half of the layers here and at `far`, one micro-batch forward, one backward."""
        half = self.num_layers // 2
        cuts = (0, half), (half, self.num_layers)
        return Plan.model_validate(
            {
                "id": "real",
                "stages": [
                    {"cluster": name, "node_group": "core", "layers": cut}
                    for name, cut in zip((HERE, far.name), cuts, strict=True)
                ],
                "micro_batches": self.micro_batches,
                "micro_batch_size": self.micro_batch_size,
                "sequence_length": self.sequence_length,
                "precision": "fp32",
            }
        )

    def job(self, folder: Path, steps: int) -> Job:
        """Return the job below `folder`, which gets the model."""
        model = folder / "model"
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text(json.dumps(self.config()), encoding="utf-8")
        return Job.model_validate(
            {
                "name": "real",
                "model": str(model),
                "data": {"paths": [f"{sysconfig.get_path('stdlib')}/*.py"], "tokenizer": "bytes"},
                "training": {
                    "steps": steps,
                    "sequence_length": self.sequence_length,
                    "micro_batch_size": self.micro_batch_size,
                    "global_batch_size": self.micro_batch_size * self.micro_batches,
                    "learning_rate": 1e-3,
                    "precision": "fp32",
                },
                "checkpoints": {"folder": str(folder / "checkpoints"), "every_steps": 0},
                "output": str(folder / "output"),
            }
        )


def pool() -> Pool:
    """Return clusters of one CPU core, and the links from the first to each other one."""
    group = {"name": "core", "chip": "CPU-core", "nodes": 1, "chips_per_node": 1}
    names = HERE, *(far.name for far in FAR)
    return Pool.model_validate(
        {
            "clusters": [{"name": name, "owner": name, "node_groups": [group]} for name in names],
            "links": [
                {
                    "between": (HERE, far.name),
                    "bandwidth_gbps": far.bandwidth_gbps,
                    "round_trip_ms": far.round_trip_ms,
                }
                for far in FAR
            ],
        }
    )


@contextlib.contextmanager
def emulated(pool: Pool, folder: Path) -> Iterator[Routes]:
    """Emulate the links of `pool` in a process of their own; yield its routes."""
    process = multiprocessing.get_context("spawn").Process(target=run_links, args=(pool, folder))
    process.start()
    try:
        while not (folder / ROUTES_FILE).exists():
            if not process.is_alive():
                raise RuntimeError("the link emulator ended")
            time.sleep(0.02)
        yield json.loads((folder / ROUTES_FILE).read_text(encoding="utf-8"))
    finally:
        process.terminate()
        process.join(10)


@dataclass(frozen=True)
class Step:
    """A step of a run: its seconds, and the cores that processes not ours kept busy meanwhile, on average."""

    seconds: float
    others: float


@dataclass(frozen=True)
class Timed:
    """The median step of a few, and the processor seconds that all workers together took for one."""

    step_s: float
    processor_s: float


class Pipeline:
    """Workers that train, a stage each, on virtual chips of `paces` where given; a context manager.

    They are stopped but for the calls of its methods. Without `keys` their links are in the clear; where `is_pinned`,
    rank r stays on core r.
    """

    def __init__(
        self, job: Job, plan: Plan, folder: Path, routes: Routes, paces: Sequence[StageTime] | None = None,
        *, keys: Mapping[str, WorkerKeys] | None = None, is_pinned: bool = True,
    ) -> None:  # fmt: skip
        self._workers = [WorkerFolder(folder / f"rank-{rank}") for rank in range(len(plan.stages))]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._seen, self._is_pinned = 0, is_pinned
        for rank, worker in enumerate(self._workers):
            worker.write_spec(
                WorkerSpec(
                    run="real",
                    attempt=1,
                    rank=rank,
                    job=job,
                    plan=plan,
                    routes=routes[plan.stages[rank].cluster],
                    stage_time=paces[rank] if paces else None,
                    peer_timeout_s=PATIENCE_S,
                )
            )
            if keys is not None:
                worker.write_keys(keys[plan.stages[rank].cluster])

    def __enter__(self) -> Pipeline:
        try:
            self._processes = [
                _started(worker, core if self._is_pinned else None) for core, worker in enumerate(self._workers)
            ]
            _introduce(self._workers, self._processes)
            self._wait_for_steps(WARM_UP_STEPS)
        except BaseException:
            self._end()
            raise
        _signal(self._processes, signal.SIGSTOP)
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def _lines(self) -> list[str]:
        """Return the metrics of the steps done; raise `RuntimeError` where a worker has ended."""
        worker = self._workers[0]
        if any(process.poll() is not None for process in self._processes):
            raise RuntimeError(worker.log_path.read_text(encoding="utf-8", errors="replace")[-2000:])
        return worker.metrics_path.read_text(encoding="utf-8").splitlines() if worker.metrics_path.exists() else []

    def processor_s(self, count: int) -> float:
        """Train for `count` steps, calm or not; return the processor seconds of a step of both workers.

        Others make a step longer, but hardly its processor time.
        """
        return self.timed(count).processor_s

    def timed(self, count: int) -> Timed:
        """Train for `count` steps after a first one, calm or not."""
        pids = [process.pid for process in self._processes]
        _signal(self._processes, signal.SIGCONT)
        self._wait_for_steps(len(self._lines()) + 1)
        begun_s, first = sum(map(_cpu_s, pids)), len(self._lines())
        self._wait_for_steps(first + count)
        used_s, done = sum(map(_cpu_s, pids)) - begun_s, self._lines()[first:]
        _signal(self._processes, signal.SIGSTOP)
        steps_s = [StepMetrics.model_validate_json(line).values["step_s"] or math.inf for line in done]
        return Timed(statistics.median(steps_s), used_s / len(done))

    def _wait_for_steps(self, total: int) -> None:
        while len(self._lines()) < total:
            time.sleep(0.01)

    def steps(self, wanted: int, limit_s: float) -> list[Step]:
        """Train until `wanted` steps were calm, or for `limit_s`; return all steps.

        While others are at work the workers are stopped: a shared machine is not kept busy for nothing. A
        step that was stopped has infinite `others`.
        """
        watch = Watch([process.pid for process in self._processes])
        end_s, found, stopped, since_s = time.monotonic() + limit_s, list[Step](), True, 0.0
        self._seen = len(self._lines())
        while sum(one.others <= DISTURBED for one in found) < wanted and time.monotonic() < end_s:
            time.sleep(SAMPLE_S)
            watch.look()
            for line in self._lines()[self._seen :]:
                self._seen += 1
                taken_s = StepMetrics.model_validate_json(line).values["step_s"] or math.inf
                halted = time.monotonic() - taken_s < since_s
                found.append(Step(taken_s, math.inf if halted else watch.others(taken_s)))
            if not stopped and watch.others(BUSY_S) > BUSY:
                _signal(self._processes, signal.SIGSTOP)
                stopped = True
            elif stopped and watch.lasted_s > CALM_S and watch.others(CALM_S) <= DISTURBED:
                _signal(self._processes, signal.SIGCONT)
                stopped, since_s = False, time.monotonic()
        _signal(self._processes, signal.SIGSTOP)
        return found


def _signal(processes: list[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in processes:
        process.send_signal(number)


def _started(worker: WorkerFolder, core: int | None) -> subprocess.Popen[bytes]:
    def stay() -> None:
        if core is not None:
            os.sched_setaffinity(0, {core})

    with worker.log_path.open("wb") as log:
        command = [sys.executable, "-m", "isthmus.train.process.worker", str(worker.path)]
        return subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=stay)


def _introduce(workers: list[WorkerFolder], processes: list[subprocess.Popen[bytes]]) -> None:
    while True:
        addresses = [worker.read_checkin() for worker in workers]
        known = [one for one in addresses if one is not None]
        if len(known) == len(workers):
            break
        if any(process.poll() is not None for process in processes):
            raise RuntimeError(workers[0].log_path.read_text(encoding="utf-8", errors="replace")[-2000:])
        time.sleep(0.02)
    for worker in workers:
        worker.write_rank_map(RankMap(workers=tuple(known)))


class Watch:
    """Tells how much of the machine others used, by /proc: the rule by which a step is disturbed.

    Ours are this process, its children (the emulator) and `pids`.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        emulators = [child.pid for child in multiprocessing.active_children() if child.pid is not None]
        self._pids = (os.getpid(), *emulators, *pids)
        self._looks: deque[tuple[float, float]] = deque(maxlen=LOOKS)
        self.look()

    def look(self) -> None:
        """Read the counters."""
        other_s = _all_cpu_s() - sum(_cpu_s(pid) for pid in self._pids)
        self._looks.append((time.monotonic(), other_s))

    @property
    def lasted_s(self) -> float:
        """Seconds from the first look to the last."""
        return self._looks[-1][0] - self._looks[0][0]

    def others(self, last_s: float) -> float:
        """Return the cores that others kept busy over the last `last_s`, on average."""
        now_s, other_s = self._looks[-1]
        before = next((look for look in reversed(self._looks) if look[0] <= now_s - last_s), self._looks[0])
        return (other_s - before[1]) / max(now_s - before[0], SAMPLE_S)


def _all_cpu_s() -> float:
    fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def spread(values: Sequence[float]) -> float:
    """Return the sample standard deviation over the mean."""
    return statistics.stdev(values) / statistics.fmean(values) if len(values) > 1 else 0.0
