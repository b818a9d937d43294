"""Part `ahead` of `benchmarks.parallel`: waits of the host for a device in a step, on a stand-in with a stream."""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path

import torch

from benchmarks.table import Row, compared
from isthmus.core.job import TrainingConfig
from isthmus.schedule import make_schedule
from isthmus.train.communication.communicator import Communicator
from isthmus.train.communication.step_metrics import StepTimer
from isthmus.train.model.model_chunks import ModelChunks
from isthmus.train.model.stage_model import build_stage
from isthmus.train.pipeline.micro_batches import MicroBatches
from isthmus.train.pipeline.stage_executor import StageExecutor
from isthmus.train.update.optimizer import Optimizer
from tests.train.asynchronous_device import AsynchronousDevice

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 176,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256,
    "max_position_embeddings": 32, "tie_word_embeddings": False,
}  # fmt: skip
STEPS, MICRO_BATCHES = 3, 4


def measure(quick: bool) -> list[Row]:
    """Return the rows."""
    schedules = ("1f1b",) if quick else ("1f1b", "gpipe", "zero_bubble")
    rows = []
    for schedule in schedules:
        device = _train(schedule)
        waits = len(device.waits) / STEPS
        rows.append(
            compared(
                f"host ahead, device stand-in, {schedule}: waits of the host in a step ({device.num_queued // STEPS} "
                "operations queued)", waits, "waits", "one, for loss and gradient norm", 1.0, target="the loss alone",
                met=waits == 1,
            )
        )  # fmt: skip
    return rows


def _train(schedule: str) -> AsynchronousDevice:
    """Train some steps on the stand-in; return it."""
    training = TrainingConfig(steps=STEPS, precision="fp32", warmup_steps=0)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        stage = build_stage(folder, (0, 2), dtype=torch.float32, device="cpu", seed=3, weights="random")
    chunks, device = ModelChunks([stage]), AsynchronousDevice()
    optimizer = Optimizer(chunks.global_named_parameters(), training)
    executor = StageExecutor(chunks, 0, [0], Communicator("a", 0), dtype=torch.float32, timeline=device)
    for step in range(STEPS):
        tokens = torch.randint(256, (2 * MICRO_BATCHES, 33), generator=torch.Generator().manual_seed(step))
        batches = MicroBatches.split(len(tokens), 2, 32, tokens[:, :-1], tokens[:, 1:])
        with device:
            update = partial(_update, optimizer, executor, step)
            executor.run(make_schedule(schedule, 1, MICRO_BATCHES), batches, StepTimer(), update)
    return device


def _update(optimizer: Optimizer, executor: StageExecutor, step: int) -> None:
    optimizer.apply(step, lambda: executor.losses.loss or 0.0)
