"""Reads configuration modules with torchtitan's own parser: JSON in, JSON out. Run as a process of its own.

In: `[{"file": "config.py", "world": 16}, ...]`. Out, one each: what `ConfigManager`, `ParallelDims` and the
model, built on the meta device, came to, or `{"refused": "why"}`.
"""

import dataclasses
import importlib
import json
import sys
from pathlib import Path

import torch
from torch.distributed.pipelining.schedules import get_schedule_class
from torchtitan.config import ConfigManager
from torchtitan.distributed.parallel_dims import ParallelDims


def read(file: Path, world: int) -> dict:
    """Return what the real parser makes of a module."""
    sys.path.insert(0, str(file.parent))
    importlib.invalidate_caches()
    config = ConfigManager().parse_args(["--module", file.stem, "--config", "plan"])
    dims = ParallelDims.from_config(config.parallelism, world)
    model = config.model_spec.model
    model.update_from_config(config=config)
    with torch.device("meta"):
        built = model.build()
    names = {name for name, _ in built.named_children()}
    names |= {f"layers.{name}" for name, _ in built.layers.named_children()}
    parts = config.parallelism.module_fqns_per_model_part
    unknown = [name for part in parts or [] for name in part if name not in names]
    if unknown:
        raise ValueError(f"the model has no {unknown}")
    if dims.pp > 1:
        get_schedule_class(config.parallelism.pipeline_parallel_schedule)
    return {
        "dims": {key: getattr(dims, key) for key in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")},
        "parts": parts,
        "parameters": sum(one.numel() for one in dict.fromkeys(built.parameters())),
        "training": {f.name: getattr(config.training, f.name) for f in dataclasses.fields(config.training)},
        "schedule": config.parallelism.pipeline_parallel_schedule,
        "micro_batch_size": config.parallelism.pipeline_parallel_microbatch_size,
        "recompute": type(config.activation_checkpoint).__qualname__,
    }


def main() -> None:
    """Answer every request."""
    answers = []
    for request in json.load(sys.stdin):
        try:
            answers.append(read(Path(request["file"]), request["world"]))
        except (Exception, SystemExit) as error:
            answers.append({"refused": f"{type(error).__name__}: {error}"})
    sys.__stdout__.write("\nANSWER " + json.dumps(answers) + "\n")


if __name__ == "__main__":
    main()
