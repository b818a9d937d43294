"""Verify an exported model with transformers: `python -m isthmus.train.process.verify JOB.json`.

Prints `{"loss": nats per counted token, "parameters": number}`. `transformers.AutoModelForCausalLM` loads the
model; only the data set comes from the runtime.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from isthmus.core.errors import InputError, IsthmusError
from isthmus.core.job import Job
from isthmus.data import TokenBatch, open_job_data


def held_out_loss(model: torch.nn.Module, batch: TokenBatch) -> float:
    """Return the mean cross entropy (nats) of `batch`: input_ids, labels [n, S], -100 where not counted."""
    total, counted = 0.0, 0
    with torch.no_grad():
        for input_ids, labels in zip(batch.input_ids, batch.labels, strict=True):
            logits = model(input_ids[None], use_cache=False).logits[0].float()
            total += float(cross_entropy(logits, labels, reduction="sum", ignore_index=-100))
            counted += int((labels != -100).sum())
    return total / max(counted, 1)


def verify(job: Job) -> dict[str, float]:
    """Return the held-out loss and the number of parameters of the model in `job.output`."""
    data = open_job_data(job)
    load = AutoModelForCausalLM.from_pretrained
    model = load(job.output, dtype=torch.float32, use_safetensors=True, trust_remote_code=False).eval()
    loss = held_out_loss(model, data.validation_batch(job.training.evaluate_samples))
    return {"loss": loss, "parameters": sum(p.numel() for p in model.parameters())}


def main(arguments: list[str]) -> int:
    """Verify the job of the given file; return 0 or the error's exit code."""
    try:
        if len(arguments) != 1:
            raise InputError("one argument is needed", hint="python -m isthmus.train.process.verify JOB.json")
        job = Job.model_validate_json(Path(arguments[0]).read_text(encoding="utf-8"))
        print(json.dumps(verify(job)))
    except IsthmusError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
