"""CPU seconds of a step of TRL's trainer on the sums of `_sums_model`, where TRL is installed."""

from __future__ import annotations

import json
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks._sums_model import GROUP, PROMPTS, RESPONSE_TOKENS, make_job, supervise, write_problem

NUM_STEPS, STEADY_STEP = 30, 10
"""Steps, and the one from which CPU seconds count: before it, libraries load and caches fill."""


def has_trl() -> bool:
    """Return whether TRL is installed."""
    return find_spec("trl") is not None


def trl_step_cpu_s(folder: Path, seed: int = 0) -> float:
    """Return the CPU seconds of this process for a step of 256 samples, the loss that of DAPO, decoding included."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    write_problem(folder)
    model = folder / f"model-{seed}"
    if not model.exists():
        supervise(make_job(folder / "trl", model, seed, NUM_STEPS), model, seed)
    lines = (folder / "prompts.jsonl").read_text().splitlines()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="</s>", pad_token="</s>", padding_side="left"
    )  # fmt: skip
    marks: dict[int, float] = {}

    class Marks(TrainerCallback):  # type: ignore[misc]
        """Notes CPU seconds after each step."""

        def on_step_end(self, _arguments: Any, state: Any, _control: Any, **_: Any) -> None:
            """Note the step."""
            marks[state.global_step] = time.process_time()

    def exact(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [float(one == wanted) for one, wanted in zip(completions, answer, strict=True)]

    arguments = GRPOConfig(
        output_dir=str(folder / "trl"), use_cpu=True, bf16=False, per_device_train_batch_size=GROUP * PROMPTS,
        num_generations=GROUP, max_completion_length=RESPONSE_TOKENS, max_steps=NUM_STEPS, learning_rate=5e-4,
        lr_scheduler_type="constant", loss_type="dapo", epsilon=0.2, epsilon_high=0.28, delta=3.0, beta=0.0,
        temperature=1.0, gradient_checkpointing=False, save_strategy="no", report_to=[], logging_steps=NUM_STEPS,
        seed=seed, disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    torch.set_num_threads(1)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model), reward_funcs=exact, args=arguments, callbacks=[Marks()],
        train_dataset=Dataset.from_list([json.loads(one) for one in lines]), processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    return (marks[NUM_STEPS] - marks[STEADY_STEP]) / (NUM_STEPS - STEADY_STEP)
