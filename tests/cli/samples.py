"""Made-up jobs, pools and metrics that hold together: three stages at three clusters of virtual chips."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from isthmus.core.job import CheckpointConfig, DataConfig, Job, TrainingConfig
from isthmus.core.messages.agent_messages import ReceivedMessage, Span, StepMetrics
from isthmus.core.plan import Plan, PlanSet, Prediction, Refusal, Stage, StageTime
from isthmus.core.pool import Cluster, Link, NodeGroup, VirtualChip
from isthmus.core.views.api_views import AgentView, ClusterView, JobView, PartView, PoolView

START_S = 1_800_000_000.0
CLUSTERS = ("qingyang", "hangzhou", "nanjing")
STAGE_TIMES = ((0.030, 0.060), (0.030, 0.060), (0.026, 0.052))


def write_job(folder: Path, vocab_size: int = 260) -> Path:
    """Write a job file without `policy`, so `manual`, with its model beside it; return the file."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "vocab_size": vocab_size,
    }
    (folder / "config.json").write_text(json.dumps(config))
    file = folder / "job.yaml"
    file.write_text(
        "name: mine\nmodel: config.json\noutput: out\ndata: {paths: [text]}\n"
        "training: {steps: 3, sequence_length: 8, global_batch_size: 2}\ncheckpoints: {folder: ck}\n"
    )
    return file


def make_job(**changes: Any) -> Job:
    """Return a job of 40 steps; `changes` replace fields."""
    fields = {
        "name": "stdlib-moe",
        "model": "/models/tiny-mixtral/config.json",
        "data": DataConfig(paths=("/data/*.py",)),
        "training": TrainingConfig(steps=40, sequence_length=256, global_batch_size=4),
        "checkpoints": CheckpointConfig(folder="/runs/checkpoints"),
        "output": "/runs/model",
    }
    return Job.model_validate(fields | changes)


def make_plan(ident: str = "p1") -> Plan:
    """Return a plan of one stage at each of `CLUSTERS`."""
    ranges = ((0, 3), (3, 6), (6, 8))
    stages = tuple(
        Stage(cluster=name, node_group="h20" if name != "nanjing" else "bi", layers=layers)
        for name, layers in zip(CLUSTERS, ranges, strict=True)
    )
    return Plan(
        id=ident,
        stages=stages,
        micro_batches=4,
        micro_batch_size=1,
        sequence_length=256,
        predicted=Prediction(
            iteration_s=0.62,
            tgs_tokens_per_card_s=550.0,
            samples_per_s=6.45,
            peak_memory_bytes=(40_000_000, 38_000_000, 36_000_000),
            wan_gbps=(0.0135, 0.0135),
            cost_per_iteration=0.0021,
            stage_times=tuple(StageTime(forward_s=f, backward_s=b) for f, b in STAGE_TIMES),
            assumptions=("catalogue speed at 40 % of peak", "links otherwise idle"),
        ),
        why="the only order in which no hop crosses the slow link twice",
    )


def make_pool() -> PoolView:
    """Return the pool of the three clusters with a link each way between neighbours."""
    clusters = []
    for name, owner in zip(CLUSTERS, ("owner-a", "owner-b", "owner-c"), strict=True):
        chip, group = ("BI-V150", "bi") if name == "nanjing" else ("H20", "h20")
        nodes = NodeGroup(name=group, chip=chip, nodes=1, chips_per_node=2, virtual=VirtualChip(compute_scale=0.001))
        cluster = Cluster(name=name, owner=owner, region="east", node_groups=(nodes,))
        lost = name == "nanjing"
        clusters.append(
            ClusterView(
                cluster=cluster,
                connected=not lost,
                free_chips={group: 1},
                last_report_s=START_S - 60 if lost else START_S,
                agent=AgentView(
                    id="0123456789ab", enrolled_s=START_S - 7200, session=3, session_s=START_S - 600, run_lease_s=900
                ),
                released_at_s=START_S + 840 if lost else None,
                jobs=("job-1",) if lost else (),
            )
        )
    links = [
        Link(source=a, target=b, bandwidth_gbps=gbps, delay_ms=10, jitter_ms=0.5, loss=1e-4)
        for ends, gbps in ((CLUSTERS[:2], 1.0), (CLUSTERS[1:], 0.4))
        for a, b in (ends, ends[::-1])
    ]
    return PoolView(clusters=tuple(clusters), links=tuple(links))


def make_view(**changes: Any) -> JobView:
    """Return a running job with its plan, parts and candidates; `changes` replace fields."""
    plan = make_plan()
    other = plan.model_copy(update={"id": "p2", "why": "slower: more hops on the slow link"})
    parts = tuple(
        PartView(cluster=name, owner=f"owner-{'abc'[rank]}", ranks=(rank,), desired="running", observed="running")
        for rank, name in enumerate(CLUSTERS)
    )
    fields = {
        "id": "j-3f9a2c",
        "name": "stdlib-moe",
        "user": "alice",
        "state": "running",
        "attempt": 1,
        "submitted_s": START_S - 60,
        "changed_s": START_S,
        "job": make_job(),
        "plan": plan,
        "plans": PlanSet(
            plans=(plan, other),
            refused=(Refusal(clusters=("qingyang",), reason="needs 93.1 MiB on one chip, which has 48.0 MiB"),),
        ),
        "parts": parts,
    }
    return JobView.model_validate(fields | changes)


def make_metrics(steps: int = 40, *, traced: tuple[int, ...] = (5, 20), job: str = "j-3f9a2c") -> list[StepMetrics]:
    """Return the metrics of `steps` steps of a falling loss, with spans for the `traced` ones."""
    dice = random.Random(7)
    found: list[StepMetrics] = []
    clock_s = START_S
    for step in range(steps):
        spans, messages, busy, length_s = one_step(clock_s)
        step_s = length_s * (1 + 0.03 * dice.random()) + (0.4 if step == 0 else 0.0)
        loss = 2.2 + 3.4 * math.exp(-step / 12) + dice.gauss(0, 0.05)
        for rank in range(3):
            values: dict[str, float | None] = {
                "tokens_per_s": 1024 / step_s,
                "samples_per_s": 4 / step_s,
                "learning_rate": 3e-4,
                "gradient_norm": 1.0,
                "compute_s": busy[rank][0],
                "exposed_communication_s": busy[rank][1],
                "idle_s": max(0.0, step_s - sum(busy[rank])),
                "wan_bytes": 4 * 131_072.0 * (2 if rank == 1 else 1),
                "step_s": step_s,
                "overrun_s": 0.002,
            }
            if rank == 2:
                values["loss"] = loss
                if step % 10 == 9:
                    values["validation_loss"] = loss + 0.08
            kept = tuple(spans[rank]) if step in traced else ()
            received = tuple(messages[rank]) if step in traced else ()
            found.append(
                StepMetrics(job=job, attempt=1, rank=rank, step=step, values=values, spans=kept, messages=received)
            )
        clock_s += step_s
    return found


def one_step(
    start_s: float, micro_batches: int = 4, hop_s: float = 0.014
) -> tuple[list[list[Span]], list[list[ReceivedMessage]], list[tuple[float, float]], float]:
    """Run all forwards, then all backwards: spans, messages and (compute, waiting) seconds by rank, and the length."""
    spans: list[list[Span]] = [[], [], []]
    messages: list[list[ReceivedMessage]] = [[], [], []]
    free_s = [start_s] * 3
    ready: dict[tuple[str, int, int], float] = {(("forward"), m, 0): start_s for m in range(micro_batches)}

    def work(kind: str, m: int, rank: int, took_s: float, then: int | None) -> None:
        arrived_s = ready[kind, m, rank]
        if arrived_s > free_s[rank]:
            spans[rank].append(Span(kind="receive", micro_batch=m, start_s=free_s[rank], end_s=arrived_s))
            free_s[rank] = arrived_s
        end_s = free_s[rank] + took_s
        spans[rank].append(Span(kind=kind, micro_batch=m, start_s=free_s[rank], end_s=end_s))
        free_s[rank] = end_s
        if then is not None:
            spans[rank].append(Span(kind="send", micro_batch=m, start_s=end_s, end_s=end_s + 0.002))
            ready[kind, m, then] = end_s + hop_s
            messages[then].append(message(kind, m, rank, end_s, end_s + 0.001, end_s + hop_s))
            free_s[rank] += 0.002

    for m in range(micro_batches):
        for rank in range(3):
            work("forward", m, rank, STAGE_TIMES[rank][0], rank + 1 if rank < 2 else None)
        ready["backward", m, 2] = free_s[2]
    for m in range(micro_batches):
        ready["backward", m, 2] = start_s
        for rank in (2, 1, 0):
            work("backward", m, rank, STAGE_TIMES[rank][1], rank - 1 if rank else None)
    end_s = max(free_s)
    for rank in range(3):
        spans[rank].append(Span(kind="update", micro_batch=-1, start_s=end_s, end_s=end_s + 0.01))
    busy = [
        (
            sum(x.end_s - x.start_s for x in own if x.kind in ("forward", "backward", "update")),
            sum(x.end_s - x.start_s for x in own if x.kind in ("receive", "send")),
        )
        for own in spans
    ]
    return spans, messages, busy, end_s + 0.01 - start_s


def message(
    kind: str, micro_batch: int, source: int, sent_s: float, left_s: float, arrived_s: float, ahead_s: float = 0.0
) -> ReceivedMessage:
    """Return the record of a message of one fragment."""
    return ReceivedMessage(
        kind=kind, micro_batch=micro_batch, source=source, num_bytes=131_072, sent_s=sent_s, first_left_s=left_s,
        last_left_s=left_s, arrived_s=arrived_s, clock_offset_s=ahead_s,
    )  # fmt: skip
