"""Part `losses` of `benchmarks.parallel`: random plans in processes beside one process, step by step."""

from __future__ import annotations

import itertools
import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.table import Row
from isthmus.core.errors import PlanError
from isthmus.core.job import Job
from isthmus.core.messages.worker_folder import WorkerSpec
from isthmus.core.plan import Plan
from isthmus.train.comparison import ParallelCheck, check_parallel
from isthmus.train.process.check_plan_supported import check_plan_supported

MAX_RANKS = 8
LIMIT = 1e-4
_LAYERS, _TOKENS, _SEED = 4, 32, 24
_SIZES = {
    "vocab_size": 272, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": _LAYERS,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4, "max_position_embeddings": 64,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "dense": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True, **_SIZES,
    },
    "experts": {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4,
        "num_experts_per_tok": 2, **_SIZES,
    },
}  # fmt: skip


def measure(quick: bool) -> list[Row]:
    """Return a row for each model, with the largest difference of a loss from that of one process."""
    num_plans, steps = (1, 5) if quick else (10, 200)
    rows = []
    for kind in MODELS:
        with tempfile.TemporaryDirectory() as place:
            model = write_model(kind, Path(place))
            plans = list(itertools.islice(random_plans(_SEED, kind, model), num_plans))
            checks = [check_parallel(plan, model, Path(place) / plan.id, steps=steps, limit_s=3600.0) for plan in plans]
        rows.append(_row(kind, plans, checks, steps))
    return rows


def write_model(kind: str, folder: Path) -> Path:
    """Return a new folder in `folder` with the configuration of model `kind`."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODELS[kind]), encoding="utf-8")
    return model


def random_plans(seed: int, kind: str, model: Path) -> Iterator[Plan]:
    """Yield supported plans of 2 to `MAX_RANKS` ranks for model `kind` in random degrees.

    They are cp of each kind, tp, sp, pp, dp in one or two clusters, ep, ZeRO 0 to 3, schedules, and whether gradients
    are summed during the last backward pass.
    """
    draw = random.Random(f"{kind} {seed}")
    for number in itertools.count():
        plan = _random_plan(draw, kind, number)
        if 1 < len(plan.ranks) <= MAX_RANKS and _is_supported(plan, model):
            yield plan


def _random_plan(draw: random.Random, kind: str, number: int) -> Plan:
    dp, pp, clusters = draw.choice([1, 2]), draw.choice([1, 2]), draw.choice(["aa", "ab"])
    ends = [*sorted(draw.sample(range(1, _LAYERS), pp - 1)), _LAYERS]
    alike, zero = draw.random() < 0.5, draw.choice([0, 1, 2, 3])
    degrees = [[_degrees(draw, kind) for _ in ends] for _ in range(dp)]
    stages = [
        {
            "replica": replica, "cluster": clusters[replica], "node_group": "cpu", "layers": layers,
            **degrees[0 if alike else replica][place],
        }
        for replica in range(dp)
        for place, layers in enumerate(itertools.pairwise([0, *ends]))
    ]  # fmt: skip
    apart = zero > 1 and dp > 1 and clusters == "ab"
    return Plan.model_validate(
        {
            "id": f"random-{kind}-{number}", "stages": stages, "dp": dp, "micro_batches": 2, "micro_batch_size": 2,
            "sequence_length": _TOKENS, "zero": zero, "schedule": draw.choice(["1f1b", "gpipe", "zero_bubble"]),
            "overlap_gradients": draw.random() < 0.5, "sharding": {"replicas": 1} if apart else None,
        }
    )  # fmt: skip


def _degrees(draw: random.Random, kind: str) -> dict[str, Any]:
    cp, tp = draw.choice([1, 2, 2, 4]), draw.choice([1, 1, 2])
    ways = draw.choice(["gather", "ring", "all_to_all"]) if cp > 1 else "gather"
    ep = draw.choice([1, 2, 4]) if kind == "experts" else 1
    return {"cp": cp, "tp": tp, "cp_kind": ways, "sp": tp > 1 and draw.random() < 0.5, "ep": ep}


def _is_supported(plan: Plan, model: Path) -> bool:
    job = Job.model_validate(
        {
            "name": "losses", "model": str(model), "data": {"paths": ["text.txt"], "tokenizer": "bytes"},
            "training": {
                "steps": 1, "sequence_length": plan.sequence_length, "micro_batch_size": plan.micro_batch_size,
                "global_batch_size": plan.num_samples, "learning_rate": 1e-3, "precision": "fp32",
            },
            "checkpoints": {"folder": str(model.parent / "checkpoints")}, "output": str(model.parent / "output"),
        }
    )  # fmt: skip
    try:
        check_plan_supported(WorkerSpec(run="losses", attempt=1, rank=0, job=job, plan=plan))
    except PlanError:
        return False
    return True


def _row(kind: str, plans: list[Plan], checks: list[ParallelCheck], steps: int) -> Row:
    worst = max(check.loss_error for check in checks)
    counts = {
        "pp": sum(len(one.stages) > one.dp for one in plans), "dp": sum(one.dp > 1 for one in plans),
        **{name: sum(any(getattr(of, name) > 1 for of in one.stages) for one in plans) for name in ("tp", "cp", "ep")},
        "ZeRO 1": sum(one.zero == 1 for one in plans), "ZeRO 2 or 3": sum(one.zero > 1 for one in plans),
    }  # fmt: skip
    parts = ", ".join(f"{count} with {name}" for name, count in counts.items() if count)
    return Row(
        what=f"losses: {len(checks)} random plans, {kind} ({parts}), {steps} steps, largest difference of a step",
        ours=worst, unit="of one process's loss", target=f"at most {LIMIT}", met=worst <= LIMIT,
    )  # fmt: skip
