"""A pool of clusters on this machine with a small job, and the same job in one process alone."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import yaml

from isthmus.cli.demo.demo_pool import DemoPool
from isthmus.client.api_client import ApiClient
from isthmus.core.job import Job
from isthmus.core.messages.agent_messages import RankMap, StepMetrics
from isthmus.core.messages.worker_folder import WorkerFolder, WorkerSpec
from isthmus.core.model import load_model
from isthmus.core.plan import Plan, Stage
from isthmus.core.pool import Pool
from isthmus.core.views.api_views import JobView, Submission
from tests.forks import ForkedProgram, preload

preload("isthmus.train.process.worker")

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
    """Clusters of `cores` cores each with `memory_scale` of a core's memory, 2 ms and 1 Gbit/s apart."""
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
            {"between": [a, b], "bandwidth_gbps": 1, "round_trip_ms": 2} for a, b in itertools.combinations(cores, 2)
        ],
    }


@contextmanager
def running(folder: Path, clusters: dict[str, Any], storage: Path | None = None) -> Iterator[DemoPool]:
    """A pool with a model and a text in its `folder`; at the end not one of its processes is left.

    `storage` has a folder for each cluster, its own storage; without it all share one.
    """
    (folder / "pool.yaml").write_text(yaml.safe_dump(clusters))
    make_files(folder)
    with DemoPool(folder, Pool.model_validate(clusters), storage) as pool:
        yield pool
    wait_until("every process of the pool has ended", lambda: not processes_in(folder), 15)


def make_files(folder: Path) -> None:
    """Write a model and a text below `folder`."""
    make_model(folder, "model")
    (folder / "text").mkdir()
    words = ["the", "isthmus", "joins", "two", "lands", "by", "a", "narrow", "strip"]
    for number in range(20):
        text = " ".join(words[(i * i + number) % len(words)] for i in range(400))
        (folder / "text" / f"{number}.txt").write_text(text)


def processes_in(folder: Path) -> list[psutil.Process]:
    """Processes whose command line names the pool's folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(folder) in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def make_model(folder: Path, name: str, **changes: int) -> str:
    """Write `CONFIG` with `changes` to `folder / name`; return that."""
    (folder / name).mkdir()
    (folder / name / "config.json").write_text(json.dumps(CONFIG | changes))
    return str(folder / name)


def make_job(folder: Path, name: str, *, steps: int = 24, every_steps: int = 4, **changes: Any) -> Job:
    """A job on the model and text of `folder`, with a result folder of its own."""
    fields: dict[str, Any] = {
        "name": name,
        "model": str(folder / "model"),
        "data": {"paths": [str(folder / "text")], "validation_fraction": 0.1, "tokenizer": "bytes"},
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


def submit(client: ApiClient, job: Job) -> JobView:
    """Submit a job."""
    return client.submit(Submission(job=job, model=load_model(job.model)))


POLL_S = 0.1
"""Between two looks at a pool: each costs its server and this process CPU time that its workers then lack."""


def wait_until(what: str, condition: Callable[[], Any], timeout_s: float = 240.0, poll_s: float = POLL_S) -> Any:
    """Return the first true value of `condition`, tried every `poll_s`; fail with `what` when it does not come."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(poll_s)


def state_is(client: ApiClient, job: str, *states: str, timeout_s: float = 240.0) -> JobView:
    """Wait until a job is in one of the states; it may not fail."""

    def condition() -> JobView | None:
        view = client.job(job)
        assert view.state != "failed" or "failed" in states, view.reason
        return view if view.state in states else None

    found: JobView = wait_until(f"{job} is {' or '.join(states)}", condition, timeout_s)
    return found


def choose(client: ApiClient, job: str, wanted: Callable[[Plan], object] = bool) -> Plan:
    """Wait for a job's plans and choose the first that is `wanted`; return it."""
    state_is(client, job, "choosing")
    plan = next(one for one in client.plans(job).plans if wanted(one))
    client.choose(job, plan.id)
    return plan


def at_step(client: ApiClient, job: str, step: int, attempt: int = 1, timeout_s: float = 240.0) -> None:
    """Wait until an attempt of a job, or a later one, has reached a step."""
    cursor = 0

    def reached() -> bool:
        nonlocal cursor
        page = client.metrics(job, after=cursor)
        cursor = page.next
        return any(m.step >= step and m.attempt >= attempt for m in page.metrics)

    wait_until(f"{job} reaches step {step} in attempt {attempt}", reached, timeout_s, POLL_S / 2)


def all_metrics(client: ApiClient, job: str) -> list[StepMetrics]:
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
        m.step: m.values["loss"] for m in sorted(metrics, key=lambda m: m.attempt) if m.values.get("loss") is not None
    }  # type: ignore[misc]


def as_one_process(
    job: Job, metrics: list[StepMetrics], folder: Path, *, until: int | None = None, within: float = 1e-4
) -> Job:
    """Assert that each step's loss is that of one process, `within` a share of it; return the job it did, in `folder`.

    Only the steps before `until` are compared: over many hundreds, the rounding of another order of sums adds up.
    """
    own = {"checkpoints": job.checkpoints.model_copy(update={"folder": str(folder / "checkpoints")})}
    alone = job.model_copy(update=own | {"output": str(folder / "result")})
    together, expected = losses(metrics), _train_alone(alone, folder / "worker")
    assert together.keys() == expected.keys() == set(range(job.training.steps))
    compared = [step for step in expected if until is None or step < until]
    off = {step: abs(together[step] - expected[step]) / expected[step] for step in compared}
    far = {step: share for step, share in off.items() if share >= within}
    attempts = {m.step: m.attempt for m in sorted(metrics, key=lambda m: m.attempt)}
    assert not far, f"losses are off, by step: {far}; attempts by step: {attempts}"
    return alone


def _train_alone(job: Job, folder: Path) -> dict[int, float]:
    """Run `job` as one process with all layers, without server, agent or links; return its losses by step."""
    plan = Plan(
        id="alone",
        stages=(Stage(cluster="here", node_group="cpu", layers=(0, load_model(job.model).num_layers)),),
        micro_batches=job.training.num_micro_batches,
        micro_batch_size=job.training.micro_batch_size,
        sequence_length=job.training.sequence_length,
    )
    worker = WorkerFolder(folder)
    worker.write_spec(WorkerSpec(run="alone", attempt=1, rank=0, job=job, plan=plan))
    process = ForkedProgram("isthmus.train.process.worker", folder, worker.log_path)
    address = wait_until("the lone worker checks in", worker.read_checkin)
    worker.write_rank_map(RankMap(workers=(address,)))
    assert process.wait(120) == 0, worker.log_path.read_text()
    return losses([StepMetrics.model_validate_json(line) for line in worker.metrics_path.read_text().splitlines()])
