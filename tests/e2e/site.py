"""A pool of three clusters on this machine with a small job, and the same job in one process alone."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from isthmus.cli.client import Client
from isthmus.core.job import Job
from isthmus.core.messages import RankMap, StepMetrics
from isthmus.core.model import load_model
from isthmus.core.plan import Plan, Stage
from isthmus.core.pool import Pool
from isthmus.core.views import JobView, Submission
from isthmus.core.worker import WorkerFolder, WorkerSpec

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def clusters_of(cores: dict[str, int], memory_scale: float) -> dict[str, Any]:
    """Clusters of so many cores each, of that part of a core's memory, 2 ms and 1 Gbit/s apart."""
    return {
        "clusters": [
            {
                "name": name,
                "owner": f"{name}-owner",
                "node_groups": [
                    {
                        "name": "cpu",
                        "chip": "CPU-core",
                        "nodes": 1,
                        "chips_per_node": count,
                        "virtual": {"memory_scale": memory_scale},
                    }
                ],
            }
            for name, count in cores.items()
        ],
        "links": [
            {"between": [a, b], "bandwidth_gbps": 1, "round_trip_ms": 2}
            for a, b in itertools.combinations(cores, 2)
        ],
    }


def three_clusters() -> dict[str, Any]:
    """Three owners with one core of 800 kB each: `CONFIG` needs all three."""
    return clusters_of({"north": 1, "south": 1, "west": 1}, 2e-4)


def make_folder(folder: Path, pool: dict[str, Any] | None = None) -> Pool:
    """Fill `folder` with the file of `pool` (of `three_clusters`), a model and a text; return the pool."""
    pool = pool or three_clusters()
    (folder / "pool.yaml").write_text(yaml.safe_dump(pool))
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
    (folder / "text").mkdir()
    words = ["the", "isthmus", "joins", "two", "lands", "by", "a", "narrow", "strip"]
    for number in range(20):
        text = " ".join(words[(i * i + number) % len(words)] for i in range(400))
        (folder / "text" / f"{number}.txt").write_text(text)
    return Pool.model_validate(pool)


def make_job(folder: Path, name: str, *, steps: int = 24, every_steps: int = 4, **changes: Any) -> Job:
    """A job on the model and text of `folder`, with a result folder of its own."""
    fields: dict[str, Any] = {
        "name": name,
        "model": str(folder / "model"),
        "data": {"paths": [str(folder / "text")], "validation_fraction": 0.1},
        "training": {
            "steps": steps,
            "sequence_length": 32,
            "micro_batch_size": 1,
            "global_batch_size": 4,
            "learning_rate": 0.003,
            "warmup_steps": 4,
            "precision": "fp32",
            "seed": 3,
        },
        "checkpoints": {"folder": str(folder / name / "checkpoints"), "every_steps": every_steps},
        "output": str(folder / name / "result"),
        "policy": "auto",
    }
    return Job.model_validate(fields | changes)


def submit(client: Client, job: Job) -> JobView:
    """Submit a job."""
    return client.submit(Submission(job=job, model=load_model(job.model)))


def wait_until(what: str, condition: Callable[[], Any], timeout_s: float = 120.0) -> Any:
    """Return the first true value of `condition`; fail with `what` when it does not come."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(0.05)


def all_metrics(client: Client, job: str) -> list[StepMetrics]:
    """Return every step metric of a job."""
    found: list[StepMetrics] = []
    cursor = 0
    while (page := client.metrics(job, after=cursor)).metrics:
        found += page.metrics
        cursor = page.next
    return found


def losses(metrics: list[StepMetrics]) -> dict[int, float]:
    """Return the loss by step; a step done again after a restart counts as it was last."""
    return {
        m.step: m.values["loss"]
        for m in sorted(metrics, key=lambda m: m.attempt)
        if m.values.get("loss") is not None
    }  # type: ignore[misc]


def train_alone(job: Job, folder: Path) -> dict[int, float]:
    """Run `job` as one process with all layers, without server, agent or links; return its losses by step."""
    layers = (0, CONFIG["num_hidden_layers"])
    plan = Plan(
        id="alone",
        stages=(Stage(cluster="here", node_group="cpu", layers=layers),),
        micro_batches=job.training.num_micro_batches,
        micro_batch_size=job.training.micro_batch_size,
        sequence_length=job.training.sequence_length,
    )
    worker = WorkerFolder(folder)
    worker.write_spec(WorkerSpec(run="alone", attempt=1, rank=0, job=job, plan=plan))
    with worker.log.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "isthmus.train.worker", str(folder)], stdout=log, stderr=log
        )
    address = wait_until("the lone worker checks in", worker.read_checkin)
    worker.write_ranks(RankMap(workers=(address,)))
    assert process.wait(120) == 0, worker.log.read_text()
    return losses([StepMetrics.model_validate_json(line) for line in worker.metrics.read_text().splitlines()])
