"""Export a model over another one and be cut off at each file operation: run by `test_weights`.

`python -m tests.train.crash_exports FOLDER` prints the number of cuts. After each, the folder must hold the
old model, the whole new one, or none that a reader would open, and the next export must finish.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import pairwise
from pathlib import Path

import torch

from isthmus.core.model import WEIGHTS_FILE, WEIGHTS_INDEX_FILE
from isthmus.train.model.load_weights import read_tensor_headers
from isthmus.train.model.save_weights import export_shard, finish_export
from isthmus.train.model.stage_model import StageModel, build_stage
from tests.train.folder_crash_points import cut_off
from tests.train.small_models import NUM_LAYERS, save_model


def export(stages: list[StageModel], output: Path, model: Path) -> None:
    """Write all shards and make them the model."""
    for rank, stage in enumerate(stages):
        export_shard(stage, output, rank)
    finish_export(output, model, len(stages))


def is_whole(output: Path, num_tensors: int) -> bool:
    """Tell whether a reader finds the new model; fail where it finds half of one, or of two."""
    assert not (output / WEIGHTS_FILE).exists() or not (output / WEIGHTS_INDEX_FILE).exists()
    if not (output / WEIGHTS_INDEX_FILE).exists():
        return False
    weight_map = json.loads((output / WEIGHTS_INDEX_FILE).read_text())["weight_map"]
    assert len(weight_map) == num_tensors
    assert all(name in read_tensor_headers(output / file) for name, file in weight_map.items())
    assert (output / "config.json").exists()
    return True


def main(folder: Path) -> int:
    """Cut at every operation until the child reaches its end; return how many cuts there were."""
    torch.set_num_threads(1)
    model, cuts = folder / "model", (0, 1, NUM_LAYERS)
    num_tensors = len(save_model(model, "llama").state_dict())
    stages = [
        build_stage(model, layers, dtype=torch.float32, device="cpu", seed=0, weights="load")
        for layers in pairwise(cuts)
    ]
    for before in range(1, 1000):
        output = folder / f"{before:04d}"
        save_model(output, "llama", num_hidden_layers=2)  # the folder holds another model
        died = cut_off(output, before, lambda to=output: export(stages, to, model))
        if not (output / WEIGHTS_FILE).exists():
            is_whole(output, num_tensors)
        export(stages, output, model)
        assert is_whole(output, num_tensors)
        assert not (output / WEIGHTS_FILE).exists()
        if not died:
            return before - 1
    return 1000


if __name__ == "__main__":
    print(main(Path(sys.argv[1])))
    sys.stdout.flush()
    os._exit(0)
