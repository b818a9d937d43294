"""Sums of two-digit numbers, a tiny model with a vocabulary of digits, and its supervised steps before reinforcement.

The answer is written from its last digit to its first, so that a carry is known when it is needed. 133,000 parameters.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from isthmus.core.job import Job
from isthmus.data import open_prompts

VOCABULARY = (*"0123456789+=", "</s>", "<unk>")
CONFIG = Qwen3Config(
    vocab_size=16, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, head_dim=16, max_position_embeddings=32, tie_word_embeddings=True,
)  # fmt: skip
NUMBERS = range(10, 100)
PROMPT_TOKENS, RESPONSE_TOKENS = 6, 4
HELD_OUT, HELD_OUT_FRACTION = 500, 500 / len(NUMBERS) ** 2
GROUP, PROMPTS = 8, 32
SUPERVISED_STEPS, SUPERVISED_BATCH, SUPERVISED_RATE = 300, 64, 6e-4
IGNORED = -100


def write_problem(folder: Path) -> None:
    """Write the tokenizer and the prompts below `folder`."""
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    sums = [(f"{a}+{b}=", str(a + b)[::-1]) for a in NUMBERS for b in NUMBERS]
    random.Random(0).shuffle(sums)
    lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in sums]
    (folder / "prompts.jsonl").write_text("\n".join(lines))


def make_job(folder: Path, model: Path, seed: int, steps: int, staleness: int = 0, **training: Any) -> Job:
    """Return the job of one run below `folder`; `write_problem` has filled the folder above it."""
    problem = folder.parent
    values = {
        "steps": steps, "sequence_length": PROMPT_TOKENS + RESPONSE_TOKENS, "micro_batch_size": GROUP * PROMPTS,
        "global_batch_size": GROUP * PROMPTS, "learning_rate": 5e-4, "min_learning_rate": 5e-4, "weight_decay": 0.0,
        "beta2": 0.999, "precision": "fp32", "seed": seed, "evaluate_every": 100, "evaluate_samples": HELD_OUT,
    }  # fmt: skip
    return Job.model_validate(
        {
            "name": f"sums-{seed}-{staleness}", "task": "rl", "model": str(model),
            "rl": {
                "algorithm": "dapo", "group": GROUP, "max_prompt_tokens": PROMPT_TOKENS,
                "max_response_tokens": RESPONSE_TOKENS, "filter_groups": False, "max_staleness": staleness,
                "reward": {"exact": True},
            },
            "training": values | training,
            "data": {
                "paths": [str(problem / "prompts.jsonl")], "format": "prompts",
                "tokenizer": str(problem / "tokenizer.json"), "validation_fraction": HELD_OUT_FRACTION,
            },
            "checkpoints": {"folder": str(folder / "checkpoints"), "every_steps": 0, "memory_interval": 10**6},
            "output": str(folder / "output"),
        }
    )  # fmt: skip


def supervise(job: Job, folder: Path, seed: int, steps: int = SUPERVISED_STEPS) -> Path:
    """Train a new model on answers of training prompts alone; return its folder."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    prompts = open_prompts(job)
    count = len(NUMBERS) ** 2 - HELD_OUT
    model = AutoModelForCausalLM.from_config(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), SUPERVISED_RATE, weight_decay=0.0)
    order = np.random.default_rng(seed)
    for _ in range(steps):
        chosen = [prompts.prompt(int(at)) for at in order.integers(count, size=SUPERVISED_BATCH)]
        tokens = torch.full((SUPERVISED_BATCH, PROMPT_TOKENS + RESPONSE_TOKENS), prompts.end_id)
        labels = torch.full_like(tokens, IGNORED)
        for row, one in enumerate(chosen):
            answer = [VOCABULARY.index(digit) for digit in one.answer] + [prompts.end_id]
            whole = torch.tensor([*one.tokens, *answer])
            tokens[row, : len(whole)] = whole
            labels[row, PROMPT_TOKENS : len(whole)] = whole[PROMPT_TOKENS:]
        model(input_ids=tokens, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder
