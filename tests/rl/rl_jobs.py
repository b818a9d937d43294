"""Small jobs with `task: rl`, run by real workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from isthmus.core.job import Job
from tests.forks import preload
from tests.train.small_models import save_model

PROGRAM = "isthmus.rl.process.rl_supervisor"
preload(PROGRAM)

REWARD = '''
def even(prompt, response, answer):
    """The share of characters with an even code."""
    return sum(ord(one) % 2 == 0 for one in response) / max(len(response), 1)
'''


def make_rl_job(folder: Path, variant: str = "qwen3", *, steps: int = 3, **changes: Any) -> Job:
    """Return a job on a model of a few thousand parameters and 40 prompts, all below `folder`."""
    save_model(folder / "model", variant, vocab_size=272, pad_token_id=None)
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    lines = [json.dumps({"prompt": f"{n}+{n + 1}=", "answer": str(2 * n + 1)}) for n in range(40)]
    (folder / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    training = {
        "steps": steps, "sequence_length": 16, "micro_batch_size": 4, "global_batch_size": 16, "learning_rate": 3e-3,
        "precision": "fp32", "seed": 7, **changes.pop("training", {}),
    }  # fmt: skip
    rl = {
        "group": 4, "max_prompt_tokens": 8, "max_response_tokens": 6,
        "reward": {"function": f"{folder / 'reward.py'}:even"}, **changes.pop("rl", {}),
    }  # fmt: skip
    return Job.model_validate(
        {
            "name": "sums", "task": "rl", "model": str(folder / "model"), "rl": rl, "training": training,
            "data": {
                "paths": [str(folder / "prompts.jsonl")], "format": "prompts", "tokenizer": "bytes",
                "validation_fraction": 0.1,
            },
            "checkpoints": {"folder": str(folder / "checkpoints"), "every_steps": 0} | changes.pop("checkpoints", {}),
            "output": str(folder / "output"), **changes,
        }
    )  # fmt: skip
