"""A worker never holds more than its own layers: bytes counted where torch allocates them."""

from __future__ import annotations

import itertools
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from isthmus.train.model.recompute import RecomputePolicy
from isthmus.train.model.stage_model import StageModel, build_stage
from tests.train.small_models import save_model, write_config
from tests.train.storage_keys import storage_key

pytestmark = pytest.mark.slow


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of CPU storages that are alive while the mode is on, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                self._watch(leaf.untyped_storage())
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage_key(storage), storage.nbytes()
        if key in self.known:
            return
        self.known.add(key)
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, num_bytes)

    def _forget(self, key: int, num_bytes: int) -> None:
        self.known.discard(key)
        self.now -= num_bytes


WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 12}


@pytest.mark.parametrize("weights", ["random", "load"])
@pytest.mark.parametrize("variant", ["qwen3", "mixtral"])
def test_peak_memory_is_the_stage_and_a_tensor(tmp_path, variant, weights):
    """Building 2 of 12 layers allocates those 2 layers and at most two tensors more, never the model."""
    make = save_model if weights == "load" else write_config
    make(tmp_path, variant, **WIDE)
    with LiveBytes() as live:
        stage = build_stage(tmp_path, (4, 6), dtype=torch.float32, device="cpu", seed=0, weights=weights)
    sizes = [parameter.nbytes for parameter in stage.parameters()]
    assert sum(sizes) <= live.peak <= sum(sizes) + 2 * max(sizes)


def test_nothing_of_a_stage_stays_on_the_meta_device(tmp_path):
    """Parameters and buffers of a stage are real."""
    stage = build_stage(
        write_config(tmp_path, "llama"), (0, 4), dtype=torch.float32, device="cpu", seed=0, weights="random"
    )
    tensors = [*stage.parameters(), *stage.buffers()]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}


@pytest.mark.parametrize("variant", ["llama", "mixtral"])
def test_a_recomputed_layer_keeps_its_input_alone(variant: str, tmp_path: Path) -> None:
    """Each recomputed layer keeps [B, S, H]; while it runs backward only its own tensors are rebuilt."""
    stage = build_stage(
        write_config(tmp_path, variant), (1, 3), dtype=torch.float32, device="cpu", seed=0, weights="random"
    )
    hidden = torch.randn(4, 32, stage.hidden_size)
    stage(hidden)  # positions and masks exist from here on
    kept, peaks = [], []
    for layers in range(3):
        again = RecomputePolicy("full", layers)
        x = hidden.clone().requires_grad_()
        kept.append(kept_bytes(stage, x, again))
        with LiveBytes() as live:
            stage.compute(x, again)[0].sum().backward()
        peaks.append(live.peak)
    per_layer = [before - after for before, after in itertools.pairwise(kept)]
    assert kept[2] <= 4 * hidden.nbytes
    assert min(per_layer) > 5 * hidden.nbytes
    assert peaks[2] < peaks[0] - 0.5 * min(per_layer)


def kept_bytes(stage: StageModel, x: torch.Tensor, again: RecomputePolicy) -> int:
    """Return the bytes of the distinct storages that a forward keeps for the backward, weights aside."""
    own = {one.untyped_storage().data_ptr() for one in stage.parameters()}
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        stage.compute(x, again)[0].sum().backward()
    return sum(seen.values())
