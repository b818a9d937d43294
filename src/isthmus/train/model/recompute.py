"""`run_layer`: a decoder layer of which less is kept for the backward than autograd would keep.

| kind | kept | computed again in the layer's own backward |
|---|---|---|
| `none` | everything | nothing |
| `selective` | its input, the results of its products and of the fused attention core | element-wise work |
| `moe` | everything but the inside of the experts | the experts |
| `full` | the layer's input | the layer |

It is what `isthmus.plan.memory.stage_memory` counts. Source of `selective`: V. Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models", MLSys 2023, for kernels that keep no scores.
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

Kind = Literal["none", "selective", "full", "moe"]

Run = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
"""A layer: hidden states [B, S, H] in, hidden states and its balance loss out."""

_PRODUCTS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.addmm.default})
_CORES = frozenset(
    getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default
    for name in (
        "flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention",
    )
) | {torch.ops.aten._grouped_mm.default}  # fmt: skip


@dataclass(frozen=True)
class Recomputation:
    """What is recomputed of a stage's first `num_layers` layers (None: of all)."""

    kind: Kind = "none"
    num_layers: int | None = None

    def of(self, place: int) -> Kind:
        """Return the kind for the layer at `place` (from 0) of the stage."""
        return self.kind if self.num_layers is None or place < self.num_layers else "none"


KEEP_ALL = Recomputation()


def run_layer(kind: Kind, layer: nn.Module, run: Run, hidden: torch.Tensor) -> Any:
    """Return `run(hidden)`, which computes `layer`, so that its backward recomputes what `kind` says.

    The same kernels see the same numbers again: the bits are those of `none`.
    """
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    if kind == "full":
        return again(run, hidden)
    if kind == "selective":
        contexts = partial(create_selective_checkpoint_contexts, partial(_policy, _last_weight(layer)))
        return again(run, hidden, context_fn=contexts)
    experts = getattr(layer.mlp, "experts", None)
    if kind == "moe" and experts is not None:
        with _replaced(experts, partial(again, experts.forward)):
            return run(hidden)
    return run(hidden)


def _policy(unneeded: int, _: object, op: object, *args: torch.Tensor, **__: object) -> CheckpointPolicy:
    """Keep the results of products and attention cores, but of none with the weight at `unneeded`."""
    kept = op in _CORES or (op in _PRODUCTS and args[-1].data_ptr() != unneeded)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _last_weight(layer: nn.Module) -> int:
    """Return where the weight of a dense layer's last product is: no backward asks for its result."""
    last = getattr(layer.mlp, "down_proj", None)
    return int(last.weight.data_ptr()) if isinstance(last, nn.Linear) else 0


@contextmanager
def _replaced(module: nn.Module, forward: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Let `module` compute by `forward` for a while."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before
