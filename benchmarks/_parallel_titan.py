"""Part `torchtitan` of `benchmarks.parallel`: steps of its Llama and of the runtime, 4 CPU ranks of one group each.

Both take the machine by turns. The runtime's ranks are its workers, with data, metrics and checks, but no snapshots,
which torchtitan lacks; torchtitan's run its own functions in a plain loop (`benchmarks._titan_rank`). Where it shards
over 2 replicas beside pipelines or slices, the runtime shards updates (ZeRO-1).
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks._titan_rank import TitanJob
from benchmarks.table import Row, compared
from isthmus.core.job import Job
from isthmus.core.messages.agent_messages import RankMap, StepMetrics
from isthmus.core.messages.worker_folder import WorkerFolder, WorkerSpec
from isthmus.core.plan import Plan

WIDTH, LAYERS, HEADS, VOCABULARY, LENGTH = 512, 4, 8, 2048, 128
MICRO_BATCHES, LEARNING_RATE, PATIENCE_S = 4, 1e-3, 600.0
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": 1408,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": WIDTH // HEADS,
    "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}  # fmt: skip
CASES: dict[str, tuple[int, int, int, int]] = {
    "pp 2 x dp 2": (2, 1, 2, 1),
    "FSDP 4": (1, 1, 4, 3),
    "tp 2 x dp 2": (1, 2, 2, 1),
}
"""Stages, slices and replicas of each plan, and the runtime's stage of ZeRO."""

WARM_UP = 3
"""First steps of a run that do not count."""


def measure(quick: bool, folder: str = "") -> list[Row]:
    """Return the rows; `folder` is where torchtitan is installed, if it is not in the environment."""
    if not folder and find_spec("torchtitan") is None:
        return [Row(what="against torchtitan: skipped, it is not installed (--torchtitan FOLDER)", ours=0, unit="rows")]
    rounds, steps = (1, WARM_UP + 2) if quick else (3, WARM_UP + 5)
    rows = []
    for what, (pp, tp, dp, zero) in CASES.items():
        ours, theirs = list[float](), list[float]()
        for _ in range(rounds):
            ours += _runtime_steps_s(_plan(pp, tp, dp, zero), steps)
            theirs += _torchtitan_steps_s(folder, pp, tp, dp, steps)
        spread = f"{1e3 * min(ours):.0f} to {1e3 * max(ours):.0f} ms, there {1e3 * min(theirs):.0f} to "
        own, other = statistics.median(ours), statistics.median(theirs)
        rows.append(
            compared(
                f"against torchtitan, 4 CPU ranks, {what}: a step ({spread}{1e3 * max(theirs):.0f})", 1e3 * own, "ms",
                "torchtitan over gloo", 1e3 * other, target="no longer", met=own <= other,
            )
        )  # fmt: skip
    return rows


def _plan(pp: int, tp: int, dp: int, zero: int) -> Plan:
    ends = [LAYERS * place // pp for place in range(pp + 1)]
    stages = [
        {"replica": replica, "cluster": "a", "node_group": "cpu", "layers": layers, "tp": tp, "sp": tp > 1}
        for replica in range(dp)
        for layers in itertools.pairwise(ends)
    ]
    return Plan.model_validate(
        {
            "id": "beside", "stages": stages, "dp": dp, "micro_batches": MICRO_BATCHES, "micro_batch_size": 1,
            "sequence_length": LENGTH, "zero": zero, "precision": "fp32", "overlap_gradients": zero == 1,
        }
    )  # fmt: skip


def _runtime_steps_s(plan: Plan, steps: int) -> list[float]:
    """Run the workers of `plan`; return the seconds of its steps but the first ones, each at its slowest rank."""
    with tempfile.TemporaryDirectory() as place:
        job = _job(plan, Path(place), steps)
        folders = [WorkerFolder(Path(place) / f"rank-{rank}") for rank in range(len(plan.ranks))]
        processes = []
        try:
            for rank, one in enumerate(folders):
                one.write_spec(WorkerSpec(run="beside", attempt=1, rank=rank, job=job, plan=plan))
                with one.log_path.open("wb") as log:
                    processes.append(_started(["isthmus.train.process.worker", str(one.path)], log, {}))
            deadline_s = time.monotonic() + PATIENCE_S
            while None in (met := [one.read_checkin() for one in folders]):
                if time.monotonic() > deadline_s or any(one.poll() for one in processes):
                    raise TimeoutError(f"a worker did not start: {folders[0].log_path.read_text(encoding='utf-8')}")
                time.sleep(0.05)
            ranks = RankMap(workers=tuple(one for one in met if one is not None))
            for one in folders:
                one.write_rank_map(ranks)
            for rank, process in enumerate(processes):
                if process.wait(PATIENCE_S):
                    raise RuntimeError(f"rank {rank} failed: {folders[rank].log_path.read_text(encoding='utf-8')}")
        finally:
            _end(processes)
        by_rank = [[_step_s(line) for line in one.metrics_path.read_text("utf-8").splitlines()] for one in folders]
    return [max(each) for each in zip(*by_rank, strict=True)][WARM_UP:]


def _job(plan: Plan, place: Path, steps: int) -> Job:
    """Return the job of `plan`, with a model and text below `place`."""
    (place / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    num_bytes = 2 * plan.num_samples * steps * (LENGTH + 1)
    lines = (f"Line {number} of {num_bytes} bytes.\n" for number in range(num_bytes // 20))
    (place / "text.txt").write_text("".join(lines), encoding="utf-8")
    return Job.model_validate(
        {
            "name": "beside", "model": str(place), "output": str(place / "output"),
            "data": {"paths": [str(place / "text.txt")], "tokenizer": "bytes"},
            "training": {
                "steps": steps, "sequence_length": LENGTH, "micro_batch_size": 1, "precision": "fp32",
                "global_batch_size": plan.num_samples, "learning_rate": LEARNING_RATE,
            },
            "checkpoints": {"folder": str(place / "checkpoints"), "every_steps": 0, "memory_interval": 1000},
        }
    )  # fmt: skip


def _step_s(line: str) -> float:
    return float(StepMetrics.model_validate_json(line).values["step_s"] or 0.0)


def _torchtitan_steps_s(folder: str, pp: int, tp: int, shards: int, steps: int) -> list[float]:
    place, processes = tempfile.mkdtemp(), list[subprocess.Popen[bytes]]()
    try:
        for rank in range(pp * tp * shards):
            job = TitanJob(
                folder=folder, rank=rank, store=f"{place}/store", steps=steps, pp=pp, tp=tp, shards=shards, width=WIDTH,
                layers=LAYERS, heads=HEADS, vocabulary=VOCABULARY, length=LENGTH, micro_batches=MICRO_BATCHES,
                micro_batch_size=1, learning_rate=LEARNING_RATE,
            )  # fmt: skip
            words = ["benchmarks._titan_rank", json.dumps(asdict(job))]
            processes.append(_started(words, subprocess.PIPE, {"PYTHONWARNINGS": "ignore"}))
        found: list[dict[str, Any]] = []
        for process in processes:
            printed, _ = process.communicate(timeout=PATIENCE_S)
            if process.returncode:
                raise RuntimeError(f"a rank of torchtitan failed: {printed.decode()[-2000:]}")
            found.append(json.loads(printed.decode().splitlines()[-1]))
    finally:
        _end(processes)
        shutil.rmtree(place)
    return [max(each) for each in zip(*(one["seconds"] for one in found), strict=True)][WARM_UP:]


def _started(words: Sequence[str], output: Any, variables: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a module, before whatever else the machine does where that is permitted (CAP_SYS_NICE)."""
    process = subprocess.Popen(
        [sys.executable, "-m", *words], stdout=output, stderr=subprocess.STDOUT, env=os.environ | variables
    )
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(process.pid, os.SCHED_RR, os.sched_param(1))
    return process


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for one in processes:
        one.kill()
        one.wait()
