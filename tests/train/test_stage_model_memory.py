"""A worker never holds more than its own layers: bytes counted where torch allocates them."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from isthmus.train.stage_model import build_stage
from tests.train.small_models import save_model, write_config


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of CPU storages that are alive while the mode is on, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                self._watch(leaf.untyped_storage())
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, num_bytes)

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
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
