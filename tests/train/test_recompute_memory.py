"""Rule: what a recomputed layer keeps is what the planner counts for it, never noticeably more.

Counted are the bytes that torch allocates in a forward of two layers and that are alive at its end.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from isthmus.core.model import load_model
from isthmus.plan.profile.model_profile import profile_model
from isthmus.train.model.recompute import RecomputeKind, RecomputePolicy, run_layer
from isthmus.train.model.stage_model import StageModel, build_stage
from tests.train.small_models import write_config
from tests.train.storage_keys import storage_key
from tests.train.test_stage_model_memory import LiveBytes

pytestmark = pytest.mark.slow
SAMPLES, TOKENS = 2, 128
WIDE = {
    "hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 16,
}  # fmt: skip

# Shares of the planner's count, least and most. `full` is exact. `moe` keeps the choice of experts and their
# weights besides, 12 bytes a routed token. `selective` is exact for plain layers in fp32; elsewhere the
# planner is on the safe side: what a norm works on (bf16: its fp32 copy) and what routing makes is brought
# back from results that are kept anyway.
CASES: list[tuple[str, torch.dtype, RecomputeKind, float, float]] = [
    ("llama", torch.float32, "full", 1.0, 1.0),
    ("llama", torch.float32, "selective", 0.99, 1.0),
    ("llama", torch.bfloat16, "selective", 0.8, 1.0),
    ("qwen3", torch.float32, "selective", 0.85, 1.0),
    ("mixtral", torch.float32, "full", 1.0, 1.0),
    ("mixtral", torch.float32, "selective", 0.8, 1.0),
    ("mixtral", torch.float32, "moe", 1.0, 1.01),
    ("mixtral", torch.bfloat16, "moe", 1.0, 1.07),
    ("qwen3-moe", torch.float32, "moe", 1.0, 1.01),
]


def kept_bytes(stage: StageModel, x: torch.Tensor, kind: RecomputeKind) -> int:
    """Return the bytes that the layers of `stage` keep of `x` [B, S, H], their input included."""
    stage.compute(x.clone().requires_grad_(), RecomputePolicy(kind))  # positions and masks exist from here on
    places = stage.position_cache.get(x)
    known = [*stage.parameters(), *stage.buffers(), *(places.rotation or ()), x]
    live = LiveBytes()
    live.known |= {storage_key(one.untyped_storage()) for one in known}
    hidden = x.requires_grad_()
    with live:
        for layer in stage.model.layers.values():
            hidden, _ = run_layer(kind, layer, partial(stage.run_decoder_layer, layer, places, False), hidden)
    return live.now + x.nbytes - hidden.nbytes


@pytest.mark.parametrize(("variant", "dtype", "kind", "least", "most"), CASES)
def test_what_is_kept_is_what_is_counted(
    variant: str, dtype: torch.dtype, kind: RecomputeKind, least: float, most: float, tmp_path: Path
) -> None:
    """Per kind of recomputation, family and precision: within the stated share of the planner's count."""
    config = write_config(tmp_path, variant, **WIDE)
    stage = build_stage(config, (2, 4), dtype=dtype, device="cpu", seed=0, weights="random")
    layers = profile_model(load_model(config)).layers[2:4]
    counted = sum(one.activation_bytes(SAMPLES * TOKENS, TOKENS, dtype.itemsize, kind) for one in layers)
    x = torch.randn(SAMPLES, TOKENS, stage.hidden_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert least * counted - 1 <= kept_bytes(stage, x, kind) <= most * counted + 1
