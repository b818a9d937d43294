"""`run_layer`: run a decoder layer with activation recomputation.

| kind | saved | recomputed in the layer's backward |
|---|---|---|
| `empty_section` | all activations | nothing |
| `selective` | layer input, results of matrix products and of fused attention | element-wise operations |
| `moe` | all except activations inside the experts | the experts |
| `full` | layer input | the layer |

`isthmus.plan.memory.stage_memory` counts the same. Source of `selective`: V. Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models", MLSys 2023, here for kernels that do not save scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

RecomputeKind = Literal["none", "selective", "full", "moe"]

LayerFunction = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
"""A layer: hidden states [B, S, H] -> (hidden states [B, S, H], balance loss or None)."""

_MATMUL_OPS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.addmm.default})
_FUSED_OPS = frozenset(
    getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default
    for name in (
        "flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention",
    )
) | {torch.ops.aten._grouped_mm.default}  # fmt: skip


@dataclass(frozen=True)
class RecomputePolicy:
    """Recomputation `kind` of the first `num_layers` layers of a stage (None: all)."""

    kind: RecomputeKind = "none"
    num_layers: int | None = None

    def kind_of(self, layer: int) -> RecomputeKind:
        """Return the kind of layer `layer` (from 0) of the stage."""
        return self.kind if self.num_layers is None or layer < self.num_layers else "none"


NO_RECOMPUTE = RecomputePolicy()


def run_layer(kind: RecomputeKind, layer: nn.Module, forward: LayerFunction, hidden: torch.Tensor) -> Any:
    """Return `forward(hidden)`, the output of `layer`; its backward recomputes as `kind` says.

    `hidden` is [B, S, H]. Results are bit-identical to those of `empty_section`.
    """
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    if kind == "full":
        return again(forward, hidden)
    if kind == "selective":
        contexts = partial(create_selective_checkpoint_contexts, partial(_selective_policy, _last_weight_memory(layer)))
        return again(forward, hidden, context_fn=contexts)
    experts = getattr(layer.mlp, "experts", None)
    if kind == "moe" and experts is not None:
        with _forward_replaced(experts, partial(again, experts.forward)):
            return forward(hidden)
    return forward(hidden)


def _selective_policy(unneeded: int, _: object, op: object, *args: torch.Tensor, **__: object) -> CheckpointPolicy:
    """Save results of matrix products and attention, except of the weight in the memory `unneeded`."""
    kept = op in _FUSED_OPS or (op in _MATMUL_OPS and args[-1].untyped_storage()._cdata != unneeded)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _last_weight_memory(layer: nn.Module) -> int:
    """Return the memory object of a dense layer's last weight, whose product backward does not need.

    The object stays when the memory is gathered again at another address.
    """
    last = getattr(layer.mlp, "down_proj", None)
    return int(last.weight.untyped_storage()._cdata) if isinstance(last, nn.Linear) else 0


@contextmanager
def _forward_replaced(module: nn.Module, forward: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Replace the `forward` of `module` in this context."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before
