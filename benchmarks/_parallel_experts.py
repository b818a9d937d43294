"""Ranks that share the experts of a model: the bytes of their exchanges, and how far they are from one process."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.table import Row
from isthmus.core.messages.agent_messages import StepMetrics
from isthmus.core.messages.worker_folder import WorkerFolder
from isthmus.core.plan import Plan
from isthmus.train.comparison import check_parallel

LAYERS, WIDTH, EXPERTS, CHOICES, LENGTH = 2, 64, 8, 2, 128
CONFIG = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": WIDTH, "intermediate_size": 128,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
    "max_position_embeddings": LENGTH, "num_local_experts": EXPERTS, "num_experts_per_tok": CHOICES,
}  # fmt: skip
MICRO_BATCHES, SIZE, EXCHANGES, FP32_BYTES = 2, 2, 4, 4
"""Exchanges of a layer: to the experts and back, in both passes."""

BALANCE = 0.05
"""By which routing that is not trained for balance may send more than even routing does."""


def measure(quick: bool) -> list[Row]:
    """Return the rows."""
    stage = {"cluster": "a", "node_group": "cpu", "layers": (0, LAYERS)}
    plans = {
        "ep 2, chips that share sequences": _plan([stage | {"cp": 2, "ep": 2}]),
        "ep 2, replicas": _plan([stage | {"replica": replica, "ep": 2} for replica in range(2)]),
        "ep 4, two replicas of two chips": _plan([stage | {"replica": one, "cp": 2, "ep": 4} for one in range(2)]),
    }
    return [row for what, plan in list(plans.items())[: 1 if quick else None] for row in _rows(what, plan)]


def _plan(stages: list[dict[str, Any]]) -> Plan:
    dp = len({stage.get("replica", 0) for stage in stages})
    return Plan.model_validate(
        {
            "id": "experts", "stages": stages, "dp": dp, "micro_batches": MICRO_BATCHES, "micro_batch_size": SIZE,
            "sequence_length": LENGTH,
        }
    )  # fmt: skip


def _rows(what: str, plan: Plan) -> list[Row]:
    ep, tokens = plan.stages[0].ep, plan.num_samples * plan.sequence_length
    even = tokens * CHOICES * WIDTH * FP32_BYTES * (ep - 1) / ep * LAYERS * EXCHANGES
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        found = check_parallel(plan, Path(folder), Path(folder) / "runs")
        sent = [_sent_bytes(Path(folder) / "runs" / "plan", rank) for rank in range(len(plan.ranks))]
    counted = sum(sum(steps) for steps in sent) / len(found.losses)
    apart = counted / even
    return [
        Row(what=f"ep bytes, {what}: sent in a step", ours=counted, unit="bytes",
            peer="tokens x k x H x (ep - 1) / ep", peer_value=even, ratio=apart,
            target=f"{BALANCE:.0%} more: routing is not even", met=apart <= 1 + BALANCE),
        Row(what=f"ep bytes, {what}: loss apart from one process, most", ours=found.loss_error, unit="of the loss",
            target="1e-4", met=found.loss_error <= 1e-4),
    ]  # fmt: skip


def _sent_bytes(folder: Path, rank: int) -> list[float]:
    """Return the bytes that a rank has sent to experts and back, by step."""
    lines = WorkerFolder(folder / f"rank-{rank}").metrics_path.read_text(encoding="utf-8").splitlines()
    return [StepMetrics.model_validate_json(line).values["expert_bytes"] or 0.0 for line in lines]
