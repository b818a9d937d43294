"""A model of two stages of unlike precision: how far its loss is from that of fp32, and what a step takes."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.table import Row, compared
from isthmus.core.base_model import TrainingPrecision
from isthmus.core.job import TrainingConfig
from isthmus.train.kernels.linear_products import BlockScaledProducts
from isthmus.train.model.stage_model import StageModel, build_stage
from isthmus.train.update.optimizer import Optimizer

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 352,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
WIDE = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "head_dim": 64}
BATCH, LENGTH = 8, 64
PAIRS: tuple[tuple[TrainingPrecision, TrainingPrecision], ...] = (
    ("fp32", "fp32"),
    ("bf16", "bf16"),
    ("bf16", "fp32"),
    ("fp16", "bf16"),
    ("fp8", "fp8"),
    ("fp8", "bf16"),
)
"""Precision of the first and of the last stage."""


@dataclass(frozen=True)
class Curve:
    """Losses of a run by step, and the median seconds and CPU seconds of a step."""

    losses: tuple[float, ...]
    step_s: float
    step_cpu_s: float


def measure(quick: bool) -> list[Row]:
    """Return the rows."""
    steps = 20 if quick else 100
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        curves = {pair: _train(Path(folder), pair, steps) for pair in PAIRS}
    exact, rows = curves[PAIRS[0]], []
    for pair in PAIRS[1:]:
        what, found = f"precision, stages of {' and '.join(pair)}", curves[pair]
        apart = max(abs(a - b) / b for a, b in zip(found.losses, exact.losses, strict=True))
        rows.append(
            Row(what=f"{what}: loss apart from fp32 over {steps} steps, most", ours=apart, unit="of the loss",
                target="2 %", met=apart <= 0.02)
        )  # fmt: skip
        rows.append(compared(f"{what}: a step", 1e3 * found.step_s, "ms", "fp32", 1e3 * exact.step_s))
    return [*rows, _rate_row(quick)]


def _rate_row(quick: bool) -> Row:
    """Return the tokens of a CPU second in bf16 beside fp32, in layers wide enough for products to count."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG | WIDE), encoding="utf-8")
        found = [_train(Path(folder), pair, 3 if quick else 8) for pair in (("bf16", "bf16"), ("fp32", "fp32"))]
    ours, theirs = (BATCH * LENGTH / one.step_cpu_s for one in found)
    return compared(
        f"bf16 on CPU, 4 layers of {WIDE['hidden_size']}, one thread", ours, "tokens/CPU s", "fp32", theirs,
        target="2 x", met=ours >= 2 * theirs,
    )  # fmt: skip


def _train(folder: Path, pair: tuple[TrainingPrecision, TrainingPrecision], steps: int) -> Curve:
    """Train both stages in this process; hidden states between them are fp32."""
    training = TrainingConfig(steps=steps, learning_rate=1e-3, warmup_steps=5, clip_norm=0)
    stages = [
        build_stage(
            folder,
            layers,
            dtype=torch.float32,
            device="cpu",
            seed=1,
            weights="random",
            products=BlockScaledProducts() if precision == "fp8" else None,
        )
        for layers, precision in zip(((0, 2), (2, 4)), pair, strict=True)
    ]
    optimizers = [
        Optimizer(stage.global_named_parameters(), training, precision=precision, scales_loss="fp16" in pair)
        for stage, precision in zip(stages, pair, strict=True)
    ]
    losses, steps_s, cpu_s = [], [], []
    for step in range(steps):
        start_s, cpu = time.perf_counter(), time.process_time()
        losses.append(_step(stages, optimizers, step))
        steps_s.append(time.perf_counter() - start_s)
        cpu_s.append(time.process_time() - cpu)
    return Curve(tuple(losses), statistics.median(steps_s), statistics.median(cpu_s))


def _step(stages: list[StageModel], optimizers: list[Optimizer], step: int) -> float:
    """Train on one batch whose tokens follow from each other; return its loss, in nats a token."""
    columns = [torch.randint(512, (BATCH, 1), generator=torch.Generator().manual_seed(step))]
    for _ in range(LENGTH):
        columns.append((columns[-1] * 5 + 3) % 512)
    tokens = torch.cat(columns, 1)
    hidden = stages[0].compute(tokens[:, :-1])[0].float()
    loss = stages[1].loss(stages[1].compute(hidden)[0], tokens[:, 1:]) / (BATCH * LENGTH)
    (loss * optimizers[0].gradient_scale).backward()
    for optimizer in optimizers:
        if optimizer.apply(step).skipped:
            raise RuntimeError(f"step {step}: a gradient overflowed, which the ranks of a run would agree on")
    return loss.item()
