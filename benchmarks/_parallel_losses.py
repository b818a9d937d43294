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
from isthmus.core.model import Model, load_model
from isthmus.core.plan import Plan
from isthmus.train.comparison import ParallelCheck, check_parallel
from isthmus.train.context_parallel.check_context_parallel import check_context_parallel
from isthmus.train.tensor_parallel.check_tensor_parallel import check_tensor_parallel

MAX_RANKS = 8
LIMIT = 1e-4
_LAYERS, _TOKENS, _SEED = 4, 32, 24
_MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 272, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": _LAYERS, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 4, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip


def measure(quick: bool) -> list[Row]:
    """Return a row with the largest difference of a loss from that of one process, over plans and steps."""
    num_plans, steps = (2, 5) if quick else (10, 200)
    with tempfile.TemporaryDirectory() as place:
        model = Path(place) / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(_MODEL), encoding="utf-8")
        plans = itertools.islice(random_plans(_SEED, model), num_plans)
        checks = [check_parallel(plan, model, Path(place) / plan.id, steps=steps, limit_s=3600.0) for plan in plans]
    return [_row(checks, steps)]


def random_plans(seed: int, model: Path) -> Iterator[Plan]:
    """Yield supported plans of up to `MAX_RANKS` ranks in random degrees: cp of each kind, tp, sp, pp, dp, ZeRO."""
    draw, described = random.Random(seed), load_model(model)
    for number in itertools.count():
        dp, pp = draw.choice([1, 2]), draw.choice([1, 2])
        ends = [*sorted(draw.sample(range(1, _LAYERS), pp - 1)), _LAYERS]
        stages = [
            {"replica": replica, "cluster": "ab"[replica], "node_group": "cpu", "layers": layers, **_degrees(draw)}
            for replica in range(dp)
            for layers in itertools.pairwise([0, *ends])
        ]
        plan = Plan.model_validate(
            {
                "id": f"random-{number}", "stages": stages, "dp": dp, "micro_batches": 2, "micro_batch_size": 2,
                "sequence_length": _TOKENS, "zero": draw.choice([0, 1]),
            }
        )  # fmt: skip
        if len(plan.ranks) <= MAX_RANKS and _is_supported(plan, described):
            yield plan


def _degrees(draw: random.Random) -> dict[str, Any]:
    cp, tp = draw.choice([1, 2, 2, 4]), draw.choice([1, 1, 2])
    kind = draw.choice(["gather", "ring", "all_to_all"]) if cp > 1 else "gather"
    return {"cp": cp, "tp": tp, "cp_kind": kind, "sp": tp > 1 and draw.random() < 0.5}


def _is_supported(plan: Plan, model: Model) -> bool:
    try:
        check_tensor_parallel(plan, model)
        check_context_parallel(plan, model)
    except PlanError:
        return False
    return True


def _row(checks: list[ParallelCheck], steps: int) -> Row:
    worst = max(check.loss_error for check in checks)
    plans = f"losses: {len(checks)} random plans over cp, tp, sp, pp, dp, ZeRO"
    return Row(
        what=f"{plans}, largest relative difference at {steps} steps", ours=worst, unit="of one process's loss",
        target=f"at most {LIMIT}", met=worst <= LIMIT,
    )  # fmt: skip
