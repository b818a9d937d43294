"""Two sites in network namespaces whose traffic crosses a link as `pool.yaml` states it, and a job across them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from isthmus.core.base_model import ComputeMode
from isthmus.core.job import Job
from isthmus.core.messages.agent_messages import RankMap
from isthmus.core.messages.worker_folder import WorkerFolder, WorkerSpec
from isthmus.core.plan import Plan, Stage, StageTime
from isthmus.core.pool import Pool
from isthmus.wan.netns import Namespaces, emulated_namespaces

SITES = ("nanjing", "hangzhou")
GROUP = {"name": "cpu", "chip": "CPU-core", "nodes": 1, "chips_per_node": 1}
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 260, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 32, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}  # fmt: skip
LIMIT_S = 900.0


@dataclass
class Sites:
    """The namespaces, and of each site its routes and how to ask for its processes."""

    namespaces: Namespaces
    folder: Path
    routes: dict[str, dict[str, str]]
    programs: dict[str, subprocess.Popen[str]]

    def pids(self, site: str) -> dict[str, int]:
        """Return the process of each part of a site."""
        program = self.programs[site]
        if program.stdin is None or program.stdout is None:
            raise OSError(f"the program of {site} has no pipes")
        program.stdin.write("\n")
        program.stdin.flush()
        found: dict[str, int] = json.loads(program.stdout.readline())["pids"]
        return found


def document(
    link: dict[str, Any], crossing: dict[str, Any], num_gateways: int, edge_gbps: float | None
) -> dict[str, Any]:
    """Return a pool of two sites; addresses are those of `emulated_namespaces`."""
    clusters = []
    for number, name in enumerate(SITES):
        address = f"10.213.0.{number + 1}"
        gateways = [
            {
                "name": f"g{one}", "listen": f"{address}:{4790 + one}", "networks": [f"10.215.{number}.0/24"],
                "roce_gbps": 0.1,
            }
            for one in range(num_gateways)
        ]  # fmt: skip
        access: dict[str, Any] = {"proxy": {"listen": f"{address}:7400"}, "gateways": gateways}
        if edge_gbps is not None:
            access["edge"] = {"device": "wan", "gbps": edge_gbps}
        clusters.append({"name": name, "owner": name, "node_groups": [GROUP], "access": access})
    return {
        "clusters": clusters,
        "links": [{"between": list(SITES), **link, "crossing": {"key": "link.key", **crossing}}],
    }


@contextmanager
def sites_of(pool: dict[str, Any], folder: Path) -> Iterator[Sites]:
    """Emulate the pool in namespaces, and start what it states at both sites."""
    key, file = folder / "link.key", folder / "pool.yaml"
    key.touch(mode=0o600)
    key.write_text(os.urandom(32).hex())
    file.write_text(yaml.safe_dump(pool))
    with emulated_namespaces(Pool.model_validate(pool)) as namespaces:
        routes, programs = {}, {}
        for site in SITES:
            argv = [sys.executable, "-m", "benchmarks._crossing_site", str(file), site, str(folder / site)]
            program = namespaces.run_in(site, argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            programs[site] = program
            line = program.stdout.readline() if program.stdout else ""
            routes[site] = json.loads(line)["routes"]
        try:
            yield Sites(namespaces, folder, routes, programs)
        finally:
            for program in programs.values():
                if program.stdin is not None:
                    program.stdin.close()
                program.wait(30)


@dataclass(frozen=True)
class Trained:
    """The seconds and the losses of all steps."""

    steps_s: tuple[float, ...]
    losses: tuple[float, ...]


def train(
    sites: Sites | None, folder: Path, steps: int, at_step: Callable[[int], None], compute_s: float | None = None
) -> Trained:
    """Train two stages, one at each site, or directly on this machine without `sites`.

    `at_step` is called with each step that is done. With `compute_s` chips are virtual: forward and backward of a
    micro-batch wait for that time, and tensors have their real size.
    """
    model, text = folder / "model", folder / "text"
    for one in (model, text):
        one.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(CONFIG))
    (text / "a.txt").write_text(" ".join(f"{i * i % 97} isthmus" for i in range(20_000)))
    is_virtual = compute_s is not None
    job, plan = _job(folder, model, text, steps, is_virtual=is_virtual), _plan(is_virtual=is_virtual)
    workers = [WorkerFolder(folder / f"rank-{rank}") for rank in range(len(SITES))]
    spent = None if compute_s is None else StageTime(forward_s=compute_s, backward_s=compute_s, update_s=0.0)
    processes = []
    for rank, (site, worker) in enumerate(zip(SITES, workers, strict=True)):
        routes = {} if sites is None else sites.routes[site]
        worker.write_spec(
            WorkerSpec(run="crossing", attempt=1, rank=rank, job=job, plan=plan, routes=routes, stage_time=spent)
        )
        argv = [sys.executable, "-m", "isthmus.train.process.worker", str(worker.path)]
        with worker.log_path.open("ab") as log:
            options: dict[str, Any] = {"stdout": log, "stderr": log}
            processes.append(
                subprocess.Popen(argv, **options) if sites is None else sites.namespaces.run_in(site, argv, **options)
            )
    _until(lambda: all(worker.read_checkin() for worker in workers), workers, processes)
    ranks = RankMap(workers=tuple(one for worker in workers if (one := worker.read_checkin()) is not None))
    for worker in workers:
        worker.write_rank_map(ranks)
    seen = 0
    while any(process.poll() is None for process in processes):
        for step in range(seen, len(_metrics(workers[-1]))):
            seen = step + 1
            at_step(step)
        time.sleep(0.02)
    for process, worker in zip(processes, workers, strict=True):
        if process.returncode:
            raise RuntimeError(worker.log_path.read_text()[-2000:])
    values = [{**a["values"], **b["values"]} for a, b in zip(*map(_metrics, workers), strict=True)]
    slowest = [max(one["values"]["step_s"] for one in each) for each in zip(*map(_metrics, workers), strict=True)]
    return Trained(tuple(slowest), tuple(one["loss"] or 0.0 for one in values if "loss" in one))


def _job(folder: Path, model: Path, text: Path, steps: int, *, is_virtual: bool) -> Job:
    training = {
        "steps": steps, "sequence_length": 128, "micro_batch_size": 1, "global_batch_size": 4,
        "learning_rate": 0.003, "warmup_steps": 4, "precision": "fp32", "seed": 3,
    }  # fmt: skip
    return Job.model_validate(
        {
            "name": "crossing", "model": str(model), "training": training, "output": str(folder / "result"),
            "data": {"paths": [str(text)], "tokenizer": "bytes"},
            "checkpoints": {"folder": str(folder / "checkpoints"), "every_steps": 0},
            "compute": "virtual" if is_virtual else "real",
        }
    )  # fmt: skip


def _plan(*, is_virtual: bool) -> Plan:
    stages = tuple(Stage(cluster=site, node_group="cpu", layers=(n, n + 1)) for n, site in enumerate(SITES))
    compute: ComputeMode = "virtual" if is_virtual else "real"
    return Plan(id="crossing", stages=stages, micro_batches=4, micro_batch_size=1, sequence_length=128, compute=compute)


def _metrics(worker: WorkerFolder) -> list[dict[str, Any]]:
    if not worker.metrics_path.exists():
        return []
    text = worker.metrics_path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _until(
    condition: Callable[[], object], workers: list[WorkerFolder], processes: list[subprocess.Popen[Any]]
) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        for worker, process in zip(workers, processes, strict=True):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(worker.log_path.read_text()[-2000:])
        time.sleep(0.05)
